"""``Ladder``: rows of a joint graph, each op beside its backward and its edits, in bands for the calls of modules."""

from __future__ import annotations

import os
import re
from collections import Counter, defaultdict
from collections.abc import Collection, Hashable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import groupby
from math import isnan
from typing import Literal, NamedTuple, get_args

from gradrewrite._utils.grouping import grouped
from gradrewrite._utils.repetitions import find_repetitions
from gradrewrite.diagnostics.clipping import ClipHistory, clips_by_edit
from gradrewrite.diagnostics.run_log import COUNTS, Run
from gradrewrite.diagnostics.site_health import percent
from gradrewrite.ir.edits import Edit
from gradrewrite.ir.provenance import Lane
from gradrewrite.sites import ARROW
from gradrewrite.viz._graph_view import (
    GraphView,
    Node,
    action_name,
    action_text,
    call_name,
    contracted_edges,
    hidden_nodes,
    lane_of_site,
    visible_outputs,
)

Column = Literal["input", "forward", "inner", "backward", "edit", "output"]
COLUMNS: tuple[Column, ...] = get_args(Column)
LANES: Mapping[Lane, str] = {
    "forward": "forward",
    "inner": "backward inside of the forward",
    "backward": "backward",
}
EdgeKind = Literal["", "saved", "fan", "carried"]
Path = tuple[tuple[str, int], ...]

MANY = 12  # edges; what reads more (a total norm) or is read more (by every step) is joined by faint lines
FAR = 4  # rows
_LEAST = 3  # equal neighbors are folded
_MOST_BETWEEN = 4  # rows of the enclosing module's own ops between two calls of a loop
ANY_NUMBER = "\0"  # no name has it
_NUMBER = re.compile(r"(?<![^.])\d+(?![^.])")


@dataclass(frozen=True, slots=True)
class Part:
    """One box of a ladder."""

    key: str  # its name in the ladder
    column: Column
    text: str  # first line
    small: str = ""  # second line
    nodes: tuple[str, ...] = ()  # names of the fx nodes in it, in execution order
    edits: tuple[int, ...] = ()  # numbers of the edits in it
    classes: tuple[str, ...] = ()  # ``inserted``, ``idle`` (a clip that never acted), ``records``
    title: str = ""  # what a pointer on it shows
    figures: tuple[int, ...] = ()  # numbers of the edits that only measure it
    cells: tuple[tuple[str, tuple[str, ...]], ...] = ()  # of a folded box, name and nodes of each layer or call


@dataclass(frozen=True, slots=True)
class Edge:
    """An edge between two boxes, by their keys, for a number of tensors."""

    source: str
    target: str
    kind: EdgeKind = ""
    tensors: int = 1


@dataclass(frozen=True, slots=True)
class Band:
    """Rows of one module call, or of equal neighbors."""

    key: str  # module calls from the outermost to this one, joined by slashes
    name: str  # its heading
    first: int  # its first row
    last: int  # its last row
    depth: int = 0  # how many bands are around it


@dataclass(frozen=True, slots=True)
class Ladder:
    """Boxes of a joint graph in rows, without positions."""

    graph_view: GraphView
    rows: Sequence[Sequence[Part]]  # boxes of each row
    bands: Sequence[Band]  # outer ones first
    edges: Sequence[Edge]  # edges between boxes
    hidden: Collection[str]  # nodes that are left out
    is_overview: bool = False  # whether boxes are modules, of which a drawing names the first node alone

    @property
    def parts(self) -> list[Part]:
        """All boxes, row by row."""
        return [part for row in self.rows for part in row]


class EditRecords(NamedTuple):
    """Records of edits in a run, by their numbers."""

    clips: Mapping[int, ClipHistory]
    quiet: Collection[int]  # checks that found nothing


@dataclass(slots=True)
class _Row:
    nodes: dict[str, list[Node]] = field(default_factory=dict)  # by key of the box
    edits: list[int] = field(default_factory=list)
    figures: dict[int, str] = field(default_factory=dict)  # edits that only measure, with their boxes
    outputs: list[tuple[str, str]] = field(default_factory=list)  # label, node


