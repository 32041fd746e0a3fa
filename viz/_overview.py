"""Overview of a graph as a ladder of modules: repeated blocks folded, at most ``MOST`` rows."""

from __future__ import annotations

import re
from collections import Counter, defaultdict
from collections.abc import Callable, Collection, Hashable, Sequence
from dataclasses import dataclass, field, replace

from gradrewrite._utils.grouping import grouped
from gradrewrite._utils.repetitions import find_repetitions
from gradrewrite.diagnostics.run_log import Run
from gradrewrite.viz._graph_view import (
    GraphView,
    Node,
    action_text,
    call_name,
    contracted_edges,
    hidden_nodes,
    lane_of_site,
)
from gradrewrite.viz._ladder import (
    LANES,
    Ladder,
    Part,
    carried_edges,
    edit_part,
    fold_names,
    join,
    kind_of_op,
    of_losses,
    only_measures,
    records_of,
    template,
    turns_of,
)
from gradrewrite.viz._norms import SiteNorms, differing_siblings, sites_by_order

MOST = 16  # rows
_LOOP = 4  # stretches of a module's own ops; more are a loop
_MOST_EDITS = 4  # boxes of edits in one row

_Call = tuple[str, int]
_NUMBERED = re.compile(r"(?:[^.]+\.)*?\d+(?=\.|$)")  # up to the first number
_Key = tuple[tuple[_Call, ...], int]  # module calls, and which stretch of a module's own ops (-1: the whole module)


@dataclass(slots=True)
class _Group:
    """Nodes of one row: calls of a module or a stretch of ops between modules; several where they are equal."""

    keys: list[_Key]
    nodes: list[Node] = field(default_factory=list)
    members: list[_Group] = field(default_factory=list)  # what was folded; none if nothing was

    @property
    def first(self) -> int:
        return min((n.order for n in self.nodes), default=-1)


_Norms = Callable[[_Group], list[float]]


def build_overview(graph_view: GraphView, run: Run | None = None, norms: SiteNorms | None = None) -> Ladder:
    """Return at most ``MOST`` rows: modules at the deepest level that fits, with the edits of each.

    Of equal modules those stay apart whose norms differ from the others'.
    """
    hidden = hidden_nodes(graph_view)
    nodes = [n for n in graph_view.nodes.values() if n.name not in hidden and not n.mark and n.role != "placeholder"]
    of = sites_by_order(graph_view)

    def norms_in(group: _Group) -> list[float]:
        orders = sorted({node.order for node in group.nodes})
        return norms.values([site for order in orders for site in of.get(order, ())], norms.now) if norms else []

    groups = _choose([n for n in nodes if n.order >= 0], norms_in) or [_Group([((), -1)])]  # a step has edits alone
    row_of = {order: number for number, group in enumerate(groups) for order in {n.order for n in group.nodes}}
    records = records_of(run, graph_view.edits)
    edits: list[list[int]] = [[] for _ in groups]
    for number, edit in enumerate(graph_view.edits):
        order = graph_view.orders[edit.site]
        near = order if order in row_of else min(row_of, key=lambda o: (abs(o - order), o), default=order)
        edits[row_of.get(near, 0)].append(number)
    rows: list[list[Part]] = []
    of_node: dict[str, str] = {}
    for number, group in enumerate(groups):
        row, rest = _with_figures(graph_view, _boxes(number, group), edits[number])
        for key, numbers in _by_action(graph_view, rest):
            row.append(edit_part(graph_view, f"edits {number} {key}", numbers, records))
            if key == "more":
                row[-1] = replace(row[-1], text=f"{len(numbers)} more edits")
        rows.append(row)
        of_node |= {name: part.key for part in row for name in part.nodes}
    pairs = Counter(
        (of_node[a], of_node[b]) for a, b in contracted_edges(graph_view, hidden) if a in of_node and b in of_node
    )
    edges = [*join(rows, pairs), *carried_edges(graph_view, of_node)]
    return Ladder(graph_view, rows, (), edges, hidden, is_overview=True)


