"""Insertions at all points of a group at once."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from torch import Tensor, fx
from typing_extensions import assert_never

from gradrewrite.ir.markers import value_of
from gradrewrite.numerics.scaling import scale_where
from gradrewrite.numerics.statistics import norm_of
from gradrewrite.policy.insertions import (
    JudgeUpdate,
    ReplaceGroup,
    ScaleGroup,
    WeighExampleGradients,
    WeighLossGradients,
)
from gradrewrite.policy.recording import Recording, current_recording
from gradrewrite.policy.scope import Context, refuse
from gradrewrite.rewriting.action_tracing import TracedAction, TraceMode, check_dense, trace_function
from gradrewrite.rewriting.canvas import Canvas
from gradrewrite.rewriting.inserters.examples import insert_example_clip
from gradrewrite.rewriting.lowering import Group
from gradrewrite.rewriting.node_shares import share_nodes


def insert_group(canvas: Canvas, group: Group, where: str = "") -> None:
    """Insert one group action, its sites together.

    Its records are at ``where``, or at ``group:<name>``.
    """
    points = group.points
    nodes = [canvas.current(point.node) for point in points]
    for point in points:
        check_dense(group.action, point.site, value_of(point.node))
    where = where or f"group:{group.effect.group}"
    mode = canvas.mode(points[0].site, where)
    match group.effect:
        case WeighExampleGradients() as effect:
            insert_example_clip(canvas, group, effect, where, nodes, mode)
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
    points = group.points
    values, sites = [value_of(n) for n in nodes], [point.site for point in points]
    layouts = [point.layout for point in points]
    traced = trace_function(lambda *g: effect.run(g), values, sites, group.insertion, mode, layouts=layouts)
    outputs, new = canvas.splice(traced, nodes, points[0])
    return traced, outputs[: len(points)], outputs[len(points) :], new


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
    canvas.packing.groups.append(str(group.effect.group))
    for point, result in zip(points, results, strict=True):
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
