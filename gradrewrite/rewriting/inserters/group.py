"""Insertions at all points of a group at once."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from torch import Tensor, fx
from typing_extensions import assert_never

from gradrewrite.errors import PolicyError
from gradrewrite.ir import editing
from gradrewrite.ir.markers import value_of
from gradrewrite.numerics.scaling import scale_where
from gradrewrite.numerics.statistics import norm_of
from gradrewrite.policy.actions import describe
from gradrewrite.policy.current import current_recording
from gradrewrite.policy.insertions import (
    JudgeUpdate,
    MeasureExampleGradients,
    ReplaceGroup,
    ScaleGroup,
    WeighExampleGradients,
    WeighLossGradients,
    run_group,
)
from gradrewrite.policy.recording import Recording
from gradrewrite.policy.scope import Context, refuse
from gradrewrite.rewriting.action_tracing import TracedAction, TraceMode, check_dense, trace_function
from gradrewrite.rewriting.canvas import Canvas
from gradrewrite.rewriting.inserters.examples import insert_example_figures, insert_example_weights
from gradrewrite.rewriting.insertion_points import InsertionPoint
from gradrewrite.rewriting.lowering import Group
from gradrewrite.rewriting.node_shares import share_nodes
from gradrewrite.rewriting.other_values import Read


def insert_group(canvas: Canvas, group: Group, where: str = "") -> None:
    """Insert one group action, its sites together.

    Its records are at ``where``, or at ``group:<name>``.
    """
    points = group.points
    nodes = [canvas.current(point.marker or point.node) for point in points]
    for point in points:
        check_dense(group.action, point.site, value_of(point.node))
    where = where or f"group:{group.effect.group}"
    mode = canvas.mode(points[0].site, where)
    match group.effect:
        case WeighExampleGradients() as effect:
            insert_example_weights(canvas, group, effect, where, nodes, mode)
        case MeasureExampleGradients() as effect:
            insert_example_figures(canvas, group, effect, where, nodes, mode)
        case ScaleGroup() as effect if all(point.layout is None for point in points):
            _finish_group(canvas, group, where, nodes, *_scale_group(canvas, group, effect, nodes, mode))
        case ScaleGroup() | ReplaceGroup() as effect:
            _finish_group(canvas, group, where, nodes, *_replace_group(canvas, group, effect, nodes, mode))
        case WeighLossGradients():
            raise AssertionError("losses are weighed before other groups")
        case JudgeUpdate():
            raise AssertionError("judges are at step sites")
        case _:
            assert_never(group.effect)


def _replace_group(
    canvas: Canvas, group: Group, effect: ScaleGroup | ReplaceGroup, nodes: list[fx.Node], mode: TraceMode
) -> tuple[TracedAction, list[fx.Node], list[fx.Node], list[fx.Node]]:
    points, graph = group.points, canvas.graph
    sites, count = [point.site for point in points], len(points)
    others: list[Read] = []
    if isinstance(effect, ReplaceGroup) and effect.reads.patterns:
        reader = InsertionPoint(sites[0], nodes[0], graph.output_node(), points[0].order)
        others = canvas.other_values(group.insertion, effect.reads, reader)
    given = [*nodes, *(node for node, _ in others)]
    values, layouts = list(map(value_of, given)), [*(point.layout for point in points), *(one for _, one in others)]
    traced = trace_function(
        lambda *g: run_group(effect, sites, g[:count], g[count:]),
        values[:count], sites, group.insertion, mode, values[count:], layouts,
    )  # fmt: skip
    editing.erase_copies(traced.graph.graph)
    inputs = traced.graph.graph.find_nodes(op="placeholder")
    results = editing.outputs_of(traced.graph.graph.output_node())
    readers = {
        number: [user for user in node.users if point.marker < user and user not in canvas.of_groups]
        for number, (point, node) in enumerate(zip(points, nodes, strict=True))
        if point.marker is not None and results[number] is not inputs[number]
    }
    for number, own in readers.items():
        _check_order(group, number, own, given)
    is_behind_all = all(point.marker is None for point in points)
    outputs, new = canvas.splice(traced, given, points[0], None if is_behind_all else max(given).next)
    canvas.of_groups.update(() if is_behind_all else new)
    for number, own in readers.items():
        canvas.replace_behind(points[number], own, outputs[number])
    return traced, outputs[:count], outputs[count:], new


def _check_order(group: Group, number: int, readers: Sequence[fx.Node], given: Sequence[fx.Node]) -> None:
    """Raise PolicyError for a changed value before another one of the function."""
    others = {node: n for n, node in enumerate(given) if node is not given[number]}
    found = editing.first_reached(readers, others) if others else None
    if found is not None:
        position, sites = others[found], [point.site for point in group.points]
        what = str(sites[position]) if position < len(sites) else "what it reads"
        raise PolicyError(
            f"{describe(group.action)}: it changes {sites[number]}, and {what}, which it is given too, is computed "
            "from that. Let it change the last of them only (act_at=), or take sites of which none leads to another",
            code="together",
        )


def _finish_group(
    canvas: Canvas,
    group: Group,
    where: str,
    nodes: Sequence[fx.Node],
    traced: TracedAction,
    results: Sequence[fx.Node],
    extras: Sequence[fx.Node],
    new: Sequence[fx.Node],
) -> None:
    insertion, points, sites = group.insertion, group.points, [point.site for point in group.points]
    refuse(insertion, Context(sites[0], is_part=not canvas.is_whole, has_states=traced.has_states))
    keys = canvas.packing.add(insertion, where, sites[0], traced.reports, extras, sites)
    for point, names in zip(points, share_nodes(new, nodes, results), strict=True):
        own = tuple(key for key in keys if key.site in (where, str(point.site)))
        canvas.note(point.site, insertion, names, own)
    if any(site.traits.is_leaf for site in sites):  # else nothing of it is added up over backwards
        canvas.packing.groups.append(str(group.effect.group))
    for point, result in zip(points, results, strict=True):
        if point.marker is None:
            canvas.replace(point, result)


def _scale_group(
    canvas: Canvas, group: Group, effect: ScaleGroup, nodes: Sequence[fx.Node], mode: TraceMode
) -> tuple[TracedAction, list[fx.Node], list[fx.Node], list[fx.Node]]:
    """Insert the action as the norm of each gradient, one factor, and its product with each gradient.

    Gradients of one shape are traced once. Returns the trace of the factor, the scaled gradients, the outputs of
    the reports, and all new nodes.
    """
    insertion, points = group.insertion, group.points
    first, alone = points[0], replace(mode, states=None)
    norms: list[fx.Node] = []
    results: list[fx.Node] = []
    made: list[fx.Node] = []
    at: list[int] = []

    def norm(gradient: Tensor) -> Tensor:
        _recording().output(norm_of(gradient, effect.norm_type))
        return gradient

    for point, node in zip(points, nodes, strict=True):
        name = ("norm", effect.norm_type)
        traced = canvas.tracer.trace_part(name, norm, insertion, point.site, value_of(node), alone)
        (_, found), new = canvas.splice(traced, [node], first)
        norms.append(found)
        made += new

    def factor(*found: Tensor) -> Sequence[Tensor]:
        bound, total = effect.bound_and_total(found)
        at[:] = [_recording().output(bound / total), _recording().output(bound < total)]
        return found[:1]

    value, *values = map(value_of, norms)
    middle = trace_function(factor, [value], [first.site], insertion, replace(mode, scale=None), values)
    (_, *extras), new = canvas.splice(middle, norms, first)
    made += new
    scales = [extras[number] for number in at]
    further = [value_of(scale) for scale in scales]
    for point, node in zip(points, nodes, strict=True):
        value = value_of(node)
        traced = canvas.tracer.trace_part("scale", scale_where, insertion, point.site, value, alone, further)
        (result,), new = canvas.splice(traced, [node, *scales], first)
        results.append(result)
        made += new
    return middle, results, extras, made


def _recording() -> Recording:
    found = current_recording()
    assert found is not None  # while a function is traced
    return found