def _boxes(number: int, group: _Group) -> list[Part]:
    found, label = [], _label(group)
    for lane, in_words in LANES.items():
        nodes = [n for n in group.nodes if n.lane == lane]
        if nodes:
            ops = len({n.order for n in nodes})
            small = f"{ops} op{'s' if ops != 1 else ''}{turns_of(nodes)}{of_losses(nodes)}"
            names = tuple(n.name for n in nodes)
            source = next((n.source for n in nodes if n.source), "")
            title = f"{label}\n{in_words}: {small}, {len(nodes)} nodes\n{source}".rstrip()
            of = [(_label(one), tuple(n.name for n in one.nodes if n.lane == lane)) for one in group.members]
            found.append(Part(f"{lane} {number}", lane, label, small, names, title=title, cells=tuple(of)))
    return found


def _with_figures(graph_view: GraphView, row: Sequence[Part], numbers: Sequence[int]) -> tuple[list[Part], list[int]]:
    """Return the boxes with the edits that only measure them as figures, and the other edits."""
    lanes = {part.column: number for number, part in enumerate(row)}
    figures: list[list[int]] = [[] for _ in row]
    rest = []
    for n in numbers:
        edit = graph_view.edits[n]
        if only_measures(edit) and row:
            figures[lanes.get(lane_of_site(edit.site), 0)].append(n)
        else:
            rest.append(n)
    found = []
    for part, own in zip(row, figures, strict=True):
        names = tuple(name for n in own for name in graph_view.edits[n].nodes)
        found.append(replace(part, figures=tuple(own), nodes=part.nodes + names))
    return found, rest


def _by_action(graph_view: GraphView, numbers: Sequence[int]) -> list[tuple[str, list[int]]]:
    """Return the edits of a row by action and site kind; the rest is together."""
    edits = [(number, graph_view.edits[number]) for number in numbers]
    groups = grouped(((action_text(edit), edit.site.kind), number) for number, edit in edits)
    found = [(str(n), group) for n, group in enumerate(groups.values())]
    if len(found) <= _MOST_EDITS:
        return found
    rest = [n for _, group in found[_MOST_EDITS - 1 :] for n in group]
    return [*found[: _MOST_EDITS - 1], ("more", rest)]


def _choose(nodes: Sequence[Node], norms_in: _Norms) -> list[_Group]:
    """Return the groups of the deepest level that fits, equal ones folded if need be; else neighbors merged."""
    if not nodes:
        return []
    levels = [_groups(nodes, depth) for depth in range(max((len(n.calls) for n in nodes), default=0), 0, -1)]
    for groups in levels:
        apart = _differing_blocks(groups, norms_in)
        for found in (groups, _folded(groups, apart), _folded(_with_whole(groups, apart), apart), _folded(groups)):
            if len(found) <= MOST:
                return found
    return _merged(_folded(levels[-1] if levels else _groups(nodes, 1)))


def _groups(nodes: Sequence[Node], depth: int) -> list[_Group]:
    """Return modules at a depth and the stretches of ops between them, in the order of the forward."""
    stretch: Counter[tuple[_Call, ...]] = Counter()
    keys: dict[int, _Key] = {}
    last: _Key | None = None
    ops = {node.order: node for node in sorted(nodes, key=lambda n: n.order)}
    orders = [*ops]
    loops = find_repetitions([kind_of_op(node) for node in ops.values()])
    turns = {orders[at] for first, period, count in loops for at in range(first, first + period * count, period)}
    turns |= {orders[loop.end] for loop in loops if loop.end < len(orders)}
    for order, node in ops.items():
        calls = node.calls
        if len(calls) >= depth:
            keys[order] = (calls[:depth], -1)
        elif last is not None and last == (calls, stretch[calls] - 1) and order not in turns:
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


