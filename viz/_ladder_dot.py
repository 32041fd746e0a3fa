"""The ladder as DOT source, for Graphviz's own tools."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping

import graphviz

from gradrewrite.viz._diagram_dot import LONGEST
from gradrewrite.viz._graph_view import action_name, describe, plain, run_name, shorten
from gradrewrite.viz._ladder_layout import Band, Ladder, Spot, lane_of
from gradrewrite.viz._scene import INSERTED, INSERTED_EDGE, LINE, PAPER, RECORDS, SAVED, Paint


def ladder_dot(ladder: Ladder, colours: Mapping[str, Paint]) -> str:
    """The ladder as DOT: modules are clusters, edges of the backward are reversed (``dir=back``).

    So ``dot`` puts both lanes in the order of the forward, within seconds for thousands of nodes. Inserted nodes have
    ``data_edit``, ``data_site`` and ``data_action``; ``data_node`` is the name of the fx node.
    """
    dot = graphviz.Digraph("gradrewrite")
    dot.attr(nslimit="1", nslimit1="1", mclimit="0.2", splines="line", rankdir="TB", fontname="sans-serif")
    dot.attr("node", shape="box", style="filled", fontname="sans-serif", fontsize="10", margin="0.05,0.02")
    dot.attr("edge", color=LINE, arrowsize="0.5")
    names = {spot.key: f"n{number}" for number, spot in enumerate(ladder.spots)}
    _Filler(ladder, names, colours).fill(dot, None)
    lanes = {spot.key: lane_of(spot) for spot in ladder.spots}
    for a, b in ladder.edges:
        if lanes[a] == lanes[b] == "backward":
            dot.edge(names[b], names[a], dir="back")
        elif lanes[a] == "forward" and lanes[b] == "backward":
            dot.edge(names[a], names[b], color=SAVED, style="dashed", constraint="false")
        else:
            dot.edge(names[a], names[b])
    return str(dot.source)


class _Filler:
    """Puts the boxes of the ladder into clusters, one a band."""

    def __init__(self, ladder: Ladder, names: Mapping[str, str], colours: Mapping[str, Paint]) -> None:
        self._ladder, self._names, self._colours = ladder, names, colours
        self._numbers = {band: number for number, band in enumerate(ladder.bands)}
        innermost: list[Band | None] = [None] * len(ladder.lines)
        self._inside: dict[Band | None, list[Band]] = defaultdict(list)
        for band in ladder.bands:  # outer ones come first
            self._inside[innermost[band.first]].append(band)
            for row in range(band.first, band.last + 1):
                innermost[row] = band
        self._spots: dict[Band | None, list[Spot]] = defaultdict(list)
        for spot in ladder.spots:
            self._spots[innermost[spot.row]].append(spot)

    def fill(self, part: graphviz.Digraph, band: Band | None) -> None:
        """Add the boxes of a band, and the bands inside it."""
        for spot in self._spots[band]:
            part.node(self._names[spot.key], **self._attributes(spot))
        for child in self._inside[band]:
            with part.subgraph(name=f"cluster_{self._numbers[child]}") as sub:
                label = shorten(plain("/".join(map(run_name, child.path))), 200)
                sub.attr(label=graphviz.nohtml(graphviz.escape(label)), color="#d5dde5", fontsize="9", labeljust="l")
                self.fill(sub, child)

    def _attributes(self, spot: Spot) -> dict[str, str]:
        net, node = self._ladder.net, spot.node
        data = {"node": node.name} if node is not None else {} if spot.edit >= 0 else {"returned": spot.key}
        fill, title = PAPER, describe(net, node) if node is not None else spot.key
        if spot.edit >= 0:
            edit = net.edits[spot.edit]
            data |= {"edit": str(spot.edit), "site": str(edit.site), "action": edit.text}
            fill, title = INSERTED, title if node is not None else f"{action_name(edit.action)}: no nodes of its own"
        elif node is not None and node.mark:
            fill, data["records"] = RECORDS, "1"
        is_inserted = fill != PAPER
        label = plain(f"{spot.text}\n{spot.small}" if spot.small else spot.text)
        return {
            "label": graphviz.nohtml(graphviz.escape(shorten(label, 120)).replace("\n", "\\n")),
            "tooltip": graphviz.escape(plain(shorten(title, LONGEST))),
            "fillcolor": self._colours[spot.key].colour if spot.key in self._colours else fill,
            "color": INSERTED_EDGE if is_inserted else LINE,
            "penwidth": "2" if is_inserted else "1",
            "class": "inserted" if is_inserted else "node",
            **{f"data_{name}": graphviz.escape(plain(shorten(value, LONGEST))) for name, value in data.items()},
        }
