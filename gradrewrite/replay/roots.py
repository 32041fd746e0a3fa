"""Roots of non-finite values in a replay, with their stories."""

from __future__ import annotations

import operator
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor, fx

from gradrewrite._utils.tensors import computable
from gradrewrite.errors import Story
from gradrewrite.ir import markers
from gradrewrite.ir.inputs import GraphInput
from gradrewrite.ir.replay_graph import ReplayGraph
from gradrewrite.numerics.measuring import OPAQUE
from gradrewrite.replay.loop_observation import ObservedLoop, RootInside
from gradrewrite.replay.noted_calls import (
    BatchSizes,
    NotedCall,
    common_value,
    large_column,
    operand_of,
    reads_values,
)
from gradrewrite.replay.observations import (
    Observing,
    Order,
    Repair,
    SiteObservation,
    has_nan,
)
from gradrewrite.replay.reason_table import DERIVATIVES
from gradrewrite.replay.reasons import Reason
from gradrewrite.sites import Site

FROM_LOSS = "the gradient that came from outside the model (the loss) was not finite already"
FROM_BEHIND = "the gradient that came from behind this part of the model was not finite already"
BEFORE_BREAK = "from before a graph break was not finite already"
ADVICE_ON_GIVEN = {
    "loss": "Look at the loss function: log, sqrt, a division by zero or by an empty mask; clamp its argument.",
    "behind": "gr.locate(model, *inputs) with the batch of that step names the op, behind a graph break too.",
    "input": "Look at the batch of that step, and filter such examples before they reach the model.",
    "parameter": "Look at the update before that step, and at what the parameter began with.",
    "buffer": "Look at what the buffer is computed from when the model is made, or at the step that wrote it.",
}
_SCALE = "Scale that column of the batch first, as (x - mean) / std. "
_SILENT = (markers.mark_activation, markers.mark_error, *OPAQUE)


@dataclass(frozen=True, slots=True)
class RootCause:
    """A root cause of non-finite values: an op, or a graph input."""

    node: str  # its name
    operands: Mapping[str, int]  # the nodes that its repair changes, with their positions among its arguments
    order: Order  # position in the order of execution
    is_forward: bool  # whether it belongs to the forward
    op: str  # ``module/op`` of the op that was run, forward or backward; ``""`` for what came in
    source: str  # line of that op
    is_inner: bool  # whether it is the backward of that op, in a gradient inside of the forward
    came_in: str  # what came into the graph already non-finite, in words; ``""`` for an op
    given: GraphInput | None  # what that is; None for an op, and for the loss
    reached: frozenset[str]  # names of the non-finite values that it leads to
    overwritten: str  # an input that was overwritten meanwhile and on which it depends; ``""`` if there is none
    story: Story
    repair: Repair | None  # of its arguments
    in_backward: bool = False  # the backward of the op made it
    is_again: bool = False  # it is an op of the forward that the backward computes again

    @property
    def is_from_outside(self) -> bool:
        """Whether code made it that was not traced."""
        return self.came_in in (FROM_LOSS, FROM_BEHIND) or self.came_in.endswith(BEFORE_BREAK)


@dataclass
class ReplayResult:
    """The observations of one replay."""

    seen: list[SiteObservation] = field(default_factory=list)  # values of sites, in the order of execution
    roots: list[RootCause] = field(default_factory=list)  # root causes, in that order
    overwritten: str = ""  # an input that was overwritten since; ``""`` if there is none
    has_given_infinities: bool = False  # an input of the model has infinities