def _folded(groups: Sequence[_Group], apart: Collection[_Key] = ()) -> list[_Group]:
    """Fold groups of equal names up to numbers, with equal ops, but those of some blocks.

    All calls of one module are equal, and so are stretches with the same ops in a module that has many (a loop).
    """
    alike: dict[Hashable, list[_Group]] = defaultdict(list)
    again = {_names(group) for group in groups if any(number for _, number in group.keys[0][0])}
    stretches = Counter(group.keys[0][0] for group in groups)
    for group in groups:
        ((calls, stretch),) = group.keys
        stretch = 0 if stretches[calls] > _LOOP else stretch
        names = _names(group)
        ops = () if names in again else tuple(dict.fromkeys((n.order, n.op) for n in group.nodes))
        alike[tuple(map(template, names)), stretch, tuple(op for _, op in sorted(ops))].append(group)
    found = []
    for own in alike.values():
        rest = [group for group in own if _block(group) not in apart]
        found += [group for group in own if _block(group) in apart] + [_joined(rest)] * bool(rest)
    return sorted(found, key=lambda g: g.first)


def _differing_blocks(groups: Sequence[_Group], norms_in: _Norms) -> set[_Key]:
    """Return the blocks (``blocks.4``, a call, a turn of a loop) with norms unlike those of their siblings."""
    blocks = grouped((_block(group), group) for group in groups)
    families = grouped(((tuple(template(name) for name, _ in block[0]), block[1] < 0), block) for block in blocks)
    return differing_siblings(families.values(), lambda block: norms_in(_joined(blocks[block])))


def _with_whole(groups: Sequence[_Group], blocks: Collection[_Key]) -> list[_Group]:
    """Join the groups of each of some blocks."""
    rest = [group for group in groups if _block(group) not in blocks]
    own = {block: [group for group in groups if _block(group) == block] for block in blocks}
    whole = [_Group([block], _joined(inside).nodes, inside) for block, inside in own.items()]
    return sorted([*rest, *whole], key=lambda g: g.first)


def _block(group: _Group) -> _Key:
    """Return the outermost numbered module around a group: ``blocks.4`` of ``blocks.4.attn``; else the group's key."""
    ((calls, stretch),) = group.keys
    for place, (name, call) in enumerate(calls):
        numbered = _NUMBERED.match(name)
        if numbered is not None:
            return (*calls[:place], (numbered[0], call)), -1
    return calls, stretch


def _joined(groups: Sequence[_Group]) -> _Group:
    if len(groups) == 1:
        return groups[0]
    return _Group([k for g in groups for k in g.keys], [n for g in groups for n in g.nodes], [*groups])


def _names(group: _Group) -> tuple[str, ...]:
    return tuple(name for name, _ in group.keys[0][0])


def _merged(groups: Sequence[_Group]) -> list[_Group]:
    size = -(-len(groups) // MOST)
    return [_joined(groups[n : n + size]) for n in range(0, len(groups), size)]


def _label(group: _Group) -> str:
    """Return a label: ``blocks.[0-23].attn x 24``, ``cell x 40``, ``/add, mul``, ``first ... last (12)``."""
    if len({_kind(key) for key in group.keys}) > 1:
        return f"{_name(group.keys[0])} ... {_name(group.keys[-1])} ({len(group.keys)})"
    calls, stretch = group.keys[0]
    names = [call[0] for key in group.keys for call in key[0][-1:]]
    name = (call_name(calls[-1]) if calls else "") if len(group.keys) == 1 else fold_names(names) if names else ""
    times = f" x {len(group.keys)}" if len(group.keys) > 1 else ""
    return f"{name}{_ops(group) if stretch >= 0 else ''}{times}"


def _name(key: _Key) -> str:
    return call_name(key[0][-1]) if key[0] else "(model)"


def _kind(key: _Key) -> tuple[str, int]:
    return (template(key[0][-1][0]), key[1]) if key[0] else ("", 0)


def _ops(group: _Group) -> str:
    first = group.keys[0][0]
    own = [n for n in group.nodes if n.calls == first]
    ops = list(dict.fromkeys(n.op for n in [n for n in own if n.lane == "forward"] or own))
    return "/" + ", ".join(ops[:2]) + (", ..." if len(ops) > 2 else "")
