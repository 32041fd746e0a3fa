"""The ladder as DOT source, for Graphviz's own tools."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping

import graphviz

from gradrewrite.viz._dot import data_attributes, plain_label, tooltip
from gradrewrite.viz._graph_view import action_name, call_name, describe_node
from gradrewrite.viz._ladder_layout import Band, LadderCell, LadderLayout, lane_of
from gradrewrite.viz._scene import ColorSample
from gradrewrite.viz._theme import BORDER, INSERTED, INSERTED_EDGE, LINE, PAPER, RECORDS, SAVED


def ladder_dot(ladder: LadderLayout, colors: Mapping[str, ColorSample]) -> str:
    """Return the ladder as DOT: modules are clusters, edges of the backward are reversed (``dir=back``).

    So ``dot`` puts both lanes in the order of the forward, within seconds for thousands of nodes. Inserted nodes have
    ``data_edit``, ``data_site`` and ``data_action``; ``data_node`` is the name of the fx node.
    """
    dot = graphviz.Digraph("gradrewrite")
    dot.attr(nslimit="1", nslimit1="1", mclimit="0.2", splines="line", rankdir="TB", fontname="sans-serif")
    dot.attr("node", shape="box", style="filled", fontname="sans-serif", fontsize="10", margin="0.05,0.02")
    dot.attr("edge", color=LINE, arrowsize="0.5")
    names = {cell.key: f"n{number}" for number, cell in enumerate(ladder.cells)}
    _Filler(ladder, names, colors).fill(dot, None)
    lanes = {cell.key: lane_of(cell) for cell in ladder.cells}
    for a, b in ladder.edges:
        if lanes[a] == lanes[b] == "backward":
            dot.edge(names[b], names[a], dir="back")
        elif lanes[a] == "forward" and lanes[b] == "backward":
            dot.edge(names[a], names[b], color=SAVED, style="dashed", constraint="false")
        else:
            dot.edge(names[a], names[b])
    return str(dot.source)


class _Filler:
    """Writer of the nested clusters of a ladder, one per band."""

    def __init__(self, ladder: LadderLayout, names: Mapping[str, str], colors: Mapping[str, ColorSample]) -> None:
        self._ladder, self._names, self._colors = ladder, names, colors
        self._numbers = {band: number for number, band in enumerate(ladder.bands)}
        innermost: list[Band | None] = [None] * len(ladder.lines)
        self._inside: dict[Band | None, list[Band]] = defaultdict(list)
        for band in ladder.bands:  # outer ones come first
            self._inside[innermost[band.first]].append(band)
            for row in range(band.first, band.last + 1):
                innermost[row] = band
        self._cells: dict[Band | None, list[LadderCell]] = defaultdict(list)
        for cell in ladder.cells:
            self._cells[innermost[cell.row]].append(cell)

    def fill(self, part: graphviz.Digraph, band: Band | None) -> None:
        """Add the boxes of a band, and the bands inside it."""
        for cell in self._cells[band]:
            part.node(self._names[cell.key], **self._attributes(cell))
        for child in self._inside[band]:
            with part.subgraph(name=f"cluster_{self._numbers[child]}") as sub:
                label = plain_label("/".join(map(call_name, child.path)), 200)
                sub.attr(label=label, color=BORDER, fontsize="9", labeljust="l")
                self.fill(sub, child)

    def _attributes(self, cell: LadderCell) -> dict[str, str]:
        graph_view, node = self._ladder.graph_view, cell.node
        data = {"node": node.name} if node is not None else {} if cell.edit >= 0 else {"returned": cell.key}
        fill, title = PAPER, describe_node(graph_view, node) if node is not None else cell.key
        if cell.edit >= 0:
            edit = graph_view.edits[cell.edit]
            data |= {"edit": str(cell.edit), "site": str(edit.site), "action": edit.text}
            fill, title = INSERTED, title if node is not None else f"{action_name(edit.action)}: no nodes of its own"
        elif node is not None and node.mark:
            fill, data["records"] = RECORDS, "1"
        is_inserted = fill != PAPER
        return {
            "label": plain_label(f"{cell.text}\n{cell.small}" if cell.small else cell.text, 120),
            "tooltip": tooltip(title),
            "fillcolor": self._colors[cell.key].color if cell.key in self._colors else fill,
            "color": INSERTED_EDGE if is_inserted else LINE,
            "penwidth": "2" if is_inserted else "1",
            "class": "inserted" if is_inserted else "node",
            **data_attributes(data),
        }
