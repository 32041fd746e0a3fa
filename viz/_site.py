"""The view of one site: its neighborhood, its edits and the replaced edges."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace

import graphviz
import networkx as nx

from gradrewrite.diagnostics.clipping import Clip
from gradrewrite.ir.graph_view import GraphView, contracted_edges, hidden_nodes, visible_outputs
from gradrewrite.sites import Site
from gradrewrite.viz._fonts import describe_node, fit, text_width
from gradrewrite.viz._graphviz import run_dot
from gradrewrite.viz._ladder import edit_part
from gradrewrite.viz._scene import (
    HEAD,
    PAD,
    SMALL,
    SWATCH,
    TEXT,
    Box,
    ColorSample,
    Label,
    LegendEntry,
    Line,
    Scene,
    fit_boxes,
)
from gradrewrite.viz._theme import CUT, INSERTED, INSERTED_EDGE, PAPER, SAVED

MOST = 24  # boxes that were not inserted
_WIDEST, _HIGH, _MARGIN = 340.0, 36.0, 16.0
_Edges = Mapping[tuple[str, str], str]  # kind by pair of keys


class SiteView:
    """Boxes and edges around one site, before and after the rewrite.

    Attributes:
        boxes: Boxes without positions, in execution order.
        edges: Kinds of the edges by pairs of keys: ``""``, ``"saved"``, ``"cut"`` (replaced by the rewrite).
        num_left_out: How many nodes within ``hops`` have no room.
    """

    def __init__(
        self,
        before: GraphView,
        after: GraphView,
        site: Site,
        hops: int,
        clips: Mapping[int, Clip],
        colors: Mapping[str, ColorSample],
        root_cause: Collection[str],
    ) -> None:
        """Read the nodes within ``hops`` edges of the site.

        ``colors`` are by key of an edit's box.
        """
        anchor = before.anchors[site]
        own = [f"edit {number}" for number, edit in enumerate(after.edits) if edit.site == site]
        old, new = _pairs(before, anchor), _pairs(after, anchor)
        kept = {key: "" for key in new}
        cut = {pair for pair in old if pair not in kept and anchor in pair}
        graph = nx.DiGraph([*kept, *cut])
        graph.add_nodes_from([anchor, *own])
        distance = _distances(graph, anchor, own, hops)
        self._view, self._site = after, site
        order = {name: number for number, name in enumerate([*after.nodes, *(label for label, _ in after.returned)])}
        plain = sorted((k for k in distance if not k.startswith("edit ")), key=lambda k: (distance[k], order[k]))
        shown = {*plain[:MOST], *own, *(k for k in distance if k.startswith("edit "))}
        self.num_left_out = max(0, len(plain) - MOST)
        lanes = {name: node.lane for name, node in after.nodes.items()}
        self.edges: dict[tuple[str, str], str] = {}
        for a, b in [*kept, *cut]:
            if a in shown and b in shown:
                is_saved = lanes.get(a) == "forward" and lanes.get(b, "backward") == "backward" and b in lanes
                self.edges[a, b] = "cut" if (a, b) in cut else "saved" if is_saved else ""
        boxes = []
        for key in sorted(shown, key=lambda k: order[k] if k in order else _first_node(after, k, order)):
            classes = [*(["anchor"] if key == anchor else []), *(["root_cause"] if key in root_cause else [])]
            boxes.append(_box(after, key, clips, classes, colors.get(key)))
        self.boxes = fit_boxes(boxes)

    def scene(
        self, title: str, notes: Sequence[str], legend: Sequence[LegendEntry], *, use_graphviz: bool = True
    ) -> Scene:
        """Lay out the view, by Graphviz or in rows.

        Raises:
            GraphvizError: Graphviz could not be used.
        """
        top = 40.0 + SWATCH * len(notes)
        sizes = {box.key: (box.width, box.height) for box in self.boxes}
        places, paths, width, height = (_by_graphviz if use_graphviz else _in_rows)(sizes, self.edges)
        boxes = [replace(box, x=_MARGIN + places[box.key][0], y=top + places[box.key][1]) for box in self.boxes]
        lines = []
        for (a, b), kind in self.edges.items():
            points = tuple((_MARGIN + x, top + y) for x, y in paths[a, b])
            lines.append(Line(a, b, points, (kind,) if kind else ()))
            if kind == "cut":
                x, y = _middle(points)
                lines += [Line(a, b, ((x - 6, y - dy), (x + 6, y + dy)), ("cross",)) for dy in (6, -6)]
        entries = [
            LegendEntry(PAPER, CUT, "red, crossed out: replaced by the rewrite"),
            LegendEntry(INSERTED, INSERTED_EDGE, "an edit"),
            LegendEntry(PAPER, SAVED, "dashed: a forward value saved for the backward"),
            *legend,
        ]
        widest = max(text_width(text, SMALL) for text in (*notes, *(e.text for e in entries), "x" * 40))
        width = max(width + 2 * _MARGIN, min(widest + 60, 900.0))
        labels = [Label(_MARGIN, 22, fit(title, width - 2 * _MARGIN, HEAD), "head")]
        labels += [
            Label(_MARGIN, 40 + SWATCH * n, fit(note, width - 2 * _MARGIN, SMALL)) for n, note in enumerate(notes)
        ]
        return Scene(title, width, top + height + SWATCH * len(entries) + 24, (), lines, boxes, labels, entries)

    def notes(self, records: Mapping[str, float]) -> list[str]:
        """Return lines about the site: shape, source, edits, its last records."""
        site = self._site
        sizes = ", ".join("?" if size is None else str(size) for size in site.shape)
        lines = [f"[{sizes}] {str(site.dtype).removeprefix('torch.')}", *([site.source] if site.source else [])]
        own = [edit for edit in self._view.edits if edit.site == site]
        lines += [f"edit: {edit.text}, {len(edit.nodes)} nodes" for edit in own] or ["no edit acts on this site"]
        lines += [f"{name} = {value:.6g}" for name, value in records.items()]
        return lines + ([f"{self.num_left_out} more nodes are not shown"] if self.num_left_out else [])


def _pairs(graph_view: GraphView, anchor: str) -> Counter[tuple[str, str]]:
    """Return the edges of a graph, with the nodes of an edit as one."""
    hidden = hidden_nodes(graph_view) - {anchor}
    key = {name: f"edit {node.edit}" if node.edit >= 0 else name for name, node in graph_view.nodes.items()}
    pairs = Counter((key[a], key[b]) for a, b in contracted_edges(graph_view, hidden) if key[a] != key[b])
    outputs = visible_outputs(graph_view, graph_view.returned, hidden)
    pairs.update((key[name], label) for label, name in outputs if name not in hidden)
    return pairs


def _distances(graph: nx.DiGraph[str], anchor: str, own: Sequence[str], hops: int) -> dict[str, int]:
    """Return how far the nodes are that a site is computed from, and those that read it."""
    found: dict[str, int] = {}
    for one_way in (graph, graph.reverse(copy=False)):
        for seed, reach in [(anchor, hops), *((key, min(hops, 1)) for key in own)]:
            for other, far in nx.single_source_shortest_path_length(one_way, seed, cutoff=reach).items():
                found[other] = min(far, found.get(other, far))
    return found


def _first_node(graph_view: GraphView, key: str, order: Mapping[str, int]) -> float:
    names = graph_view.edits[int(key.removeprefix("edit "))].nodes
    return order[names[0]] if names else float(len(order))


def _box(
    graph_view: GraphView,
    key: str,
    clips: Mapping[int, Clip],
    classes: Sequence[str],
    sample: ColorSample | None,
) -> Box:
    inside: list[tuple[dict[str, str], str]] = []
    data: dict[str, str] = {}
    if key.startswith("edit "):
        number = int(key.removeprefix("edit "))
        edit = graph_view.edits[number]
        part = edit_part(graph_view, key, [number], clips)
        text, small, title, classes = part.text, part.small, part.title, ["inserted", *classes]
        data = {"edit": str(edit.site), "action": edit.text}
        inside = [({"node": name}, describe_node(graph_view, graph_view.nodes[name])) for name in edit.nodes]
    elif key in graph_view.nodes:
        node = graph_view.nodes[key]
        text = f"{node.op}: {node.aten}" if node.role == "op" else node.op_and_argument
        small = f"{node.module_call or '(model)'}, {node.lane}" if node.role == "op" else ""
        small = f"{small}; the value of the site" if "anchor" in classes else small
        title, data = describe_node(graph_view, node), {"node": key}
    else:
        text, small, title, data = key, "returned", key, {"returned": key}
    if sample is not None:
        title = f"{title}\n{sample.text}"
    width = min(max(text_width(text, TEXT), text_width(small, SMALL)) + 2 * PAD + 2, _WIDEST)
    fill = sample.color if sample is not None else ""
    return Box(key, 0, 0, width, _HIGH, text, small, ("node", *classes), title, data, inside, fill)


_Places = tuple[dict[str, tuple[float, float]], dict[tuple[str, str], list[tuple[float, float]]], float, float]


def _by_graphviz(sizes: Mapping[str, tuple[float, float]], edges: _Edges) -> _Places:
    """Return upper left corners, paths, width and height of a layout by Graphviz's ``dot``."""
    dot = graphviz.Digraph(graph_attr={"ranksep": "0.35", "nodesep": "0.3"}, edge_attr={"arrowhead": "none"})
    dot.attr("node", shape="box", fixedsize="true", label="")
    keys = list(sizes)
    for number, key in enumerate(keys):
        dot.node(f"n{number}", width=f"{sizes[key][0] / 72:.5g}", height=f"{sizes[key][1] / 72:.5g}")
    names = {key: f"n{number}" for number, key in enumerate(keys)}
    for (a, b), kind in edges.items():
        dot.edge(names[a], names[b], constraint="false" if kind == "saved" else "true")
    pairs = {(names[a], names[b]): (a, b) for a, b in edges}
    places, paths, width, height = {}, {}, 0.0, 0.0
    for line in run_dot(str(dot.source), "plain").decode().splitlines():
        word, *rest = line.split()
        if word == "graph":
            width, height = float(rest[1]) * 72, float(rest[2]) * 72
        elif word == "node":
            key = keys[int(rest[0][1:])]
            x, y = float(rest[1]) * 72, height - float(rest[2]) * 72
            places[key] = (x - sizes[key][0] / 2, y - sizes[key][1] / 2)
        elif word == "edge":
            numbers = [float(n) * 72 for n in rest[3 : 3 + 2 * int(rest[2])]]
            path = [(x, height - y) for x, y in zip(numbers[::2], numbers[1::2], strict=True)]
            paths[pairs[rest[0], rest[1]]] = path
    return places, paths, width, height


