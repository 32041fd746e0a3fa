"""Overview diagram: modules instead of ops, repeated blocks folded, so that any model fits on one screen."""

from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import Collection, Hashable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import pairwise

import networkx as nx

from gradrewrite.viz._diagram import Diagram, Item, Link
from gradrewrite.viz._graph_view import GraphView, Node, call_name, lane_of_site
from gradrewrite.viz._scene import ColorSample

MOST = 16  # boxes below each other
_ANY = "\0"  # for any number; no name has it
_NUMBER = re.compile(r"(?<![^.])\d+(?![^.])")

_Call = tuple[str, int]
_Key = tuple[tuple[_Call, ...], int]  # module calls, and which stretch of a module's own ops (-1: the whole module)


@dataclass(slots=True)
class _Group:
    """Nodes of one box: calls of a module or a stretch of ops between modules; several where they are equal."""

    keys: list[_Key]
    nodes: list[Node] = field(default_factory=list)

    @property
    def first(self) -> int:
        return min((n.order for n in self.nodes), default=-1)


def overview_diagram(graph_view: GraphView, colors: Mapping[str, ColorSample], title: str) -> Diagram:
    """Collapse a graph to at most ``MOST`` boxes a lane.

    Args:
        graph_view: The graph.
        colors: By site; a box has the strongest of its sites.
        title: Title of the diagram.
    """
    nodes = [n for n in graph_view.nodes.values() if _is_drawn(n)]
    groups = _choose(nodes)
    of_node = {node.name: number for number, group in enumerate(groups) for node in group.nodes}
    for node in graph_view.nodes.values():
        if not _is_drawn(node):
            of_node[node.name] = -2 if node.mark == "records" else -1
    labels = _numbered([_label(group) for group in groups])
    items = [
        item
        for number, (group, label) in enumerate(zip(groups, labels, strict=True))
        for item in _items(graph_view, number, group, label, colors)
    ]
    records = [n for n in graph_view.nodes.values() if n.mark == "records"]
    if records:
        items.append(_item(graph_view, "records", "backward", -1, "records", "carried out of the graph", records))
    links = _links(graph_view, of_node, {item.key for item in items})
    summary = (
        f"{len(graph_view.nodes)} nodes, {len(graph_view.sites)} sites, {len(graph_view.edits)} edits, "
        f"{graph_view.num_inserted} nodes inserted"
    )
    caption = [summary, "a number at an edge counts tensors; dashed: forward values saved for the backward"]
    return Diagram(title, ("forward", "backward"), items, links, caption)


def _is_drawn(node: Node) -> bool:
    """Return whether a node belongs to a module's box: ops, and live tensors of actions."""
    return (node.role == "op" or node.mark == "edit") and node.order >= 0


def _choose(nodes: Sequence[Node]) -> list[_Group]:
    """Return the groups of the deepest level that fits: unfolded, else folded, else neighbors merged."""
    deepest = max((len(n.calls) for n in nodes), default=0)
    for fold in (False, True):
        best: list[_Group] | None = None
        for depth in range(1, deepest + 1):
            groups = _groups(nodes, depth)
            groups = _folded(groups) if fold else groups
            if len(groups) <= MOST:
                best = groups
        if best is not None:
            return best
    groups = _folded(_groups(nodes, 1))
    return _merged(groups) if len(groups) > MOST else groups


def _groups(nodes: Sequence[Node], depth: int) -> list[_Group]:
    """Return modules at a depth and the stretches of ops between them, in the order of the forward."""
    stretch: Counter[tuple[_Call, ...]] = Counter()
    keys: dict[int, _Key] = {}
    last: _Key | None = None
    for node in sorted(nodes, key=lambda n: n.order):
        calls, order = node.calls, node.order
        if order in keys:
            continue
        if len(calls) >= depth:
            keys[order] = (calls[:depth], -1)
        elif last is not None and last == (calls, stretch[calls] - 1):
            keys[order] = last
        else:
            keys[order] = (calls, stretch[calls])
            stretch[calls] += 1
        last = keys[order]
    parts = Counter(calls[:n] for calls, _ in set(keys.values()) for n in range(1, len(calls) + 1))
    groups: dict[_Key, _Group] = {}
    for node in nodes:
        calls, number = keys[node.order]
        key = (calls, -1 if calls and parts[calls] == 1 else number)  # nothing else of the module stands by itself
        groups.setdefault(key, _Group([key])).nodes.append(node)
    return sorted(groups.values(), key=lambda g: g.first)


