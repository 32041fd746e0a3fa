"""Python loops in Dynamo graphs: repeated stretches of nodes, with their inputs and carries.

Dynamo unrolls a loop, so that each iteration has nodes of its own. Two nodes are of one kind where they call the same
function with the same constants on values of the same form; a stretch of equal iterations is one loop again.
"""

from __future__ import annotations

import itertools
import operator
from collections.abc import Callable, Collection, Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Literal

import torch
from torch import Tensor, fx

from gradrewrite._compat import autograd, fake_tensors, operators
from gradrewrite._compat.mode_nodes import MODES, autocast_around, enter_autocast, exit_autocast, set_grad_enabled
from gradrewrite._utils.repetitions import Repetition, find_repetitions
from gradrewrite.instrumentation.dynamo_nodes import changed_in_place, fake_of, op_name
from gradrewrite.instrumentation.probes import probed
from gradrewrite.instrumentation.source_locations import source_of
from gradrewrite.ir.values import Value

LEAST = 4  # iterations
_ARITHMETIC = (operator.add, operator.sub, operator.mul, operator.truediv)
CALLS = ("call_function", "call_method")
Index = tuple[Any, ...]


class NotRolled(Exception):
    """The reason against rolling a stretch."""


@dataclass(frozen=True, slots=True)
class Rows:
    """An input of each iteration: rows of one tensor, or tensors of their own.

    ``tensors`` has one node, of which iteration t reads row ``first + step * t`` of a dimension, or ``size`` rows from
    there on; else a node an iteration.
    """

    tensors: tuple[fx.Node, ...]
    dim: int = 0
    first: int = 0
    step: int = 0  # 0 where each iteration has a tensor of its own
    size: int | None = None  # None for a single row, without its dimension
    numbers: tuple[float, ...] = ()  # constants, one an iteration, in the place of tensors
    dtype: torch.dtype | None = None  # of these
    device: torch.device | None = None  # likewise
    # Numbers of the values that the rows are, where nothing else reads these; else they are made outside of the loop.
    values: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True)
class Read:
    """The source of an argument of a node in an iteration."""

    kind: Literal["inside", "carry", "rows", "invariant"]
    number: int  # position in the iteration, or among the carries, rows or invariants


@dataclass(eq=False)
class LoopPlan:
    """A loop in a Dynamo graph: iterations, inputs, carries, results."""

    iterations: list[list[fx.Node]]
    carries: list[tuple[int, fx.Node]] = field(default_factory=list)  # position in the iteration, first value
    rows: list[Rows] = field(default_factory=list)
    invariants: list[fx.Node] = field(default_factory=list)
    reads: dict[tuple[int, int], Read] = field(default_factory=dict)  # by position, and number among its node arguments
    # Positions of nodes that only take a row out of a tensor, with the row and the index behind it.
    taken: dict[int, tuple[int, Index]] = field(default_factory=dict)
    numbers: dict[tuple[int, int], int] = field(default_factory=dict)  # rows by position and number of the argument
    # Positions of values that are read behind the loop, other than the last ones of carries.
    results: list[int] = field(default_factory=list)
    place: dict[fx.Node, tuple[int, int]] = field(default_factory=dict)  # iteration and position
    modes: list[tuple[Any, ...]] = field(default_factory=list)  # arguments of autocast that hold around the loop

    @property
    def length(self) -> int:
        """Number of iterations."""
        return len(self.iterations)

    @property
    def first(self) -> list[fx.Node]:
        """The nodes of the first iteration."""
        return self.iterations[0]

    @property
    def cost(self) -> tuple[int, int]:
        """The tensors that are handed on or stacked, and the iterations, with a minus: less is better."""
        return len(self.carries) + len(self.results), -self.length


