"""The overview: modules instead of ops, repeated blocks folded, so that any model fits on one screen."""

from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import Collection, Hashable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import pairwise

import networkx as nx

from gradrewrite.viz._diagram import Item, Link, Sketch
from gradrewrite.viz._graph_view import Net, Node, lane_of_site, run_name
from gradrewrite.viz._scene import Paint

MOST = 16  # boxes below each other
_ANY = "\0"  # for any number; no name has it
_NUMBER = re.compile(r"(?<![^.])\d+(?![^.])")

_Run = tuple[str, int]
_Key = tuple[tuple[_Run, ...], int]  # module runs, and which stretch of a module's own ops (-1: the whole module)


@dataclass(slots=True)
class _Group:
    """What becomes one box: a module's runs, or a stretch of ops between modules; several, where they are alike."""

    keys: list[_Key]
    nodes: list[Node] = field(default_factory=list)

    @property
    def first(self) -> int:
        return min((n.origin.order for n in self.nodes), default=-1)


def sketch_overview(net: Net, colours: Mapping[str, Paint], title: str) -> Sketch:
    """Collapse a graph to at most ``MOST`` boxes a lane.

    Args:
        net: The graph.
        colours: By site; a box has the strongest of its sites.
        title: Title of the picture.
    """
    nodes = [n for n in net.nodes.values() if _is_drawn(n)]
    groups = _choose(nodes)
    of_node = {node.name: number for number, group in enumerate(groups) for node in group.nodes}
    for node in net.nodes.values():
        if not _is_drawn(node):
            of_node[node.name] = -2 if node.mark == "records" else -1
    labels = _told_apart([_label(group) for group in groups])
    items = [
        item
        for number, (group, label) in enumerate(zip(groups, labels, strict=True))
        for item in _items(net, number, group, label, colours)
    ]
    records = [n for n in net.nodes.values() if n.mark == "records"]
    if records:
        items.append(_item(net, "records", "backward", -1, "records", "carried out of the graph", records))
    links = _links(net, of_node, {item.key for item in items})
    summary = (
        f"{len(net.nodes)} nodes, {len(net.sites)} sites, {len(net.edits)} edits, {net.num_inserted} nodes inserted"
    )
    caption = [summary, "a number at an edge counts tensors; dashed: forward values saved for the backward"]
    return Sketch(title, ("forward", "backward"), items, links, caption)


def _is_drawn(node: Node) -> bool:
    """Whether a node is in a module's box: ops, and live tensors of actions."""
    return (node.role == "op" or node.mark == "edit") and node.origin.order >= 0


def _choose(nodes: Sequence[Node]) -> list[_Group]:
    """The deepest level that fits: unfolded if possible, then folded, then neighbours merged."""
    deepest = max((len(n.origin.runs) for n in nodes), default=0)
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
    """Modules at a depth, and the stretches of ops between them, in the order of the forward."""
    stretch: Counter[tuple[_Run, ...]] = Counter()
    keys: dict[int, _Key] = {}
    last: _Key | None = None
    for node in sorted(nodes, key=lambda n: n.origin.order):
        runs, order = node.origin.runs, node.origin.order
        if order in keys:
            continue
        if len(runs) >= depth:
            keys[order] = (runs[:depth], -1)
        elif last is not None and last == (runs, stretch[runs] - 1):
            keys[order] = last
        else:
            keys[order] = (runs, stretch[runs])
            stretch[runs] += 1
        last = keys[order]
    parts = Counter(runs[:n] for runs, _ in set(keys.values()) for n in range(1, len(runs) + 1))
    groups: dict[_Key, _Group] = {}
    for node in nodes:
        runs, number = keys[node.origin.order]
        key = (runs, -1 if runs and parts[runs] == 1 else number)  # nothing else of the module stands by itself
        groups.setdefault(key, _Group([key])).nodes.append(node)
    return sorted(groups.values(), key=lambda g: g.first)


def _folded(groups: Sequence[_Group]) -> list[_Group]:
    """One group for those that are alike: the same name but for numbers, the same ops, the same edits.

    Runs of one module are alike if all have edits or none (the first and the last step of a recurrence differ in ops).
    """
    alike: dict[Hashable, _Group] = {}
    again = {_names(group) for group in groups if any(number for _, number in group.keys[0][0])}
    for group in groups:
        ((runs, stretch),) = group.keys
        kind: Hashable
        if _names(group) in again:
            kind = (_names(group), stretch, any(n.mark for n in group.nodes))
        else:
            template = tuple(_NUMBER.sub(_ANY, name) for name, _ in runs)
            ops = frozenset(Counter((n.target, n.origin.lane, n.mark) for n in group.nodes).items())
            kind = (template, stretch if runs else None, ops)
        known = alike.setdefault(kind, _Group([]))
        known.keys += group.keys
        known.nodes += group.nodes
    return sorted(alike.values(), key=lambda g: g.first)


def _names(group: _Group) -> tuple[str, ...]:
    return tuple(name for name, _ in group.keys[0][0])