def records_of(run: Run | None, edits: Sequence[Edit]) -> EditRecords:
    """Return the records of clips and of checks for finite values."""
    if run is None:
        return EditRecords({}, ())
    checks = [(n, str(edit.site)) for n, edit in enumerate(edits) if action_name(edit.action) == "CheckFinite"]
    counts = {n: [one for name in COUNTS if (one := run.series.get(f"{name}@{site}"))] for n, site in checks}
    quiet = {n for n, found in counts.items() if found and not any(any(one.values) for one in found)}
    return EditRecords(clips_by_edit(run, edits), quiet)


def build_ladder(
    graph_view: GraphView, run: Run | None = None, *, reshapes: bool = False, records: bool = False
) -> Ladder:
    """Return the ladder of a graph, one box per op and lane and one per edit.

    An edit that only measures is a figure on the box of its op, where there is one.
    """
    of_edits = records_of(run, graph_view.edits)
    hidden = hidden_nodes(graph_view, reshapes=reshapes, records=records)
    leaders = _leaders(graph_view.edits)
    by_order: dict[int, _Row] = defaultdict(_Row)
    of_node: dict[str, str] = {}
    for name, node in graph_view.nodes.items():
        if name in hidden:
            continue
        key = of_node[name] = _key(node, leaders)
        if node.edit < 0:
            by_order[node.order].nodes.setdefault(key, []).append(node)
    for number, edit in enumerate(graph_view.edits):
        row = by_order[graph_view.orders[edit.site]]
        lanes = (lane_of_site(edit.site), "forward", "backward")
        host = next((key for lane in lanes if (key := f"{lane} {graph_view.orders[edit.site]}") in row.nodes), "")
        if only_measures(edit) and host:
            row.figures[number] = host
            of_node |= {name: host for name in edit.nodes if name in of_node}
        else:
            row.edits.append(number)
    outputs = visible_outputs(graph_view, graph_view.returned, hidden)
    outputs = [(label, name) for label, name in outputs if name not in hidden]
    for label, name in outputs:
        node = graph_view.nodes[name]
        order = graph_view.orders[graph_view.edits[node.edit].site] if node.edit >= 0 else node.order
        by_order[order].outputs.append((label, name))
    orders = sorted(by_order)
    ops = {node.order: node for node in graph_view.nodes.values() if node.role == "op" and node.edit < 0}
    rows = [_parts(graph_view, by_order[order], of_edits, leaders) for order in orders]
    pairs = Counter((of_node[a], of_node[b]) for a, b in contracted_edges(graph_view, hidden))
    pairs.update((of_node[name], f"returned {label}") for label, name in outputs)
    bands = _bands([ops.get(order) for order in orders], rows)
    return Ladder(graph_view, rows, bands, [*join(rows, pairs), *carried_edges(graph_view, of_node)], hidden)


def join(rows: Sequence[Sequence[Part]], pairs: Mapping[tuple[str, str], int]) -> list[Edge]:
    """Return the edges between boxes from numbers of tensors by pairs of keys."""
    where = {part.key: (number, part.column) for number, row in enumerate(rows) for part in row}
    known = [pair for pair in pairs if pair[0] != pair[1] and pair[0] in where and pair[1] in where]
    feeds, reads = Counter(a for a, _ in known), Counter(b for _, b in known)
    edges = []
    for a, b in known:
        is_far = abs(where[a][0] - where[b][0]) > FAR
        is_shared = where[a][1] == where[b][1] == "edit" and where[a][0] != where[b][0]  # a total norm
        kind: EdgeKind = "fan" if is_shared or reads[b] > MANY or (feeds[a] > MANY and is_far) else ""
        if not kind and where[a][1] in ("input", "forward", "inner") and where[b][1] in ("backward", "edit"):
            kind = "saved"
        edges.append(Edge(a, b, kind, pairs[a, b]))
    return edges


