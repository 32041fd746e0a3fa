"""Update graphs: held elements and functions behind an update."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor, fx

from gradrewrite.distributed.shards import Spread
from gradrewrite.errors import CallbackError
from gradrewrite.ir import editing
from gradrewrite.ir.markers import value_of
from gradrewrite.ir.outputs import BackwardOutputs
from gradrewrite.optimizer.step_graph import AtSteps
from gradrewrite.policy.actions import describe
from gradrewrite.policy.insertions import HoldElements, Insertion, ReplaceTensor
from gradrewrite.policy.state_store import StateStore
from gradrewrite.rewriting.action_tracing import trace_function
from gradrewrite.rewriting.canvas import Canvas
from gradrewrite.rewriting.inserters import insert, insert_at_part
from gradrewrite.rewriting.inserters.parts import refuse_unless_elementwise
from gradrewrite.rewriting.insertion_points import InsertionPoint
from gradrewrite.sites import Site


@dataclass(frozen=True, slots=True)
class Updated:
    """A parameter or a tensor of its optimizer's state, as an update has left it."""

    site: Site
    value: Tensor  # fake; of a spread one the part on this rank
    before: Tensor | None  # a copy from before the update; None where nothing reads it
    functions: tuple[Insertion, ...]  # that change it
    spread: Spread | None  # over ranks


@dataclass(frozen=True, slots=True)
class HeldParameter:
    """A parameter with elements that are held, and the tensors of its state."""

    insertions: tuple[Insertion, ...]
    members: tuple[int, ...]  # positions among the updated tensors, the parameter first
    gradient: Tensor  # fake, as the optimizer used it


@dataclass(frozen=True, slots=True)
class UpdateRewrite:
    """An update graph: updated tensors, copies of some from before, gradients of held ones, and the verdict in.

    It returns the tensors, the packed records, and what functions keep and remember. With a verdict, 0-d and not 0
    where the device has skipped the update, it returns them as they are then.
    """

    graph_module: fx.GraphModule
    outputs: BackwardOutputs


def rewrite_update(
    tensors: Sequence[Updated],
    held: Sequence[HeldParameter],
    states: StateStore | None,
    at_steps: AtSteps,
    *,
    may_be_skipped: bool,
) -> UpdateRewrite:
    """Make the graph; CallbackError or PolicyError for wrong functions."""
    before = [n for n, tensor in enumerate(tensors) if tensor.before is not None]
    inputs = [(str(tensor.site), tensor.value) for tensor in tensors]
    inputs += [(f"{tensors[n].site}_before", given) for n in before if (given := tensors[n].before) is not None]
    inputs += [(f"gradient_{tensors[one.members[0]].site.name}", one.gradient) for one in held]
    owner = editing.graph_of(inputs, len(tensors))
    graph = owner.graph
    placeholders = graph.find_nodes(op="placeholder")
    values = dict(zip(before, placeholders[len(tensors) :], strict=False))
    output = graph.output_node()
    points = [
        InsertionPoint(tensor.site, node, output, n, output=n, value=values.get(n))
        for n, (tensor, node) in enumerate(zip(tensors, placeholders, strict=False))
    ]
    canvas = Canvas(graph, states=states)
    canvas.scopes.update({where: scope.copied() for where, scope in at_steps.scopes.items()})
    canvas.packing.numbering = copy.deepcopy(at_steps.numbering)
    for one, gradient in zip(held, placeholders[len(tensors) + len(before) :], strict=True):
        for insertion in one.insertions:
            _hold(canvas, insertion, [points[n] for n in one.members], gradient, tensors[one.members[0]].spread)
    for point, tensor in zip(points, tensors, strict=True):
        if tensor.spread is None:
            insert(canvas, point, tensor.functions)
        else:
            for insertion in tensor.functions:
                insert_at_part(canvas, point, insertion, tensor.spread)
    if may_be_skipped:
        _let_skip(graph, canvas, points, placeholders)
    canvas.check_states()
    canvas.packing.follow(canvas.current, graph)
    outputs, _ = canvas.packing.pack_into(graph, canvas.forward)
    editing.release(graph)
    graph.eliminate_dead_code()
    graph.lint()
    owner.recompile()
    return UpdateRewrite(owner, outputs)


def _hold(
    canvas: Canvas, insertion: Insertion, points: Sequence[InsertionPoint], gradient: fx.Node, spread: Spread | None
) -> None:
    """Insert the choice between the values before and behind the update."""
    effect, first = insertion.effect, points[0]
    assert isinstance(effect, HoldElements)
    site = replace(first.site, kind="step")  # that of the rule

    def chosen(gradient: Tensor, value: Tensor) -> Tensor:
        found = effect.where(gradient, value)
        if not isinstance(found, Tensor) or found.dtype != torch.bool or found.shape != value.shape:
            is_tensor = isinstance(found, Tensor)
            got = f"{found.dtype} of shape {tuple(found.shape)}" if is_tensor else type(found).__name__
            raise CallbackError(
                f"{site}: {describe(insertion.action)} returned {got}; where(gradient, value) returns "
                f"a bool tensor of the parameter's shape {tuple(value.shape)}, True for elements that are held"
            )
        return found

    def hold(*given: Tensor) -> list[Tensor]:
        number = len(points)
        mask = chosen(given[-1], given[number])
        return [torch.where(mask, old, new) for new, old in zip(given[:number], given[number:-1], strict=True)]

    if spread is not None:
        alone = ReplaceTensor(lambda value, old: torch.where(chosen(value, old), old, value), "value")
        at_step = InsertionPoint(site, first.node, first.before, first.order, value=first.value)
        refuse_unless_elementwise(canvas, at_step, insertion, alone, spread)
    nodes = [canvas.current(point.node) for point in points]
    further = [*(point.value for point in points if point.value is not None), gradient]
    sites = [site, *(point.site for point in points[1:])]
    values, others = list(map(value_of, nodes)), list(map(value_of, further))
    traced = trace_function(hold, values, sites, insertion, canvas.mode(site), others)
    outputs, new = canvas.splice(traced, [*nodes, *further], first)
    keys = canvas.packing.add(insertion, site, site, traced.reports, outputs[len(points) :])
    canvas.note(site, insertion, tuple(node.name for node in new), tuple(keys))
    for point, result in zip(points, outputs, strict=False):
        canvas.replace(point, result)


def _let_skip(
    graph: fx.Graph, canvas: Canvas, points: Sequence[InsertionPoint], placeholders: Sequence[fx.Node]
) -> None:
    """Keep the tensors of an update skipped by the device."""
    with value_of(placeholders[0]).fake_mode:  # type: ignore[attr-defined]
        verdict = editing.add_input(graph, "verdict", torch.empty((), device=value_of(placeholders[0]).device))

    def choose(skipped: Tensor, old: Tensor, new: Tensor) -> list[Tensor]:
        return [torch.where(skipped.to(new.device) > 0, old, new)]

    for point, node in zip(points, placeholders, strict=False):
        current = canvas.current(point.node)
        if current is not node:
            (chosen,), _ = editing.compute(graph, choose, [verdict, node, current], graph.output_node())
            canvas.replace(point, chosen)
