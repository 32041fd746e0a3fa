"""Python loops, rolled again: a stretch of equal iterations in a Dynamo graph becomes one call of a loop."""

from __future__ import annotations

import contextlib
import itertools
import operator
import statistics
from collections import Counter
from collections.abc import Hashable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, fx

from gradrewrite._compat import fake_tensors, operators
from gradrewrite._compat.mode_nodes import enter_autocast, exit_autocast
from gradrewrite.instrumentation.dynamo_nodes import checkpoint_body, fake_of, is_checkpoint, op_name
from gradrewrite.instrumentation.inner_gradients import REASON, differentiated_inside
from gradrewrite.instrumentation.loop_plans import (
    CALLS,
    LEAST,
    SPLITS,
    LoopPlan,
    NotRolled,
    Rows,
    find_stretches,
    plan_loop,
    with_errors,
)
from gradrewrite.instrumentation.loops import run_loop
from gradrewrite.instrumentation.probes import add_probe, probed
from gradrewrite.instrumentation.source_locations import source_of
from gradrewrite.ir.marked_loops import RolledLoop
from gradrewrite.ir.values import Value

LONG = 32  # iterations: ``explain()`` speaks of loops that stay unrolled


@dataclass(frozen=True, slots=True)
class LoopReport:
    """A Python loop that the tracer has unrolled.

    Attributes:
        source: ``file:line "code"`` of its first line that makes a tensor.
        iterations: How many of them are equal.
        carried: Number of tensors that an iteration hands on to the next one.
        by_time: Number of inputs that differ from iteration to iteration.
        reason: Why it stays unrolled; ``""`` for a rolled one.
    """

    source: str
    iterations: int
    carried: int = 0
    by_time: int = 0
    reason: str = ""

    def __str__(self) -> str:
        """One line."""
        begin = f"loop of {self.iterations} iterations at {self.source or 'an unknown line'}"
        if self.reason:
            return f"{begin}: unrolled: {self.reason}"
        return f"{begin}: rolled, {self.carried} carried, {self.by_time} read by iteration"


def roll_loops(
    gm: fx.GraphModule, values: Sequence[Value], least: int = LEAST
) -> tuple[list[RolledLoop], list[LoopReport]]:
    """Roll the Python loops of a Dynamo graph with probes, in place; return them, and a report of each stretch.

    Loops in activation checkpoints are those of the checkpoint's body.
    """
    loops: list[RolledLoop] = []
    reports: list[LoopReport] = []
    for body in checkpoint_bodies(gm):
        inside, reports_inside = roll_loops(body, values, least)
        loops += inside
        reports += reports_inside
        body.recompile()
    left = differentiated_inside(gm)
    for stretch in find_stretches(gm.graph, values, least):
        try:
            if not left.isdisjoint(stretch.nodes):
                raise NotRolled(REASON)
            plan = plan_loop(stretch, values, least)
            loops.append(_Rolling(gm, plan, values).roll())
            reports.append(LoopReport(stretch.source, plan.length, len(plan.carries), len(plan.rows)))
        except NotRolled as err:
            reports.append(LoopReport(stretch.source, stretch.turns, reason=str(err)))
    if loops:
        gm.graph.lint()
    return loops, reports


def checkpoint_bodies(gm: fx.GraphModule) -> Iterator[fx.GraphModule]:
    """Yield the bodies of the activation checkpoints in a Dynamo graph; their inputs get their fake tensors."""
    for node in filter(is_checkpoint, gm.graph.nodes):
        body, outside = checkpoint_body(gm, node, {})
        for inner, outer in outside.items():
            inner.meta.setdefault("example_value", outer.meta.get("example_value"))
        yield body


def find_long_loops(gm: fx.GraphModule, values: Sequence[Value]) -> list[LoopReport]:
    """Return reports of the loops of a Dynamo graph that are worth rolling."""
    reports, left = [], differentiated_inside(gm)
    for stretch in find_stretches(gm.graph, values, LONG, explains=False):
        with contextlib.suppress(NotRolled):
            if not left.isdisjoint(stretch.nodes):
                continue
            plan = plan_loop(stretch, values, LONG)
            sizes = plan.length, len(plan.carries), len(plan.rows)
            reports.append(LoopReport(stretch.source, *sizes, f'loops="rolled" would compile 1 of {plan.length}'))
    return reports