def carried_edges(graph_view: GraphView, of_node: Mapping[str, str]) -> list[Edge]:
    """Return an edge from a box with loops to itself, for the values that they carry."""
    numbers = Counter[str]()
    for name, node in graph_view.nodes.items():
        if node.turns and name in of_node:
            numbers[of_node[name]] += node.num_carried
    return [Edge(key, key, "carried", number) for key, number in numbers.items()]


def turns_of(nodes: Sequence[Node]) -> str:
    """Return the numbers of iterations of the loops among nodes, as the end of a text; ``""`` without any."""
    turns = sorted({node.turns for node in nodes if node.turns})
    return f" \u00b7 loop x {', '.join(map(str, turns))}" if turns else ""


def _leaders(edits: Sequence[Edit]) -> dict[int, int]:
    """Return for each edit the first of its box: one action at a value in several iterations of a loop is one box."""
    first: dict[Hashable, int] = {}
    keys = (n if e.site.iteration is None else (e.text, _name_of(e)) for n, e in enumerate(edits))
    return {n: first.setdefault(key, n) for n, key in enumerate(keys)}


def _name_of(edit: Edit) -> str:
    """Return the site of an edit without the numbers of calls."""
    site = edit.site
    return f"{site.kind}:{site.name}{ARROW * bool(site.to)}{site.to}"


def only_measures(edit: Edit) -> bool:
    """Whether an edit is a figure of its op, and no change: ``Observe``."""
    return action_name(edit.action) == "Observe"


def kind_of_op(node: Node) -> Hashable:
    """Return modules, op and line of code, equal for all runs of an op in a loop."""
    return tuple(name for name, _ in node.calls), node.op, node.source


def edit_part(graph_view: GraphView, key: str, numbers: Sequence[int], records: EditRecords) -> Part:
    """Return the box of one edit, or of equal edits at several sites: action, site, clip rate and median factor."""
    first = graph_view.edits[numbers[0]]
    times = f" x {len(numbers)}" if len(numbers) > 1 else ""
    names = [str(graph_view.edits[n].site) for n in numbers]
    if len(numbers) > 1 and first.site.iteration is not None:
        names = [_name_of(graph_view.edits[n]) for n in numbers]
    small = [fold_names(names)]
    lines = [f"{graph_view.edits[n].text} at {graph_view.edits[n].site}" for n in numbers]
    clips, quiet = records
    known = {n: clips[n] for n in numbers if n in clips}
    if known:
        number, strongest = min(known.items(), key=lambda item: (item[1].median_factor, -item[1].rate))
        has_factor = strongest.rate > 0 and not isnan(strongest.median_factor)
        is_one_of_several = len({(clip.rate, clip.median_factor) for clip in known.values()}) > 1
        of = f"{str(graph_view.edits[number].site).partition(':')[2]}: " if is_one_of_several else ""
        small += [f"{of}{percent(strongest.rate)}"]
        small += [f"\u00d7{strongest.median_factor:.2g}"] if has_factor else []
        of_several = f"the strongest of {len(known)} " if len(known) > 1 else ""
        lines.append(f"{of_several}acted in {strongest.rate:.1%} of {len(strongest.steps)} steps")
    nodes = tuple(name for n in numbers for name in graph_view.edits[n].nodes)
    column: Column = "forward" if lane_of_site(first.site) == "forward" else "edit"
    texts = f"{action_text(first)}{times}", " \u00b7 ".join(small)
    never = all(n in quiet or (n in clips and clips[n].rate == 0) for n in numbers)
    classes = ("inserted", "idle") if never else ("inserted",)
    return Part(key, column, *texts, nodes, tuple(numbers), classes, "\n".join(lines))


def of_losses(nodes: Sequence[Node]) -> str:
    """Return the losses of nodes that are there once for each, as the end of a text; ``""`` without any."""
    losses = sorted({node.loss for node in nodes if node.loss is not None})
    return f" \u00b7 losses {', '.join(map(str, losses))}" if losses else ""