def _merged(groups: Sequence[_Group]) -> list[_Group]:
    """Neighbours in one group, so that as many as fit are left."""
    size = -(-len(groups) // MOST)
    parts = [groups[n : n + size] for n in range(0, len(groups), size)]
    return [_Group([k for g in part for k in g.keys], [n for g in part for n in g.nodes]) for part in parts]


def _items(net: Net, number: int, group: _Group, label: str, colours: Mapping[str, Paint]) -> list[Item]:
    items = []
    for lane in ("forward", "backward"):
        nodes = [n for n in group.nodes if n.origin.lane == lane]
        if not nodes and lane == "backward":
            continue
        plain = [n for n in nodes if not n.mark]
        small = f"{len(plain)} op{'s' if len(plain) != 1 else ''}"
        item = _item(net, f"{lane[0]}{number}", lane, number, label, small, nodes)
        orders = {n.origin.order for n in group.nodes}
        sites = [str(s) for s, order in net.orders.items() if order in orders and lane_of_site(s) == lane]
        paints = [colours[site] for site in sites if site in colours]
        if paints:
            worst = max(paints, key=lambda paint: (not math.isfinite(paint.value), paint.value))
            item = replace(item, fill=worst.colour, title=f"{item.title}\nstrongest: {worst.words}")
        items.append(item)
    return items


def _item(net: Net, key: str, column: str, row: int, text: str, small: str, nodes: Sequence[Node]) -> Item:
    inserted = [n.name for n in nodes if n.mark]
    edits = list(dict.fromkeys(n.edit for n in nodes if n.edit >= 0))
    empty = _empty_edits(net, {n.origin.order for n in nodes}, column)
    lines = [f"{net.edits[e].text} at {net.edits[e].site}" for e in [*edits, *empty]]
    title = "\n".join([text, f"{column}: {len(nodes)} nodes, {len(inserted)} inserted", *lines])
    data = {"inserted": " ".join(inserted), "edits": " ".join(map(str, [*edits, *empty]))} if inserted or empty else {}
    badge = f"+{len(inserted)} inserted" if inserted else (f"+{len(empty)} without nodes" if empty else "")
    classes = ("records",) if key == "records" else ()
    return Item(key, column, row, text, small, badge, classes, title, data)


def _empty_edits(net: Net, orders: Collection[int], lane: str) -> list[int]:
    """Edits without nodes of their own whose site stands here."""
    return [
        number
        for number, edit in enumerate(net.edits)
        if not edit.nodes and net.orders[edit.site] in orders and lane_of_site(edit.site) == lane
    ]


def _label(group: _Group) -> str:
    """``blocks.[0-23].attn x 24``, ``cell x 40``, ``/add, mul``, ``first ... last (12)``."""
    if len({_template(key) for key in group.keys}) > 1:
        return f"{_name(group.keys[0])} ... {_name(group.keys[-1])} ({len(group.keys)})"
    runs, stretch = group.keys[0]
    names = [run[0] for key in group.keys for run in key[0][-1:]]
    if len(group.keys) == 1:
        name = run_name(runs[-1]) if runs else ""
    elif len(set(names)) == 1:
        name = names[0]
    else:
        name = _pattern(list(dict.fromkeys(names)))
    times = f" x {len(group.keys)}" if len(group.keys) > 1 else ""
    return f"{name}{_ops(group) if stretch >= 0 else ''}{times}"


def _told_apart(labels: Sequence[str]) -> list[str]:
    """Numbers behind labels that stand several times."""
    seen: Counter[str] = Counter()
    found = []
    for label in labels:
        found.append(f"{label} ({seen[label] + 1})" if seen[label] else label)
        seen[label] += 1
    return found


def _name(key: _Key) -> str:
    return run_name(key[0][-1]) if key[0] else "(model)"


def _template(key: _Key) -> tuple[str, int]:
    return (_NUMBER.sub(_ANY, key[0][-1][0]), key[1]) if key[0] else ("", 0)


def _pattern(names: Sequence[str]) -> str:
    """``blocks.[0-23].attn`` for many names that differ in numbers."""
    split = [name.split(".") for name in names]
    parts = []
    for column in zip(*split, strict=True):
        distinct = list(dict.fromkeys(column))
        parts.append(distinct[0] if len(distinct) == 1 else f"[{_ranges([int(d) for d in distinct])}]")
    return ".".join(parts)


def _ranges(numbers: Sequence[int]) -> str:
    """``0-3,5`` for 0, 1, 2, 3, 5."""
    ordered = sorted(numbers)
    runs = [[ordered[0], ordered[0]]]
    for before, after in pairwise(ordered):
        if after == before + 1:
            runs[-1][1] = after
        else:
            runs.append([after, after])
    return ",".join(str(a) if a == b else f"{a}-{b}" for a, b in runs)


def _ops(group: _Group) -> str:
    first = group.keys[0][0]
    ops = list(dict.fromkeys(n.origin.op for n in group.nodes if n.origin.lane == "forward" and n.origin.runs == first))
    return "/" + ", ".join(ops[:2]) + (", ..." if len(ops) > 2 else "")


def _links(net: Net, of_node: Mapping[str, int], keys: set[str]) -> list[Link]:
    """Edges between boxes, with the number of tensors: all nodes of a box become one."""
    names = {name: _key(net.nodes[name], number) for name, number in of_node.items()}
    merged = nx.DiGraph()
    for source, target in net.edges:
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
    return "outside" if number == -1 else f"{node.origin.lane[0]}{number}"