class _Rolling:
    """Puts one loop in the place of its iterations."""

    def __init__(self, gm: fx.GraphModule, plan: LoopPlan, values: Sequence[Value]) -> None:
        self._gm, self._plan, self._values = gm, plan, values
        self._live = with_errors(gm.graph)
        # Values of which the last one alone is read behind the loop are handed on.
        self._last = [r for r in plan.results if self._is_read_last(r)]
        self._stacked = [r for r in plan.results if r not in self._last]

    def _is_read_last(self, r: int) -> bool:
        plan = self._plan
        readers = [node for own in plan.iterations[:-1] for node in own[r].users if node not in plan.place]
        fake = fake_of(plan.first[r])
        assert fake is not None
        return not readers and all(isinstance(size, int) for size in fake.shape)

    def roll(self) -> RolledLoop:
        """Roll the loop."""
        plan, graph = self._plan, self._gm.graph
        body, nodes = self._body()
        self._check_body(body, nodes)
        name = next((self._values[n].calls[-1][0] for n in self._numbers() if self._values[n].calls), "")
        loop = RolledLoop(name, body, len(plan.carries) + len(self._last), max(1, len(plan.rows)), False, plan.length)
        before = self._before()
        for n, rows in enumerate(plan.rows):
            if rows.values:
                row = body.graph.find_nodes(op="placeholder")[loop.num_carries + n]
                self._note_value(loop, rows.values, row, before)
        for r, node in enumerate(plan.first):
            if probed(node) is not None:
                numbers = [number for own in plan.iterations if (number := probed(own[r])) is not None]
                self._note_value(loop, numbers, nodes[r].all_input_nodes[0], before)
        results = [r for r, _ in plan.carries] + self._last + self._stacked
        loop.detached = frozenset(n for n, r in enumerate(results) if not self._has_error(r))
        loop.is_marked = True
        setattr(self._gm, f"{loop.key}_body", body)
        behind = next(node for node in _after(plan.iterations[-1][-1]) if node not in plan.place)
        with graph.inserting_before(behind):
            tensors = [graph.call_method("contiguous", (node,)) for _, node in plan.carries]
            for n in loop.detached & set(range(len(tensors))):
                tensors[n] = graph.call_method("detach", (tensors[n],))
            tensors += [self._zeros(r) for r in self._last]
            tensors += [self._stack_of(rows) for rows in plan.rows] or [self._counter()]
            body_node = graph.get_attr(f"{loop.key}_body")
            call = graph.call_function(run_loop, (body_node, loop.key, *tensors, *plan.invariants))
            self._let_read(call, behind)
        for own in reversed(plan.iterations):
            for node in reversed(own):
                graph.erase_node(node)
        self._erase_rows()
        return loop

    def _erase_rows(self) -> None:
        """Erase the probes of values that have moved into the loop, and their nodes."""
        moved = {number for rows in self._plan.rows for number in rows.values}
        for node in reversed(self._gm.graph.nodes):
            if probed(node) in moved or (
                not node.users and (op_name(node) in SPLITS or node.target is operator.getitem)
            ):
                self._gm.graph.erase_node(node)

    def _check_body(self, body: fx.GraphModule, made: Sequence[fx.Node]) -> None:
        """Refuse bodies with random numbers, or with a need for other strides."""
        plan = self._plan
        fakes = [fake_of(plan.first[r]) for r in (*(r for r, _ in plan.carries), *self._last)]
        with fake_tensors.fake_mode_of([node.meta.get("example_value") for node in plan.first]), torch.no_grad():
            tensors = [t.contiguous() for t in fakes if t is not None]
            tensors += [torch.zeros((), dtype=torch.bool)] * (not plan.rows)
            for rows in plan.rows:
                given = [t for t in map(fake_of, rows.tensors) if t is not None]
                place = rows.dim, rows.first, rows.step, rows.size, plan.length
                row = stacked(given, *place)[0].contiguous() if given else torch.zeros((), dtype=rows.dtype)
                tensors.append(row if rows.device is None else row.to(rows.device))
            tensors += [t for t in map(fake_of, plan.invariants) if t is not None]
            noted = operators.RandomNoted()  # type: ignore[no-untyped-call]
            run = _Run(body)
            try:
                with noted:
                    run.run(*tensors)
            except RuntimeError as err:
                raise NotRolled(f"its tensors are contiguous in a loop: {str(err).splitlines()[0]}") from err
        if noted.is_random:
            raise NotRolled("an iteration draws random numbers")
        for node, inner in zip(plan.first, made, strict=True):
            is_same = any(fake_of(given) is fake_of(node) for given in node.all_input_nodes)
            if op_name(node) == "contiguous" and is_same != (inner in run.passed_on):
                raise NotRolled(f"a tensor of {source_of(node)} is contiguous in a loop, and was not")

    def _note_value(self, loop: RolledLoop, numbers: Sequence[int], node: fx.Node, before: int) -> None:
        key = str(numbers[0])
        loop.values[key], loop.nodes[key], loop.numbers[key] = self._values[numbers[0]], node, numbers[0]
        loop.iterations[key], loop.outside[key] = list(numbers), before

    def _has_error(self, r: int) -> bool:
        """Return whether the error of a result comes to the loop."""
        node, fake = self._plan.first[r], fake_of(self._plan.first[r])
        return fake is not None and fake.requires_grad and node in self._live

    def _numbers(self) -> list[int]:
        return [number for number in map(probed, self._plan.first) if number is not None]

    def _before(self) -> int:
        """Return the number of iterations before the loop, by lines of code."""

        def key(node: fx.Node) -> Hashable:
            stack = node.meta.get("nn_module_stack", {})
            return node.op, node.target, source_of(node), tuple(path for path, _ in stack.values())

        first = [node for node in self._plan.first if probed(node) is None]
        of_iteration = Counter(map(key, first))
        earlier: Counter[Hashable] = Counter()
        for node in itertools.takewhile(lambda node: node is not self._plan.first[0], self._gm.graph.nodes):
            earlier[key(node)] += 1
        return statistics.mode(earlier[key(node)] // of_iteration[key(node)] for node in first)

    def _body(self) -> tuple[fx.GraphModule, list[fx.Node]]:
        """Return the body, and its node for each position."""
        plan, graph = self._plan, fx.Graph()
        num_rows = max(1, len(plan.rows))
        carries = [graph.placeholder(f"carry_{n}") for n in range(len(plan.carries) + len(self._last))]
        rows = [graph.placeholder(f"row_{n}") for n in range(num_rows)]
        invariants = [graph.placeholder(f"invariant_{n}") for n in range(len(plan.invariants))]
        modes = [graph.call_function(enter_autocast, mode) for mode in plan.modes]
        for row, given in zip(rows, plan.rows, strict=False):
            if given.values:
                add_probe(row, given.values[0])
        made: list[fx.Node] = []
        for r, node in enumerate(plan.first):
            if r in plan.taken:
                number, rest = plan.taken[r]
                made.append(rows[number])
                if rest:
                    made[-1] = graph.call_function(operator.getitem, (rows[number], rest))
                continue
            numbers = itertools.count()

            def argument(outer: fx.Node, r: int = r, numbers: Iterator[int] = numbers) -> fx.Node:
                read = plan.reads[r, next(numbers)]
                known = {"inside": made, "carry": carries, "rows": rows, "invariant": invariants}
                inner = known[read.kind][read.number]
                inner.meta.setdefault("example_value", outer.meta.get("example_value"))
                return inner

            args, kwargs = fx.map_arg((node.args, node.kwargs), argument)
            args = tuple(rows[plan.numbers[r, n]] if (r, n) in plan.numbers else arg for n, arg in enumerate(args))
            made.append(graph.create_node(node.op, node.target, args, kwargs))
            made[-1].stack_trace = node.stack_trace
        for mode in reversed(modes):
            graph.call_function(exit_autocast, (mode,))
        handed_on = [made[r] for r, _ in plan.carries] + [made[r] for r in self._last]
        graph.output((*handed_on, *(made[r] for r in self._stacked)))
        return fx.GraphModule(self._gm, graph), made

    def _zeros(self, r: int) -> fx.Node:
        """Make the first value of one that is handed on to be read behind the loop, and is read nowhere in it."""
        fake = fake_of(self._plan.first[r])
        assert fake is not None
        options: dict[str, Any] = {"dtype": fake.dtype, "device": fake.device}
        return self._gm.graph.call_function(torch.zeros, (tuple(fake.shape),), options)

    def _counter(self) -> fx.Node:
        """Make the input of a loop that reads nothing by iteration."""
        device = next(fake.device for fake in map(fake_of, self._plan.first) if fake is not None)
        options: dict[str, Any] = {"dtype": torch.bool, "device": device}
        return self._gm.graph.call_function(torch.zeros, (self._plan.length,), options)

    def _stack_of(self, rows: Rows) -> fx.Node:
        """Make the stack of an input."""
        graph = self._gm.graph
        if rows.numbers:
            options: dict[str, Any] = {"dtype": rows.dtype, "device": rows.device}
            return graph.call_function(torch.tensor, (list(rows.numbers),), options)
        given = list(rows.tensors), rows.dim, rows.first, rows.step, rows.size, self._plan.length
        return graph.call_function(stacked, given)

    def _let_read(self, call: fx.Node, behind: fx.Node) -> None:
        """Let the nodes behind the loop read its results."""
        plan, graph = self._plan, self._gm.graph
        last = [r for r, _ in plan.carries] + self._last
        for r in dict.fromkeys([*last, *self._stacked]):
            users = dict.fromkeys(user for own in plan.iterations for user in own[r].users)
            outside = [user for user in users if user not in plan.place]
            if not outside:
                continue
            column = [own[r] for own in plan.iterations]
            stack = final = None
            if r in self._stacked:
                fake = fake_of(column[0])
                assert fake is not None
                stack = graph.call_function(operator.getitem, (call, len(last) + self._stacked.index(r)))
                stack.meta["example_value"] = fake.new_empty((plan.length, *fake.shape))
            if r in last:
                final = graph.call_function(operator.getitem, (call, last.index(r)))
                final.meta = dict(column[-1].meta)
            left = [user for user in outside if stack is None or not _read_joined(user, column, stack)]
            for t, node in enumerate(column):
                readers = [user for user in node.users if user in left]
                if readers:
                    one = final if t == plan.length - 1 and final is not None else None
                    if one is None:
                        assert stack is not None
                        one = graph.call_function(operator.getitem, (stack, t))
                        one.meta = dict(node.meta)
                    for user in readers:
                        user.replace_input_with(node, one)


def _read_joined(user: fx.Node, column: list[fx.Node], stack: fx.Node) -> bool:
    """Let a node that joins the values of a column read their stack; return whether it does."""
    if user.target not in (torch.stack, torch.cat) or not user.args or not isinstance(user.args[0], list | tuple):
        return False
    if not user.kwargs.keys() <= {"dim"}:
        return False
    values = list(user.args[0])
    at = next((n for n in range(len(values)) if values[n : n + len(column)] == column), None)
    if at is None or not set(column).isdisjoint(values[:at] + values[at + len(column) :]):
        return False
    dim = user.args[1] if len(user.args) > 1 else user.kwargs.get("dim", 0)
    user.args = values[:at], stack, values[at + len(column) :], dim, user.target is torch.stack
    user.kwargs, user.target = {}, joined_again
    return True


class _Run(fx.Interpreter):
    """Runs a body and notes the nodes that return an input."""

    def __init__(self, body: fx.GraphModule) -> None:
        super().__init__(body)
        self.passed_on: set[fx.Node] = set()

    def run_node(self, n: fx.Node) -> Any:
        result = super().run_node(n)
        if n.op in CALLS and any(self.env[given] is result for given in n.all_input_nodes):
            self.passed_on.add(n)
        return result


def _after(node: fx.Node) -> Any:
    while True:
        node = node.next
        yield node


def stacked(tensors: list[Tensor], dim: int, first: int, step: int, size: int | None, length: int) -> Tensor:
    """Return the rows that a loop reads, one an iteration, as a view if there is one; see ``Rows``."""
    if not step:
        return torch.stack(tensors)
    (x,) = tensors
    if size is not None:
        window = x.narrow(dim, first, (length - 1) * step + size)
        if size != step:
            return window.unfold(dim, size, step).movedim((dim, -1), (0, dim + 1))
        shape = *window.shape[:dim], length, size, *window.shape[dim + 1 :]
        return window.reshape(shape).movedim(dim, 0)
    last = first + step * (length - 1)
    found = x.movedim(dim, 0)[min(first, last) : max(first, last) + 1 : abs(step)]
    return found if step > 0 else found.flip(0)


def joined_again(before: list[Tensor], stack: Tensor, after: list[Tensor], dim: int, is_stack: bool) -> Tensor:
    """Join tensors, a stack of values of a loop among them, as ``torch.stack`` or ``torch.cat``."""
    if is_stack:
        moved = stack.movedim(0, dim)
        join = torch.stack
    else:
        dim = dim % (stack.dim() - 1)
        moved = stack.movedim(0, dim).flatten(dim, dim + 1)
        join = torch.cat
    parts = [*([join(before, dim)] if before else []), moved, *([join(after, dim)] if after else [])]
    return torch.cat(parts, dim) if len(parts) > 1 else moved.clone(memory_format=torch.contiguous_format)