def _folded(groups: Sequence[_Group]) -> list[_Group]:
    """Fold equal groups into one: same name up to numbers, same ops, same edits.

    Calls of one module are equal if all have edits or none (the first and the last step of a recurrence differ in ops).
    """
    alike: dict[Hashable, _Group] = {}
    again = {_names(group) for group in groups if any(number for _, number in group.keys[0][0])}
    for group in groups:
        ((calls, stretch),) = group.keys
        kind: Hashable
        if _names(group) in again:
            kind = (_names(group), stretch, any(n.mark for n in group.nodes))
        else:
            template = tuple(_NUMBER.sub(_ANY, name) for name, _ in calls)
            ops = frozenset(Counter((n.target, n.lane, n.mark) for n in group.nodes).items())
            kind = (template, stretch if calls else None, ops)
        known = alike.setdefault(kind, _Group([]))
        known.keys += group.keys
        known.nodes += group.nodes
    return sorted(alike.values(), key=lambda g: g.first)


def _names(group: _Group) -> tuple[str, ...]:
    return tuple(name for name, _ in group.keys[0][0])


def _merged(groups: Sequence[_Group]) -> list[_Group]:
    """Merge neighbors until the groups fit."""
    size = -(-len(groups) // MOST)
    parts = [groups[n : n + size] for n in range(0, len(groups), size)]
    return [_Group([k for g in part for k in g.keys], [n for g in part for n in g.nodes]) for part in parts]


def _items(
    graph_view: GraphView, number: int, group: _Group, label: str, colors: Mapping[str, ColorSample]
) -> list[Item]:
    items = []
    for lane in ("forward", "backward"):
        nodes = [n for n in group.nodes if n.lane == lane]
        if not nodes and lane == "backward":
            continue
        plain = [n for n in nodes if not n.mark]
        small = f"{len(plain)} op{'s' if len(plain) != 1 else ''}"
        item = _item(graph_view, f"{lane[0]}{number}", lane, number, label, small, nodes)
        orders = {n.order for n in group.nodes}
        sites = [str(s) for s, order in graph_view.orders.items() if order in orders and lane_of_site(s) == lane]
        samples = [colors[site] for site in sites if site in colors]
        if samples:
            worst = max(samples, key=lambda sample: (not math.isfinite(sample.value), sample.value))
            item = replace(item, fill=worst.color, title=f"{item.title}\nstrongest: {worst.text}")
        items.append(item)
    return items


def _item(graph_view: GraphView, key: str, column: str, row: int, text: str, small: str, nodes: Sequence[Node]) -> Item:
    inserted = [n.name for n in nodes if n.mark]
    edits = list(dict.fromkeys(n.edit for n in nodes if n.edit >= 0))
    empty = _empty_edits(graph_view, {n.order for n in nodes}, column)
    lines = [f"{graph_view.edits[e].text} at {graph_view.edits[e].site}" for e in [*edits, *empty]]
    title = "\n".join([text, f"{column}: {len(nodes)} nodes, {len(inserted)} inserted", *lines])
    data = {"inserted": " ".join(inserted), "edits": " ".join(map(str, [*edits, *empty]))} if inserted or empty else {}
    badge = f"+{len(inserted)} inserted" if inserted else (f"+{len(empty)} without nodes" if empty else "")
    classes = ("records",) if key == "records" else ()
    return Item(key, column, row, text, small, badge, classes, title, data)


def _empty_edits(graph_view: GraphView, orders: Collection[int], lane: str) -> list[int]:
    """Return the edits without nodes of their own whose site belongs to these ops."""
    return [
        number
        for number, edit in enumerate(graph_view.edits)
        if not edit.nodes and graph_view.orders[edit.site] in orders and lane_of_site(edit.site) == lane
    ]


def _label(group: _Group) -> str:
    """Return a label: ``blocks.[0-23].attn x 24``, ``cell x 40``, ``/add, mul``, ``first ... last (12)``."""
    if len({_template(key) for key in group.keys}) > 1:
        return f"{_name(group.keys[0])} ... {_name(group.keys[-1])} ({len(group.keys)})"
    calls, stretch = group.keys[0]
    names = [call[0] for key in group.keys for call in key[0][-1:]]
    if len(group.keys) == 1:
        name = call_name(calls[-1]) if calls else ""
    elif len(set(names)) == 1:
        name = names[0]
    else:
        name = _pattern(list(dict.fromkeys(names)))
    times = f" x {len(group.keys)}" if len(group.keys) > 1 else ""
    return f"{name}{_ops(group) if stretch >= 0 else ''}{times}"


def _numbered(labels: Sequence[str]) -> list[str]:
    """Append numbers to repeated labels."""
    seen: Counter[str] = Counter()
    found = []
    for label in labels:
        found.append(f"{label} ({seen[label] + 1})" if seen[label] else label)
        seen[label] += 1
    return found


def _name(key: _Key) -> str:
    return call_name(key[0][-1]) if key[0] else "(model)"


def _template(key: _Key) -> tuple[str, int]:
    return (_NUMBER.sub(_ANY, key[0][-1][0]), key[1]) if key[0] else ("", 0)


def _pattern(names: Sequence[str]) -> str:
    """Return ``blocks.[0-23].attn`` for names that differ in numbers."""
    split = [name.split(".") for name in names]
    parts = []
    for column in zip(*split, strict=True):
        distinct = list(dict.fromkeys(column))
        parts.append(distinct[0] if len(distinct) == 1 else f"[{_ranges([int(d) for d in distinct])}]")
    return ".".join(parts)


def _ranges(numbers: Sequence[int]) -> str:
    """Return ``0-3,5`` for 0, 1, 2, 3, 5."""
    ordered = sorted(numbers)
    spans = [[ordered[0], ordered[0]]]
    for before, after in pairwise(ordered):
        if after == before + 1:
            spans[-1][1] = after
        else:
            spans.append([after, after])
    return ",".join(str(a) if a == b else f"{a}-{b}" for a, b in spans)


def _ops(group: _Group) -> str:
    first = group.keys[0][0]
    ops = list(dict.fromkeys(n.op for n in group.nodes if n.lane == "forward" and n.calls == first))
    return "/" + ", ".join(ops[:2]) + (", ..." if len(ops) > 2 else "")


def _links(graph_view: GraphView, of_node: Mapping[str, int], keys: set[str]) -> list[Link]:
    """Return the edges between boxes, with the number of tensors."""
    names = {name: _key(graph_view.nodes[name], number) for name, number in of_node.items()}
    merged = nx.DiGraph()
    for source, target in graph_view.edges:
        a, b = names[source], names[target]
        if a != b and a in keys and b in keys:
            tensors = merged.get_edge_data(a, b, {"tensors": 0})["tensors"]
            merged.add_edge(a, b, tensors=tensors + 1)
    order = {key: n for n, key in enumerate(dict.fromkeys(names.values()))}
    found = sorted(merged.edges(data="tensors"), key=lambda edge: (order[edge[0]], order[edge[1]]))
    return [Link(a, b, _kind(a, b), count) for a, b, count in found]


def _kind(source: str, target: str) -> str:
    if target == "records":
        return "carried"
    return "saved" if source[0] == "f" and target[0] != "f" else ""


def _key(node: Node, number: int) -> str:
    if number == -2:
        return "records"
    return "outside" if number == -1 else f"{node.lane[0]}{number}"