def describe_node(graph_view: GraphView, node: Node) -> str:
    """Return the tooltip of a node, in several lines."""
    lines = [f"{node.name}: {node.target}"]
    what = node.op_and_argument if node.role == "placeholder" else f"{node.module_call}/{node.op}"
    lines.append(f"{what}, {LANES[node.lane]}")
    if node.shape or node.dtype:
        lines.append(f"[{node.shape}] {node.dtype}")
    if node.loss is not None:
        lines.append(f"backward of loss {node.loss} by itself")
    if node.edit >= 0:
        edit = graph_view.edits[node.edit]
        lines.append(f"inserted: {edit.text} at {edit.site}")
    elif node.mark:
        lines.append("inserted: carries records")
    return "\n".join([*lines, *([node.source] if node.source else [])])


def fold_names(names: Sequence[str]) -> str:
    """Return one pattern for names: ``blocks.[0-23].attn``, ``blocks.[0-23].*``; the first and the last if unlike."""
    distinct = list(dict.fromkeys(names))
    if len(distinct) == 1:
        return distinct[0]
    split = [name.replace(":", ":.").split(".") for name in distinct]
    parts: list[str] = []
    for column in zip(*split, strict=False):
        words = list(dict.fromkeys(column))
        if len(words) > 1 and not all(word.isdecimal() for word in words):
            break
        parts.append(words[0] if len(words) == 1 else f"[{_numbers(sorted(map(int, words)))}]")
    if len(parts) < max(map(len, split)):
        parts.append("*")
    if len(parts) < 2 or parts[:2] == [parts[0], "*"]:
        return f"{distinct[0]} ... {distinct[-1]}"
    return ".".join(parts).replace(":.", ":")


def _numbers(ordered: Sequence[int]) -> str:
    """Return ``0-3,5-8,10`` for numbers."""
    runs: list[list[int]] = []
    for number in ordered:
        if runs and number == runs[-1][-1] + 1:
            runs[-1].append(number)
        else:
            runs.append([number])
    least = 2 if len(runs) == 1 else 3
    return ",".join(f"{run[0]}-{run[-1]}" if len(run) >= least else ",".join(map(str, run)) for run in runs)


def template(name: str) -> str:
    """Return a module's name with ``ANY_NUMBER`` for each of its numbers."""
    return _NUMBER.sub(ANY_NUMBER, name)


def _key(node: Node, leaders: Mapping[int, int]) -> str:
    if node.edit >= 0:
        return f"edit {leaders[node.edit]}"
    if node.mark:
        return "records"
    return node.name if node.role == "placeholder" else f"{node.lane} {node.order}"


def _parts(graph_view: GraphView, row: _Row, records: EditRecords, leaders: Mapping[int, int]) -> list[Part]:
    parts = []
    for key, nodes in row.nodes.items():
        node, names = nodes[0], tuple(node.name for node in nodes)
        if node.role == "placeholder":
            text = node.argument if node.op in ("parameter", "buffer") else node.op_and_argument
            column: Column = "output" if node.lane == "backward" else "input"
            parts.append(Part(key, column, text, "", names, title=describe_node(graph_view, node)))
            continue
        if key == "records":
            title = f"{len(nodes)} nodes that carry records out of the graph"
            parts.append(Part(key, "edit", "records", f"{len(nodes)} nodes", names, (), ("records",), title))
            continue
        text = node.op if node.role == "op" else node.target
        lines = [f"{node.module_call}/{text}, {LANES[node.lane]}", *([node.source] if node.source else [])]
        lines += [f"{node.name}: {node.target} [{node.shape}] {node.dtype}" for node in nodes]
        figures = tuple(n for n, host in row.figures.items() if host == key)
        lines += [f"{graph_view.edits[n].text} at {graph_view.edits[n].site}" for n in figures]
        names += tuple(name for n in figures for name in graph_view.edits[n].nodes)
        title = "\n".join(lines)
        small = f"{node.module_call or '(model)'}{turns_of(nodes)}{of_losses(nodes)}"
        parts.append(Part(key, node.lane, text, small, names, title=title, figures=figures))
    parts.sort(key=lambda part: COLUMNS.index(part.column))
    boxes = grouped((leaders[number], number) for number in row.edits)
    parts += [edit_part(graph_view, f"edit {leader}", numbers, records) for leader, numbers in boxes.items()]
    for label, name in row.outputs:
        column = "output" if graph_view.nodes[name].lane == "backward" else "input"
        parts.append(Part(f"returned {label}", column, label.removeprefix("gradient:"), title=label))
    return parts


