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
from gradrewrite.ir.called_ops import CalledOp, OpBackward, Operand
from gradrewrite.ir.marked_graph import MarkedJointGraph
from gradrewrite.ir.markers import value_of
from gradrewrite.ir.provenance import Anchor
from gradrewrite.ir.zero_cover import ZeroCover
from gradrewrite.policy.actions import describe
from gradrewrite.policy.backward_op import BackwardOp
from gradrewrite.policy.insertions import Insertion, KeepZeroErrors, ReplaceBackward
from gradrewrite.policy.rules import Answered
from gradrewrite.policy.scope import Context, refuse
from gradrewrite.rewriting.action_tracing import laid_out_as, rescale, trace_function, unscale
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
    covers: dict[Site, ZeroCover] = field(default_factory=dict)


def insert_at_backwards(canvas: Canvas, marked: MarkedJointGraph, ask: Ask) -> InsertedBackwards:
    """Insert the policy's answers at the ops of a graph; erase their markers."""
    found = InsertedBackwards()
    if not marked.ops:
        return found
    site_at = name_values(marked.values, marked.call, marked.counts)
    backwards = OpBackwards(canvas, marked.ops, parameters_of(canvas.graph, marked))
    for number, point in backwards.points.items():
        value = next((value for value in marked.ops[number].values if value in site_at), None)
        if value is not None:
            site = point.site = site_at[value]("backward")
            found.answers[site] = ask(site)
            found.anchors[site] = Anchor(point.node.name, value)
    for number, point in backwards.points.items():
        insertions = [answered.insertion for answered in found.answers.get(point.site, ())]
        cover = backwards.insert(number, insertions)
        if cover is not None:
            found.covers[point.site] = cover
    editing.erase_op_markers(canvas.graph)
    return found


def parameters_of(graph: fx.Graph, marked: MarkedJointGraph) -> set[fx.Node]:
    """Return the inputs of a graph that are parameters of the model."""
    positions = aot_autograd.plain_inputs(graph)
    given = {node: marked.inputs.get(position) for node, position in positions.items()}
    return {node for node, one in given.items() if one is not None and one.role == "parameter"}


_NOWHERE = Site("backward", "")


class OpBackwards:
    """The backwards of the ops of one graph, by the number of the op.

    ``parameters`` are nodes that ``KeepZeros`` does not mend.
    """

    def __init__(self, canvas: Canvas, ops: Sequence[CalledOp], parameters: Collection[fx.Node]) -> None:
        self._canvas, self._parameters = canvas, parameters
        own = find_op_backwards(canvas.graph, ops)
        order = {node: number for number, node in enumerate(canvas.graph.nodes)}
        self.points: dict[int, InsertionPoint] = {}  # without a site
        self._ops: dict[int, tuple[CalledOp, OpBackward | None]] = {}
        for number, op in enumerate(ops):
            backward = None if op.refusal else own.get(number)
            if backward is None and not op.refusal:
                continue  # nothing here depends on its errors
            first = last = canvas.graph.output_node()
            if backward is not None:
                first, last = next(iter(backward.errors.values())), backward.ends[-1]
            self._ops[number] = op, backward
            self.points[number] = InsertionPoint(_NOWHERE, first, last, order[first])

    def insert(self, number: int, insertions: Sequence[Insertion]) -> ZeroCover | None:
        """Insert at one op: first ``KeepZeros``, then a rule; return the cover of the first."""
        point = self.points[number]
        rules = [insertion for insertion in insertions if isinstance(insertion.effect, ReplaceBackward)]
        if len(rules) > 1:
            refuse(rules[1], Context(point.site, rules=", ".join(describe(rule.action) for rule in rules)))
        cover = None
        for insertion in insertions:
            if isinstance(insertion.effect, KeepZeroErrors) and cover is None:
                cover = self._keep_zeros(number, point.site, insertion)
        for insertion in rules:
            self._replace(number, point, insertion)
        return cover

    def _keep_zeros(self, number: int, site: Site, insertion: Insertion) -> ZeroCover:
        op, backward = self._ops[number]
        if backward is None:
            self._canvas.note(site, insertion)
            return ZeroCover(not_covered=(op.refusal,))
        new, cover = keep_zeros(self._canvas.graph, backward, nodes_of(backward), self._parameters)
        self._canvas.note(site, insertion, tuple(node.name for node in new))
        return cover

    def _replace(self, number: int, point: InsertionPoint, insertion: Insertion) -> None:
        op, backward = self._ops[number]
        if backward is None or op.repeated:
            reason = op.refusal or "is given one tensor several times; give it x.clone() the second time"
            refuse(insertion, Context(point.site, no_backward=reason))
        assert backward is not None
        canvas, own = self._canvas, nodes_of(backward)
        totals, added = total_gradients(backward)
        own += added
        errors = dict(sorted(backward.errors.items()))
        mode = canvas.mode_at(point)
        run = _Rule(insertion, op, sorted(totals), list(errors), len(backward.results), mode.scale, point.site)
        nodes = [*totals.values(), *errors.values(), *backward.operands, *backward.results, *totals.values()]
        values = [value_of(node) for node in nodes]
        sites, further = [point.site] * len(totals), values[len(totals) :]
        traced = trace_function(run, values[: len(totals)], sites, insertion, mode, further)
        saved = {*backward.operands, *backward.results}
        reads = [bool(node.users) for node in traced.graph.graph.find_nodes(op="placeholder")]
        given = [canvas.forward.for_backward(n) if n in saved and r else n for n, r in zip(nodes, reads, strict=True)]
        outputs, new = canvas.splice(traced, given, point)
        new, outputs = expand_vjps(new, outputs, backward, own, totals)
        results, extras = outputs[: len(totals)], outputs[len(totals) :]
        canvas.note_states(mode, traced, extras, new)
        reported = insertion, point.site, point.site, traced.reports, extras
        keys = canvas.packing.add(*reported, seen=Anchor(point.node.name, point.order))
        if reason := replace_gradients(backward, dict(zip(totals, results, strict=True))):
            refuse(insertion, Context(point.site, no_backward=reason))
        editing.erase_unused(canvas.graph, own)
        canvas.note(point.site, insertion, tuple(node.name for node in new), tuple(keys))


