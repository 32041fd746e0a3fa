"""Insertion at the backwards of ops: rules of the user, and zeros that stay zeros."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor, fx

from gradrewrite._compat import aot_autograd
from gradrewrite.errors import CallbackError
from gradrewrite.instrumentation.naming import name_values
from gradrewrite.ir import editing
from gradrewrite.ir.called_ops import CalledOp, OpBackward, Operand, Symbol
from gradrewrite.ir.marked_graph import MarkedJointGraph
from gradrewrite.ir.markers import value_of
from gradrewrite.ir.provenance import Anchor
from gradrewrite.policy.actions import describe
from gradrewrite.policy.backward_op import BackwardOp
from gradrewrite.policy.insertions import Insertion, KeepZeroErrors, ReplaceBackward
from gradrewrite.policy.rules import Answered
from gradrewrite.policy.scope import Context, refuse
from gradrewrite.rewriting.action_tracing import TraceMode, rescale, trace_function, unscale
from gradrewrite.rewriting.canvas import Canvas
from gradrewrite.rewriting.insertion_points import InsertionPoint
from gradrewrite.rewriting.op_backwards import (
    expand_vjps,
    find_op_backwards,
    nodes_of,
    op_vjp,
    replace_gradients,
    total_gradients,
)
from gradrewrite.rewriting.zero_errors import keep_zeros
from gradrewrite.sites import Site

Ask = Callable[[Site], tuple[Answered, ...]]


@dataclass
class InsertedBackwards:
    """The insertions at the backwards of the ops of a graph."""

    answers: dict[Site, tuple[Answered, ...]] = field(default_factory=dict)
    anchors: dict[Site, Anchor] = field(default_factory=dict)
    not_covered: dict[Site, str] = field(default_factory=dict)  # where zeros may not stay, and why


def insert_at_backwards(canvas: Canvas, marked: MarkedJointGraph, ask: Ask) -> InsertedBackwards:
    """Ask the policy at the ops of a graph, and insert its answers; the markers of ops go."""
    found = InsertedBackwards()
    if not marked.ops:
        return found
    site_at = name_values(marked.values, marked.call, marked.counts)
    backwards = find_op_backwards(canvas.graph, marked.ops)
    order = {node: number for number, node in enumerate(canvas.graph.nodes)}
    positions = aot_autograd.plain_inputs(canvas.graph)
    given = {node: marked.inputs.get(position) for node, position in positions.items()}
    parameters = {node for node, one in given.items() if one is not None and one.role == "parameter"}
    for number, op in enumerate(marked.ops):
        backward = backwards.get(number)
        if op.value not in site_at or (backward is None and not op.refusal):
            continue
        site = site_at[op.value]("backward")
        found.answers[site] = ask(site)
        first = canvas.graph.output_node() if backward is None else next(iter(backward.errors.values()))
        found.anchors[site] = Anchor(first.name, op.value)
        insertions = [answered.insertion for answered in found.answers[site]]
        _OpInsertion(canvas, site, op, backward, order.get(first, 0), parameters).insert(insertions, found)
    editing.erase_op_markers(canvas.graph)
    return found


@dataclass
class _OpInsertion:
    """The insertions at the backward of one op."""

    canvas: Canvas
    site: Site
    op: CalledOp
    backward: OpBackward | None
    order: int
    parameters: Collection[fx.Node]

    def insert(self, insertions: Sequence[Insertion], found: InsertedBackwards) -> None:
        """Let zeros stay zeros, then let a rule replace what is left."""
        rules = [insertion for insertion in insertions if isinstance(insertion.effect, ReplaceBackward)]
        if len(rules) > 1:
            refuse(rules[1], Context(self.site, rules=", ".join(describe(rule.action) for rule in rules)))
        for insertion in insertions:
            if isinstance(insertion.effect, KeepZeroErrors):
                found.not_covered |= self._keep_zeros(insertion)
                break
        for insertion in rules:
            self._replace(insertion)

    def _keep_zeros(self, insertion: Insertion) -> dict[Site, str]:
        if self.backward is None:
            self.canvas.note(self.site, insertion)
            return {self.site: self.op.refusal}
        kept = keep_zeros(self.canvas.graph, self.backward, nodes_of(self.backward), self.parameters)
        self.canvas.note(self.site, insertion, tuple(node.name for node in kept.new))
        return {self.site: ", ".join(kept.not_covered)} if kept.not_covered else {}

    def _replace(self, insertion: Insertion) -> None:
        backward, site, canvas = self.backward, self.site, self.canvas
        if backward is None or self.op.repeated:
            reason = self.op.refusal or "is given one tensor several times; give it x.clone() the second time"
            refuse(insertion, Context(site, no_backward=reason))
        assert backward is not None
        assert isinstance(insertion.effect, ReplaceBackward)
        own = nodes_of(backward)
        totals, added = total_gradients(backward)
        own += added
        errors = dict(sorted(backward.errors.items()))
        point = InsertionPoint(site, next(iter(errors.values())), backward.ends[-1], self.order)
        mode = canvas.mode_at(point)
        run = _Rule(insertion, self.op, sorted(totals), list(errors), len(backward.results), mode.scale, site)
        nodes = [*totals.values(), *errors.values(), *backward.operands, *backward.results, *totals.values()]
        values = [value_of(node) for node in nodes]
        own_values, further = values[: len(totals)], values[len(totals) :]
        traced = trace_function(run, own_values, [site] * len(totals), insertion, mode, further)
        reads = [bool(p.users) for p in traced.graph.graph.find_nodes(op="placeholder")]
        saved = {*backward.operands, *backward.results}
        given = [canvas.forward.for_backward(n) if n in saved and r else n for n, r in zip(nodes, reads, strict=True)]
        outputs, new = canvas.splice(traced, given, point)
        new, outputs = expand_vjps(new, outputs, backward, own, totals)
        results, extras = outputs[: len(totals)], outputs[len(totals) :]
        canvas.note_states(mode, traced, extras, new)
        keys = canvas.packing.add(
            insertion, site, site, traced.reports, extras, replicas=1, loss=None, seen=Anchor(point.node.name, self.order)
        )
        reason = replace_gradients(backward, dict(zip(totals, results, strict=True)))
        if reason:
            refuse(insertion, Context(site, no_backward=reason))
        editing.erase_unused(canvas.graph, own)
        canvas.note(site, insertion, tuple(node.name for node in new), tuple(keys))


@dataclass
class _Rule:
    """A rule as a function of tensors: the gradients of torch, the errors, operands and results of the op."""

    insertion: Insertion
    op: CalledOp
    wanted: Sequence[int]  # operands
    errors_at: Sequence[int]  # results
    num_results: int
    scale: Tensor | None
    site: Site

    def __call__(self, *tensors: Tensor) -> list[Tensor]:
        """Return the gradients of the wanted operands."""
        given = list(tensors)
        rest = given[len(self.wanted) :]
        errors, rest = rest[: len(self.errors_at)], rest[len(self.errors_at) :]
        operands, rest = rest[: self.op.num_operands], rest[self.op.num_operands :]
        results, gradients = rest[: self.num_results], rest[self.num_results :]  # in the units of the graph
        scale = self.scale if self.insertion.has_units else None
        seen = errors if scale is None else [unscale(e, scale) for e in errors]

        def vjp(asked: Sequence[Tensor | None]) -> tuple[Tensor | None, ...]:
            by_result = dict(zip(range(self.num_results) if self.op.is_tuple else [0], asked, strict=True))
            at = [n for n in self.errors_at if by_result[n] is not None]
            own = [_original(by_result[n], seen, errors, self.errors_at.index(n), scale) for n in at]
            made = op_vjp(own, at, gradients)
            found = dict(zip(self.wanted, made if scale is None else [unscale(g, scale) for g in made], strict=True))
            return tuple(found.get(n) for n in range(self.op.num_operands))

        by_result = dict(zip(self.errors_at, seen, strict=True))
        error: Any = tuple(by_result.get(n) for n in range(self.num_results)) if self.op.is_tuple else seen[0]
        args, kwargs = self._arguments(operands)
        needs = tuple(n in self.wanted for n in range(self.op.num_operands))
        output: Any = tuple(results) if self.op.is_tuple else results[0]
        made = self.insertion.effect.run(  # type: ignore[union-attr]
            BackwardOp(error, tuple(operands), needs, args, kwargs, output, vjp)
        )
        return self._checked(made)

    def _arguments(self, operands: Sequence[Tensor]) -> tuple[tuple[Any, ...], Mapping[str, Any]]:
        def value(place: Any) -> Any:
            if isinstance(place, Symbol):
                raise CallbackError(
                    f"{self.site}: an argument of the op is a size that changes; op.inputs and op.output have shapes"
                )
            return operands[place.number] if isinstance(place, Operand) else place

        def known(place: Any) -> Any:
            return place if isinstance(place, Symbol) else value(place)

        args, kwargs = fx.node.map_aggregate((tuple(self.op.args), dict(self.op.kwargs)), known)  # type: ignore[arg-type]
        return tuple(args), dict(kwargs)  # type: ignore[arg-type, call-overload]

    def _checked(self, made: Any) -> list[Tensor]:
        """Return the gradients of a rule; CallbackError for something else."""
        wanted, number, who = self.wanted, self.op.num_operands, f"{self.site}: {describe(self.insertion.action)}"
        if isinstance(made, Tensor):
            if len(wanted) != 1:
                raise CallbackError(
                    f"{who} returned one tensor, and {len(wanted)} of the {number} inputs want a gradient: return a "
                    "tuple in the order of op.inputs"
                )
            return [made]
        if not isinstance(made, tuple | list) or len(made) != number:
            got = f"{len(made)} values" if isinstance(made, tuple | list) else type(made).__name__
            raise CallbackError(f"{who} returns the gradients of the {number} inputs of the op, got {got}")
        for n in wanted:
            if made[n] is None:
                raise CallbackError(
                    f"{who} returned None for input {n}, which wants a gradient (op.needs); zeros are "
                    f"torch.zeros_like(op.inputs[{n}])"
                )
        return [made[n] for n in wanted]


def _original(
    error: Tensor | None, seen: Sequence[Tensor], errors: Sequence[Tensor], n: int, scale: Tensor | None
) -> Tensor:
    """Return an error in the units of the graph."""
    assert error is not None
    return error if scale is None else rescale(error, seen[n], errors[n], scale)