@dataclass(frozen=True, slots=True)
class Stretch:
    """Nodes that repeat."""

    nodes: list[fx.Node]
    period: int
    turns: int
    difference: str = ""  # why it is no loop; "" where its nodes are equal

    @property
    def is_taking(self) -> bool:
        """Whether its nodes only take elements out of tensors and tuples."""
        return all(probed(node) is not None or node.target is operator.getitem for node in self.nodes[: self.period])

    @property
    def source(self) -> str:
        """The user's line of the first node that has one."""
        return next(filter(None, map(source_of, self.nodes[: self.period])), "")


def find_stretches(
    graph: fx.Graph, values: Sequence[Value], least: int = LEAST, *, explains: bool = True
) -> list[Stretch]:
    """Return the stretches of a Dynamo graph with probes; each goes on as far as its nodes repeat.

    Where it ``explains``, stretches of one line of code whose nodes differ are among them, with the reason why they are
    no loop.
    """
    nodes = [node for node in graph.nodes if node.op in CALLS]
    live = with_errors(graph)
    kinds = [_kind_of(node, values, live) for node in nodes]
    found: list[Stretch] = []
    end = 0
    outer = find_repetitions(kinds, least)
    places = [
        *(one for loop in outer for one in _finest(nodes, kinds, loop, values, least)),
        Repetition(len(nodes), 0, 0),
    ]
    for number, (first, period, turns) in enumerate(places):
        if explains:
            found += _unequal_stretches(nodes[end:first], kinds[end:first], values, least)
        end = first + period * turns
        while period and end < places[number + 1][0] and kinds[end] == kinds[end - period]:
            end += 1
        found += [Stretch(nodes[first:end], period, turns)] * bool(period)
    return [stretch for stretch in found if not stretch.is_taking]


def _finest(
    nodes: Sequence[fx.Node], kinds: Sequence[Hashable], outer: Repetition, values: Sequence[Value], least: int
) -> list[Repetition]:
    """Return a loop, or the loops in each of its iterations.

    The latter where these leave fewer nodes, and can be rolled.
    """
    inner = find_repetitions(kinds[outer.first : outer.first + outer.period], least)
    left = outer.period - sum(loop.period * (loop.turns - 1) for loop in inner)
    if left * outer.turns >= outer.period:
        return [outer]
    starts = range(outer.first, outer.end, outer.period)
    found = [loop._replace(first=start + loop.first) for start in starts for loop in inner]
    try:
        for first, period, turns in found:
            plan_loop(Stretch(list(nodes[first : first + period * turns]), period, turns), values, least)
    except NotRolled:
        return [outer]
    return found


def _unequal_stretches(
    nodes: Sequence[fx.Node], kinds: Sequence[Hashable], values: Sequence[Value], least: int
) -> Iterator[Stretch]:
    lines = [(node.op, node.target, source_of(node)) for node in nodes]
    for first, period, turns in find_repetitions(lines, least):
        pairs = ((n, n + period) for n in range(first, first + period * (turns - 1)))
        unequal = [(nodes[n], nodes[m]) for n, m in pairs if kinds[n] != kinds[m]]
        if not unequal:  # parts of two loops
            continue
        reason = _difference(*min(unequal, key=lambda pair: probed(pair[0]) is not None), values)
        yield Stretch(list(nodes[first : first + period * turns]), period, turns, reason)


def _difference(a: fx.Node, b: fx.Node, values: Sequence[Value]) -> str:
    """Say why two nodes of one line are not equal."""
    first, second = probed(a), probed(b)
    if first is not None and second is not None:
        names = [values[n].calls[-1][0] if values[n].calls else "" for n in (first, second)]
        if names[0] != names[1]:
            return f"iterations run other modules ({names[0]}, {names[1]}), of which regions= compiles equal ones once"
        return f"values of {values[first].op} are used in different ways"
    forms = [fake_of(node) for node in (a, b)]
    if forms[0] is not None and forms[1] is not None and _form_of(forms[0]) != _form_of(forms[1]):
        return f"{_named(a)} makes {_text_of(forms[0])} and {_text_of(forms[1])}"
    return f"{_named(a)} has other arguments in each iteration"