@dataclass
class _Rule:
    """A rule as a function of tensors.

    These are the gradients of torch, the errors, operands and results of the op, and the gradients again. The first
    ones may be in units of the unscaled loss, the last ones have the units of the graph.
    """

    insertion: Insertion
    op: CalledOp
    wanted: Sequence[int]  # operands
    errors_at: Sequence[int]  # results
    num_results: int
    scale: Tensor | None
    site: Site

    def __call__(self, *tensors: Tensor) -> list[Tensor]:
        """Return the gradients of the wanted operands."""
        rest = list(tensors[len(self.wanted) :])
        errors, rest = rest[: len(self.errors_at)], rest[len(self.errors_at) :]
        operands, rest = rest[: self.op.num_operands], rest[self.op.num_operands :]
        results, gradients = rest[: self.num_results], rest[self.num_results :]
        scale = self.scale
        seen = errors if scale is None else [unscale(e, scale) for e in errors]

        def vjp(asked: Sequence[Tensor | None]) -> tuple[Tensor | None, ...]:
            given = [(n, asked[n], at) for at, n in enumerate(self.errors_at)]
            own = [(n, self._own_error(e, seen[at], errors[at])) for n, e, at in given if e is not None]
            made = op_vjp([e for _, e in own], [n for n, _ in own], gradients)
            found = dict(zip(self.wanted, made if scale is None else [unscale(g, scale) for g in made], strict=True))
            return tuple(found.get(n) for n in range(self.op.num_operands))

        known = dict(zip(self.errors_at, seen, strict=True))
        error = tuple(known.get(n) for n in range(self.num_results)) if self.op.is_tuple else seen[0]
        args, kwargs = self._arguments(operands)
        needs = tuple(n in self.wanted for n in range(self.op.num_operands))
        output = tuple(results) if self.op.is_tuple else results[0]
        effect = self.insertion.effect
        assert isinstance(effect, ReplaceBackward)
        return self._checked(effect.run(BackwardOp(error, tuple(operands), needs, args, kwargs, output, vjp)))

    def _own_error(self, error: Tensor, seen: Tensor, own: Tensor) -> Tensor:
        """Return an error in the units and the layout of the graph."""
        given = error if self.scale is None else rescale(error, seen, own, self.scale)
        return laid_out_as(given, own)

    def _arguments(self, operands: Sequence[Tensor]) -> tuple[tuple[Any, ...], Mapping[str, Any]]:
        def known(place: Any) -> Any:
            return operands[place.number] if isinstance(place, Operand) else place

        args: Any = fx.node.map_aggregate(tuple(self.op.args), known)
        kwargs: Any = fx.node.map_aggregate(dict(self.op.kwargs), known)
        return tuple(args), dict(kwargs)

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