def _bands(ops: Sequence[Node | None], rows: Sequence[Sequence[Part]]) -> list[Band]:
    """Return the module calls that cover two rows or more, around three equal neighbors or more one of both, and loops.

    ``ops`` are one of each row.
    """
    paths: list[Path] = [() if op is None else op.calls for op in ops]
    calls: dict[tuple[int, int], Path] = {}  # of several with the same rows the innermost
    for depth in range(1, max(map(len, paths), default=0) + 1):
        for path, numbers in groupby(range(len(paths)), key=lambda number: paths[number][:depth]):
            covered = list(numbers)
            if len(path) == depth and len(covered) > 1:
                calls[covered[0], covered[-1]] = path
    kinds = [tuple(part.text for part in row if part.column == "forward" and not part.edits) for row in rows]
    found: list[Band] = []
    equal: dict[Hashable, list[list[Band]]] = defaultdict(list)
    for (first, last), path in sorted(calls.items()):
        band = Band("/".join(map(call_name, path)), call_name(path[-1]), first, last)
        found.append(band)
        runs = equal[path[:-1], template(path[-1][0]), tuple(kinds[first : last + 1])]
        between = range(runs[-1][-1].last + 1, first) if runs else range(0)
        if runs and len(between) <= _MOST_BETWEEN and all(paths[n] == path[:-1] for n in between):
            runs[-1].append(band)
        else:
            runs.append([band])
    for bands in (run for runs in equal.values() for run in runs if len(run) >= _LEAST):
        name = f"{fold_names([band.name.partition('#')[0] for band in bands])} x {len(bands)}"
        outer = bands[0].key.removesuffix(bands[0].name)
        found.append(Band(f"{outer}{name}", name, bands[0].first, bands[-1].last))
    return _nested([*found, *_loop_bands(ops, _nested(found))])


def _loop_bands(ops: Sequence[Node | None], known: Sequence[Band]) -> list[Band]:
    """Return bands for loops and their turns.

    A loop is left out where it would cut another band.
    """
    inner = {row: band for band in known for row in range(band.first + 1, band.last + 1)}  # outer ones first

    def fits(band: Band) -> bool:
        before, behind = inner.get(band.first), inner.get(band.last + 1)
        return (before is None or before.last >= band.last) and (behind is None or behind.first <= band.first)

    found = []
    for first, period, count in find_repetitions([None if op is None else kind_of_op(op) for op in ops]):
        op = ops[first]
        if op is None:
            continue
        begins = range(first, first + period * count, period)
        turns = [Band(f"turn {n} of row {first}", f"#{n}", at, at + period - 1) for n, at in enumerate(begins)]
        source = os.path.basename(op.source.partition(' "')[0])
        loop = Band(f"loop of row {first}", f"loop x {count} ({source})", first, turns[-1].last)
        if all(map(fits, (loop, *turns))):
            found += [loop, *(turns if period > 1 else [])]
    return found


def _nested(bands: Sequence[Band]) -> list[Band]:
    """Return bands by first row, outer ones first, with their depths; of several with the same rows the first."""
    found: list[Band] = []
    around: list[Band] = []
    for band in sorted(bands, key=lambda one: (one.first, -one.last)):
        while around and around[-1].last < band.first:
            around.pop()
        if not around or (around[-1].first, around[-1].last) != (band.first, band.last):
            found.append(replace(band, depth=len(around)))
            around.append(band)
    return found