def _text_of(tensor: Tensor) -> str:
    return f"{tuple(tensor.shape)} {tensor.dtype}{'' if tensor.requires_grad else ' without a gradient'}"


def plan_loop(stretch: Stretch, values: Sequence[Value], least: int = LEAST) -> LoopPlan:
    """Plan a loop with the fewest carries; NotRolled with the reason."""
    if stretch.difference:
        raise NotRolled(stretch.difference)
    reasons: list[str] = []
    # Where an iteration has equal parts, several of them are one.
    for period in range(stretch.period, len(stretch.nodes) // least + 1, stretch.period):
        plans: list[LoopPlan] = []
        for shift in range(period):
            turns = (len(stretch.nodes) - shift) // period
            if turns >= least:
                try:
                    plans.append(_planned(stretch.nodes[shift:], period, turns, values))
                except NotRolled as err:
                    reasons.append(str(err))
        if plans:
            plan = min(plans, key=lambda plan: plan.cost)
            _check_memory(plan)
            return plan
    raise NotRolled(reasons[0])


def _check_memory(plan: LoopPlan) -> None:
    """Refuse writes to memory of the loop behind it."""
    own = [*plan.place, *plan.invariants, *(node for _, node in plan.carries)]
    own += [node for rows in plan.rows for node in rows.tensors]
    storages = {storage for node in own for storage in _storages(node)}
    node = plan.iterations[-1][-1].next
    while node.op != "output":
        for changed in changed_in_place(node) if node.op in CALLS else ():
            if not storages.isdisjoint(_storages(changed)):
                raise NotRolled(f"{_named(node)} changes a tensor of the loop in place")
        node = node.next


def with_errors(graph: fx.Graph) -> set[fx.Node]:
    """Return the nodes that gradients of the outputs of a Dynamo graph reach.

    What an op writes to in place counts as an output.
    """
    found: set[fx.Node] = set()
    waiting = [graph.output_node(), *filter(changed_in_place, (n for n in graph.nodes if n.op in CALLS))]
    while waiting:
        node = waiting.pop()
        if node not in found:
            found.add(node)
            waiting += filter(_needs_gradient, node.all_input_nodes)
    return found


def _needs_gradient(node: fx.Node) -> bool:
    value = node.meta.get("example_value")
    tensors = value if isinstance(value, list | tuple) else [value]
    return any(isinstance(t, Tensor) and t.requires_grad for t in tensors)


class _Hole:
    """Stands for a node, or for a number that may differ, in the kind of a node."""

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Hole)

    def __hash__(self) -> int:
        return 0


_HOLE = _Hole()


def _kind_of(node: fx.Node, values: Sequence[Value], live: set[fx.Node]) -> Hashable:
    """Return a key of equal nodes in two iterations; a node without a key is its own."""
    number = probed(node)
    if number is not None:
        return "probe", values[number].form, node.all_input_nodes[0] in live
    args = _with_holes((node.args, node.kwargs))
    if _takes_rows(node):
        args = _with_holes(((node.args[0], _index_with_holes(node.args[1])), {}))
    elif _takes_numbers(node):
        args = tuple(type(arg) if type(arg) in (int, float) else _with_holes(arg) for arg in node.args)
    kind = node.op, node.target, args, _form_of(node.meta.get("example_value")), node in live
    try:
        hash(kind)
    except TypeError:
        return node
    return kind


def _with_holes(value: Any) -> Hashable:
    """Return an argument as a key, with holes in the place of nodes; numbers of other types are others."""
    if isinstance(value, fx.Node):
        return _HOLE
    if isinstance(value, slice):
        return "slice", _with_holes(value.start), _with_holes(value.stop), _with_holes(value.step)
    if isinstance(value, list | tuple):
        return tuple(map(_with_holes, value))
    if isinstance(value, Mapping):
        return tuple((key, _with_holes(one)) for key, one in value.items())
    return type(value), repr(value) if isinstance(value, float) else value