class RootFinder(Observing):
    """An interpreter that finds the roots of bad values when it has run."""

    _replay_graph: ReplayGraph
    _nodes: list[fx.Node]
    _order: Mapping[fx.Node, int]
    _ops: Mapping[fx.Node, int]  # numbers of the ops that nodes belong to
    _numbers: Mapping[fx.Node, int]  # of values, by their node
    _inner: Mapping[fx.Node, int]  # nodes of gradients inside of the forward
    _output: fx.Node
    _gradients: Mapping[Site, Any]  # the outputs with gradients, by their sites
    _loops: dict[fx.Node, ObservedLoop]
    _failed: Mapping[str, Sequence[Site]]
    _given: Mapping[fx.Node, tuple[Any, str]]  # placeholders, with the names of overwritten ones
    _batch: Sequence[fx.Node]
    _sizes: BatchSizes

    def _find_roots(self) -> list[RootCause]:
        """Return the roots that lead to a failed check or to an output of the graph."""
        bad = self.bad()
        leads = {node for node in bad if node.name in self._failed} | (bad & set(self._output.all_input_nodes))
        leads |= {node for node, found in self._loops.items() if found.failed}
        roots: dict[tuple[fx.Node, str], RootInside | None] = {}  # by the node, in a loop also that of the body
        for node in reversed(self._nodes):
            if node not in leads:
                continue
            read, inside, loop = self._origins_of(node, bad)
            leads.update(read)
            for root in inside:
                known = roots.get((loop, root.node))
                if known is None or self._time_of(loop, root) < self._time_of(loop, known):
                    roots[loop, root.node] = root
            if not inside and not read and node not in self._loops:
                roots[node, ""] = None
        found = [self._root(node, root, bad) for (node, _), root in roots.items()]
        self.noted.clear()  # with their tensors
        self.grown.clear()
        return sorted(found, key=lambda root: (not root.is_forward, root.order))

    def _time_of(self, loop: fx.Node, root: RootInside) -> tuple[bool, Order]:
        order, is_forward = self._place_of(loop, root)
        return not is_forward, order

    def _origins_of(self, node: fx.Node, bad: set[fx.Node]) -> tuple[list[fx.Node], list[RootInside], fx.Node]:
        """Return the origins of a bad value: nodes, and ops inside a loop, with the loop."""
        is_result = node.target is operator.getitem and node.args[0] in self._loops
        loop: fx.Node = node.args[0] if is_result else node  # type: ignore[assignment]
        if loop not in self._loops:
            return [n for n in node.all_input_nodes if n in bad], [], loop
        found, given = self._loops[loop], loop.args[0]
        assert isinstance(given, list | tuple)
        origins = found.origins[node.args[1]] if is_result else found.failed  # type: ignore[index]
        read = [node for n, node in enumerate(given) if n in origins and node in bad]
        return read, [n for n in origins if isinstance(n, RootInside)], loop

    def _root(self, node: fx.Node, inside: RootInside | None, bad: set[fx.Node]) -> RootCause:
        reached, todo = {node.name}, self._results_of(node, inside, bad)
        while todo:
            at = todo.pop()
            if at.name not in reached:
                reached.add(at.name)
                todo += [user for user in at.users if user in bad]
        origin = node
        call = self.noted.get(node) if inside is None else self._loops[node].noted.get(inside)
        if call is not None and call.reason is not None and call.reason.is_overflow and inside is None:
            origin, call = self._growth_before(node, call)
        order, is_forward = self._place_of(node, inside)
        if inside is not None and is_forward:
            reached.add(self._call_of(node, inside).name)
        given = self.states[node].given
        if inside is None and given and (call is None or call.reason is None):  # a matrix product mixes all
            node = origin = next(n for n in self._batch if self._replay_graph.inputs[n.name].name == given)
        op, source = self._op_at(origin, inside) if node.op != "placeholder" else ("", "")
        return RootCause(
            is_again=not is_forward
            and (node.name if inside is None else inside.node).rstrip("_0123456789") not in DERIVATIVES,
            in_backward=not is_forward and origin is node,
            node=origin.name,
            operands=_operands_of(origin, call),
            repair=self._repair_of(node, call) if inside is None else None,
            story=self._story_of(node, call, reached),
            order=order,
            is_forward=is_forward,
            op=op,
            source=source,
            is_inner=inside is None and node in self._inner,
            came_in=self._describe_given(node) if node.op == "placeholder" else "",
            given=self._replay_graph.inputs.get(node.name),
            reached=frozenset(reached),
            overwritten=self.states[node].overwritten,
        )

    def _growth_before(self, node: fx.Node, call: NotedCall) -> tuple[fx.Node, NotedCall]:
        """Return the exponential behind an overflow, else the op itself."""
        todo, seen = [node], {node}
        while todo:
            for read in todo.pop().all_input_nodes:
                if read not in seen:
                    seen.add(read)
                    todo.append(read)
        first = next((grown for grown in self._nodes if grown in self.grown and grown in seen), None)
        if first is None or call.reason is None:
            return node, call
        grown = self.grown[first]
        assert grown.reason is not None
        why = f"{grown.reason.why}, and what is computed from it overflows ({call.reason.why})"
        return first, replace(grown, reason=replace(grown.reason, why=why))

    def _results_of(self, node: fx.Node, inside: RootInside | None, bad: Collection[fx.Node]) -> list[fx.Node]:
        """Return the bad values that read a root; of a loop the results that come from this op inside."""
        users = [user for user in node.users if user in bad]
        if inside is None:
            return users
        origins = [{o.node for o in own if isinstance(o, RootInside)} for own in self._loops[node].origins]
        return [
            user
            for user in users
            if user.target is not operator.getitem or inside.node in origins[user.args[1]]  # type: ignore[index]
        ]

    def _repair_of(self, node: fx.Node, call: NotedCall | None) -> Repair | None:
        if node.op == "placeholder":
            known = self._replay_graph
            is_given = node.name in known.inputs or (node.name in known.tangents and not known.is_whole)
            return (lambda values: [torch.nan_to_num(values[0], 0.0, 0.0, 0.0)]) if is_given else None
        return None if call is None or call.reason is None else call.reason.repair

    def _story_of(self, node: fx.Node, call: NotedCall | None, reached: Collection[str]) -> Story:
        """Return the story of a root."""
        if node.op == "placeholder":
            call = self._note_given(node)
        where, rows = ("", ()) if call is None else call.places(self._sizes if self._has_rows(node) else BatchSizes())
        reason = None if call is None else call.reason
        given = self.states[node].given
        why = "" if reason is None else reason.why
        known = self._replay_graph.inputs.get(node.name)
        role = ("loss" if self._replay_graph.is_whole else "behind") if known is None else known.role
        advice = ADVICE_ON_GIVEN.get(role, "") if node.op == "placeholder" else ""
        advice = advice if reason is None or not reason.advice else reason.advice
        facts = tuple(self._facts_of_batch(reason, rows, given))
        is_scaled = any(fact.startswith("column ") for fact in facts)
        return Story(
            why=why,
            facts=facts,
            advice=f"{_SCALE * is_scaled}{advice}",
            operands=() if call is None else call.operands,
            indices=where,
            rows=rows,
            parameter=self._first_parameter(reached),
            cover=self._covers(node, reached),
            is_overflow=reason is not None and reason.is_overflow,
        )

    def _has_rows(self, node: fx.Node) -> bool:
        """Whether a value may have rows of the batch: parameters, their gradients and functions of them have none."""
        if node.op == "placeholder":
            known = self._replay_graph.inputs.get(node.name)
            return known is None or known.role not in ("parameter", "buffer")
        if node in self._parameter_gradients():
            return False
        number = self._ops.get(node, -1)
        is_forward = node.name not in self._replay_graph.backward
        todo = [node] if is_forward else [n for n, own in self._numbers.items() if own == number]
        seen, is_known = set(todo), bool(todo)
        while todo:
            todo = [read for one in todo for read in one.all_input_nodes if read not in seen]
            seen.update(todo)
        return not is_known or not self._batch or not seen.isdisjoint(self._batch)

    def _parameter_gradients(self) -> set[fx.Node]:
        """Return the nodes of gradients of parameters, with those that are one in another form."""
        found = {node for node in self._gradients.values() if isinstance(node, fx.Node)}
        todo = list(found)
        while todo:
            reads = (node := todo.pop()).all_input_nodes
            if len(reads) == 1 and reads[0] not in found and _numel(reads[0]) == _numel(node):
                found.add(reads[0])
                todo.append(reads[0])
        return found

    def _facts_of_batch(self, reason: Reason | None, rows: Sequence[int], given: str) -> Iterator[str]:
        """Yield the part of the batch in it."""
        if reason is None:
            return
        batch = {self._replay_graph.inputs[node.name].name: self._given[node][0] for node in self._batch}
        if given in batch:
            yield f"{given} is {'infinite' if torch.isposinf(batch[given]).any() else '-inf'} there"
        if label := common_value(batch, rows):
            yield f"{label} there"
        if reason.is_too_large and (column := large_column(batch)):
            yield column

    def _note_given(self, node: fx.Node) -> NotedCall | None:
        value = self._given[node][0]
        if not isinstance(value, Tensor) or value.layout is not torch.strided:
            return None
        kind = "NaN" if not torch.isinf(value).any() else "NaN and infinite" if has_nan(value) else "infinite"
        elements = torch.isfinite(computable(value)).logical_not()
        return NotedCall(Reason(kind, ""), (operand_of(self.name_of_value(node), value),), elements, None)

    def _first_parameter(self, reached: Collection[str]) -> str:
        """Return the first parameter with a gradient among these values."""
        found = [
            (self._order[node], site.name)
            for site, node in self._gradients.items()
            if isinstance(node, fx.Node) and node.name in reached and site.kind == "gradient"
        ]
        return min(found)[1] if found else ""

    def _covers(self, root: fx.Node, reached: Collection[str]) -> tuple[str, ...]:
        """Return the ops that hide non-finite values from a finite loss."""
        known = self._replay_graph
        gradients = set(self._gradients.values())
        outputs = [n for n in self._output.all_input_nodes if n not in gradients and n.name not in known.backward]
        if any(self.states[n].is_bad for n in outputs if n in self.states):
            return ()
        number = self._ops.get(root, -1)
        todo = [n for n, own in self._numbers.items() if own == number] if root.name in known.backward else [root]
        seen, found = set(todo), []
        while todo:
            at = todo.pop()
            state = self.states.get(at)
            if state is None or at.name in known.backward or not (state.is_bad or state.is_expected):
                continue
            for user in at.users:
                if user in seen or user.name in known.backward or user.op == "output" or user.target in _SILENT:
                    continue
                seen.add(user)
                own = self.states.get(user)
                if own is not None and not (own.is_bad or own.is_expected) and own.has_numbers and reads_values(user):
                    found.append(user)
                todo.append(user)
        named = ((self._op_at(n, None)) for n in sorted(found, key=self._order.__getitem__))
        return tuple(dict.fromkeys(f"{op.rpartition('/')[2]}, {source}" if source else op for op, source in named))[:2]

    def _place_of(self, node: fx.Node, inside: RootInside | None) -> tuple[Order, bool]:
        """Return the place of a root, and whether it is one of the forward."""
        if inside is None:
            known = self._replay_graph
            return (self._order[node],), node.name not in known.backward and node.name not in known.tangents
        replayed, call = self._replay_graph.loops[node.name], self._call_of(node, inside)
        is_forward = call.name not in self._replay_graph.backward
        number = inside.iteration if is_forward else inside.number
        position = replayed.positions.get(replayed.name_in_body(inside.node), 0)
        return (self._order[call], number, position), is_forward

    def _call_of(self, loop: fx.Node, inside: RootInside) -> fx.Node:
        """Return the loop of a root: its forward for a node of that, even if the backward computes it again."""
        replayed = self._replay_graph.loops[loop.name]
        if replayed.name_in_body(inside.node) not in replayed.of_forward:
            return loop
        return next(node for node in self._loops if self._replay_graph.loops[node.name] is replayed)

    def _op_at(self, node: fx.Node, inside: RootInside | None) -> tuple[str, str]:
        """Return the op of a node and its line; in a loop those of a node of its body."""
        known, edit = self._replay_graph, self._replay_graph.actions.get(node.name)
        site = known.activations.get(self._ops.get(node, -1))
        if inside is not None:
            replayed = known.loops[node.name]
            name = replayed.name_in_body(inside.node)
            edit = replayed.actions.get(name, {}).get(inside.iteration)
            site = replayed.site_of_op(name, inside.iteration)
        if edit is not None:
            return f"{edit.site.name}: {edit.action!r}", ""
        return (f"{site.module}/{site.op}", site.source) if site is not None else (str(node.target), "")

    def _describe_given(self, node: fx.Node) -> str:
        if node.name in self._replay_graph.tangents:
            return FROM_LOSS if self._replay_graph.is_whole else FROM_BEHIND
        known = self._replay_graph.inputs.get(node.name)
        if known is None:
            return "a value that came into the graph was not finite already"
        if known.role == "parameter":
            return f"the parameter {known.name} was not finite already: an earlier update, or what it began with"
        if known.role == "value":
            return f"the value {known.name} {BEFORE_BREAK}"
        return f"the {known.role} {known.name} was not finite already"


def _numel(node: fx.Node) -> int | torch.SymInt | None:
    value = node.meta.get("val")
    return value.numel() if isinstance(value, Tensor) else None


def _operands_of(node: fx.Node, call: NotedCall | None) -> dict[str, int]:
    if call is None or call.reason is None:
        return {}
    given = {n: node.args[n] for n in call.reason.operands if n < len(node.args)}
    return {read.name: n for n, read in given.items() if isinstance(read, fx.Node)}