def _in_rows(sizes: Mapping[str, tuple[float, float]], edges: _Edges) -> _Places:
    """Return upper left corners, paths, width and height, each box below all that it reads."""
    depth: dict[str, int] = {}
    for key in sizes:  # in execution order; edits of a group read each other
        depth[key] = max((depth[a] + 1 for a, b in edges if b == key and a in depth), default=0)
    rows: dict[int, float] = defaultdict(float)
    places = {}
    for key, row in depth.items():
        places[key] = (rows[row], row * (_HIGH + 28))
        rows[row] += sizes[key][0] + 24
    width, y = max(rows.values()), (max(depth.values()) + 1) * (_HIGH + 28)
    paths = {}
    for a, b in edges:
        (ax, ay), (bx, by) = places[a], places[b]
        paths[a, b] = [(ax + sizes[a][0] / 2, ay + _HIGH), (bx + sizes[b][0] / 2, by)]
    return places, paths, width, y


def _middle(points: Sequence[tuple[float, float]]) -> tuple[float, float]:
    if len(points) == 2:
        return (points[0][0] + points[1][0]) / 2, (points[0][1] + points[1][1]) / 2
    start = (len(points) - 1) // 3 // 2 * 3
    part = points[start : start + 4]
    weights = (1 / 8, 3 / 8, 3 / 8, 1 / 8)
    x, y = (sum(w * point[axis] for w, point in zip(weights, part, strict=True)) for axis in (0, 1))
    return x, y