def _form_of(value: Any) -> Hashable:
    if isinstance(value, Tensor):
        sizes = tuple(map(str, value.shape)), tuple(map(str, value.stride()))
        return type(value), sizes, value.dtype, value.device, value.requires_grad
    if isinstance(value, list | tuple):
        return tuple(map(_form_of, value))
    return str(type(value))


def _takes_rows(node: fx.Node) -> bool:
    """Return whether a node indexes a tensor with constants."""
    if node.target is not operator.getitem or not isinstance(node.args[0], fx.Node):
        return False
    parts = _parts(node.args[1])
    return isinstance(fake_of(node.args[0]), Tensor) and all(
        isinstance(part, int | slice | None | type(...)) and not isinstance(part, bool) for part in parts
    )


def _takes_numbers(node: fx.Node) -> bool:
    """Return whether a number among the arguments of a node may as well be a tensor."""
    value = fake_of(node)
    if node.target not in _ARITHMETIC or node.kwargs or value is None or value.is_complex():
        return False
    return bool(value.dim()) or value.dtype in (torch.float32, torch.float64, torch.int64)


def _parts(index: Any) -> Index:
    return tuple(index) if isinstance(index, list | tuple) else (index,)


def _index_with_holes(index: Any) -> Hashable:
    return tuple(
        _HOLE if isinstance(part, int) else ("slice", _HOLE) if _is_window(part) else _with_holes(part)
        for part in _parts(index)
    )


def _is_window(part: Any) -> bool:
    return isinstance(part, slice) and isinstance(part.start, int) and isinstance(part.stop, int) and part.step is None


def _planned(nodes: Sequence[fx.Node], period: int, turns: int, values: Sequence[Value]) -> LoopPlan:
    plan = LoopPlan([list(nodes[t * period : (t + 1) * period]) for t in range(turns)])
    plan.place = {node: (t, r) for t, own in enumerate(plan.iterations) for r, node in enumerate(own)}
    order = {node: n for n, node in enumerate(nodes[0].graph.nodes)}
    plan.modes = _modes_at(nodes[0])
    _check_modes(plan)
    planner = _Planner(plan, order, values)
    for r in range(period):
        planner.read(r)
    planner.find_results()
    return plan


@dataclass(eq=False)
class _Planner:
    """Finds the sources of all arguments in an iteration."""

    plan: LoopPlan
    order: Mapping[fx.Node, int]  # of the nodes of the graph
    values: Sequence[Value]

    def read(self, r: int) -> None:
        """Find the sources of the arguments of the node at a position."""
        plan = self.plan
        column = [own[r] for own in plan.iterations]
        _check_pure(column[0])
        if _takes_rows(column[0]) and self._take_rows(r, column):
            return
        self._take_numbers(r, column)
        arguments = [_nodes_in(node) for node in column]
        for number, own in enumerate(zip(*arguments, strict=True)):
            plan.reads[r, number] = self._read_of(own)
        if probed(column[0]) is not None and plan.reads[r, 0].kind != "inside":
            raise NotRolled("an iteration begins between a value and its probe")

    def _take_rows(self, r: int, column: Sequence[fx.Node]) -> bool:
        """Let a node that takes row t of a tensor from outside be an input of the iteration."""
        plan = self.plan
        sources = {node.args[0] for node in column}
        source = column[0].args[0]
        assert isinstance(source, fx.Node)
        indices = [_parts(node.args[1]) for node in column]
        if all(index == indices[0] for index in indices):
            return False
        if len(sources) > 1 or source in plan.place:
            raise NotRolled(f"{_named(column[0])} takes other rows in each iteration, of a value of the iteration")
        found = _rows_of(source, indices)
        if found is None:
            raise NotRolled(f"{_named(column[0])} takes rows that are no arithmetic progression of one dimension")
        rows, rest = found
        plan.taken[r] = len(plan.rows), rest  # each is a value of its own, if only by name
        plan.rows.append(rows)
        return True

    def _take_numbers(self, r: int, column: Sequence[fx.Node]) -> None:
        """Let numbers that differ from iteration to iteration be inputs."""
        value = fake_of(column[0])
        if value is None or not _takes_numbers(column[0]):
            return
        given = [fake for fake in map(fake_of, column[0].all_input_nodes) if fake is not None]
        is_half = value.itemsize < 4 and any(fake.is_floating_point() for fake in given)
        dtype = torch.float32 if is_half else value.dtype
        for n, arg in enumerate(column[0].args):
            numbers: Any = tuple(node.args[n] for node in column)
            if type(arg) in (int, float) and len(set(numbers)) > 1:
                rows = Rows((), numbers=numbers, dtype=dtype, device=value.device)
                self.plan.numbers[r, n] = self._number(self.plan.rows, rows)

    def _read_of(self, column: Sequence[fx.Node]) -> Read:
        plan = self.plan
        places = [plan.place.get(node) for node in column]
        inside = [place for place in places if place is not None]
        if not inside:
            return self._read_outside(column)
        r = inside[0][1]
        if places == [(t, r) for t in range(plan.length)]:
            return Read("inside", r)
        if places[0] is None and places[1:] == [(t, r) for t in range(plan.length - 1)]:
            return self._read_carry(r, column[0])
        raise NotRolled(f"an iteration reads {_named(plan.first[r])} of others than the one before")

    def _read_carry(self, r: int, first: fx.Node) -> Read:
        plan = self.plan
        before, after = fake_of(first), fake_of(plan.first[r])
        name = _named(plan.first[r])
        if before is None or after is None:
            raise NotRolled(f"{name}, which is no tensor, is handed on to the next iteration")
        if before.requires_grad and not after.requires_grad:
            raise NotRolled(f"the first value of {name} has a gradient, and later ones have none")
        if _shape(before) != _shape(after):
            raise NotRolled(f"{name} is {_shape(after)}, and the first iteration is given {_shape(before)}")
        return Read("carry", self._number(plan.carries, (r, first)))

    def _read_outside(self, column: Sequence[fx.Node]) -> Read:
        plan, first = self.plan, column[0]
        if all(node is first for node in column):
            if fake_of(first) is None:
                raise NotRolled(f"{first.name} is no tensor")
            return Read("invariant", self._number(plan.invariants, first))
        start = self.order[plan.first[0]]
        if any(self.order[node] > start for node in column):
            raise NotRolled(f"{first.name} and its like are no values from before the loop")
        return Read("rows", self._number(plan.rows, self._rows_of(column)))

    def _rows_of(self, column: Sequence[fx.Node]) -> Rows:
        """Return the rows behind these nodes, one an iteration.

        Rows that only the loop reads leave the graph. Those that are read elsewhere too have errors from there, and are
        stacked.
        """
        plan, rows = self.plan, rows_of_column(column)
        if not rows.step:
            return rows
        probes = [[n for n in map(probed, node.users) if n is not None] for node in column]
        forms = {tuple(self.values[n].form for n in own) for own in probes}
        readers = [
            {plan.place.get(user, (t, 0))[0] if probed(user) is None else t for user in node.users}
            for t, node in enumerate(column)
        ]
        is_outside = any(user not in plan.place and probed(user) is None for node in column for user in node.users)
        if is_outside or any(own != {t} for t, own in enumerate(readers)) or len(forms) > 1 or len(probes[0]) > 1:
            return Rows(tuple(column))
        values = [n for own in probes for n in own]
        if values != sorted(values):  # iterations would count down
            return Rows(tuple(column))
        return replace(rows, values=tuple(values))

    def _number(self, known: list[Any], one: Any) -> int:
        if one not in known:
            known.append(one)
        return known.index(one)

    def find_results(self) -> None:
        """Find the values that are read behind the loop."""
        plan = self.plan
        carried = {r for r, _ in plan.carries}
        found = set()
        for node, (t, r) in plan.place.items():
            outside = [user for user in node.users if user not in plan.place]
            if not outside:
                continue
            if fake_of(node) is None:
                raise NotRolled(f"{_named(node)}, which is no tensor, is read behind the loop")
            if r in plan.taken:
                raise NotRolled(f"{_named(node)}, a row of a tensor, is read behind the loop")
            if not (r in carried and t == plan.length - 1):
                found.add(r)
        plan.results = sorted(found)


def _modes_at(node: fx.Node) -> list[tuple[Any, ...]]:
    """Return the arguments of autocast that hold at a node; NotRolled without gradients."""
    found: dict[fx.Node, tuple[Any, ...]] = {}
    enabled: object = True
    for earlier in itertools.takewhile(lambda other: other is not node, node.graph.nodes):
        if earlier.target is enter_autocast:
            found[earlier] = earlier.args
        elif earlier.target is exit_autocast:
            found.pop(earlier.args[0], None)
        elif earlier.target is set_grad_enabled:
            (enabled,) = earlier.args
    if not enabled:
        raise NotRolled("it runs without gradients")
    return [*autocast_around(), *found.values()]


def _check_modes(plan: LoopPlan) -> None:
    set_to = [node.args[0] for node in plan.first if node.target is set_grad_enabled]
    if set_to and (set_to[0] or not set_to[-1]):
        raise NotRolled("an iteration begins without gradients")


def _check_pure(node: fx.Node) -> None:
    if probed(node) is not None or node.target in MODES:
        return
    if changed_in_place(node):
        raise NotRolled(f"{_named(node)} changes a tensor in place")
    value = node.meta.get("example_value")
    tensors = [t for t in (value if isinstance(value, list | tuple) else [value]) if isinstance(t, Tensor)]
    if not tensors:
        raise NotRolled(f"{_named(node)} makes no tensor")
    if op_name(node) in ("batch_norm", "instance_norm") or (op_name(node) == "embedding" and _renorms(node)):
        raise NotRolled(f"{_named(node)} may write to a buffer or a parameter")
    if any(map(autograd.is_transformed, tensors)):
        raise NotRolled(f"{_named(node)} runs in a transform of torch.func")
    if any(fake_tensors.is_wrapper(t) for t in tensors):
        raise NotRolled(f"{_named(node)} makes a {type(tensors[0]).__name__}")
    if operators.is_higher_order(node.target):
        raise NotRolled(f"{_named(node)} is a higher-order operator")


def _renorms(node: fx.Node) -> bool:
    return _argument(node, 3, "max_norm", None) is not None


def _nodes_in(node: fx.Node) -> list[fx.Node]:
    found: list[fx.Node] = []
    fx.map_arg((node.args, node.kwargs), found.append)
    return found


def _named(node: fx.Node) -> str:
    return f"{op_name(node)} ({source_of(node)})" if source_of(node) else op_name(node)


def _storages(node: fx.Node) -> set[int]:
    """Return the storages of the tensors of a node."""
    value = node.meta.get("example_value")
    tensors = value if isinstance(value, list | tuple) else [value]
    return {fake_tensors.storage_key(t) for t in tensors if isinstance(t, Tensor) and not fake_tensors.is_wrapper(t)}


def _shape(tensor: Tensor) -> tuple[tuple[Any, ...], torch.dtype, torch.device]:
    return tuple(tensor.shape), tensor.dtype, tensor.device


def _rows_of(source: fx.Node, indices: Sequence[Index]) -> tuple[Rows, Index] | None:
    """Return the rows that indices take, and the index that is left for a row; None if they are no progression."""
    varying = [n for n in range(len(indices[0])) if len({repr(index[n]) for index in indices}) > 1]
    if len(varying) != 1:
        return None
    (at,) = varying
    parts = [index[at] for index in indices]
    sizes = {None if isinstance(part, int) else part.stop - part.start for part in parts}
    starts = [part if isinstance(part, int) else part.start for part in parts]
    rows = _progression(source, _dimension_of(indices[0], at, source), starts, sizes)
    if rows is None:
        return None
    rest = [*indices[0]]
    rest[at : at + 1] = [] if rows.size is None else [slice(None)]
    return rows, () if all(part == slice(None) for part in rest) else tuple(rest)


def _dimension_of(index: Index, at: int, source: fx.Node) -> int:
    """Return the dimension of a tensor that a part of an index is for."""
    used = [part is not None and part is not ... for part in index]
    if any(part is ... for part in index[:at]):
        value = fake_of(source)
        assert value is not None
        return value.dim() - sum(used[at:])
    return sum(used[:at])


def rows_of_column(column: Sequence[fx.Node]) -> Rows:
    """Return the rows that are these nodes, one an iteration."""
    if any(fake_of(node) is None for node in column):
        raise NotRolled(f"{column[0].name} and its like are no tensors")
    parents = {node.args[0] if node.target is operator.getitem else None for node in column}
    parent = parents.pop() if len(parents) == 1 else None
    if isinstance(parent, fx.Node) and fake_of(parent) is not None and all(map(_takes_rows, column)):
        found = _rows_of(parent, [_parts(node.args[1]) for node in column])
        if found is not None and not found[1]:
            return found[0]
    is_plain = isinstance(parent, fx.Node) and bool(parent.args) and parent.kwargs.keys() <= {"dim"}
    if isinstance(parent, fx.Node) and is_plain and all(isinstance(node.args[1], int) for node in column):
        numbers: Any = [node.args[1] for node in column]
        split = SPLITS.get(op_name(parent))
        found_rows = split(parent, numbers) if split is not None else None
        if found_rows is not None:
            return found_rows
    if any(node.op == "placeholder" for node in column):
        raise NotRolled(f"each iteration has inputs of its own ({column[0].name}, {column[1].name}, ...)")
    if len({_form_of(fake_of(node)) for node in column}) > 1:
        raise NotRolled(f"{column[0].name} and its like have different forms")
    return Rows(tuple(column))


def _argument(node: fx.Node, position: int, name: str, default: Any) -> Any:
    return node.args[position] if len(node.args) > position else node.kwargs.get(name, default)


def _of_unbind(node: fx.Node, numbers: Sequence[int]) -> Rows | None:
    source = node.args[0]
    return _progression(source, int(_argument(node, 1, "dim", 0)), numbers, {None})


def _of_parts(node: fx.Node, numbers: Sequence[int]) -> Rows | None:
    """Return rows of ``chunk`` or ``split``; None for parts of several sizes."""
    dim = int(_argument(node, 2, "dim", 0))
    sizes = [part.shape[dim] for part in node.meta["example_value"]]
    if not all(isinstance(size, int) for size in sizes):
        return None
    return _progression(node.args[0], dim, [n * sizes[0] for n in numbers], set(sizes))


def _progression(source: Any, dim: int, starts: Sequence[int], sizes: Collection[Any]) -> Rows | None:
    """Return the rows at an arithmetic progression of places."""
    value = fake_of(source) if isinstance(source, fx.Node) else None
    if value is None or len(sizes) != 1:
        return None
    (size,), dim = sizes, dim % value.dim()
    length = value.shape[dim]
    if isinstance(length, int):
        starts = [n + length if n < 0 else n for n in starts]
        if max(starts) + (size or 1) > length:
            return None
    steps = {b - a for a, b in itertools.pairwise(starts)}
    if len(steps) != 1 or min(starts) < 0 or (size is not None and (size < 1 or min(steps) < 1)):
        return None
    return Rows((source,), dim, starts[0], steps.pop(), size)


SPLITS: Mapping[str, Callable[[fx.Node, Sequence[int]], Rows | None]] = {
    "unbind": _of_unbind,
    "chunk": _of_parts,
    "split": _of_parts,
    "tensor_split": _of_parts,
}
