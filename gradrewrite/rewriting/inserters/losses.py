"""Weighted sums of the gradients of several losses."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Sequence
from dataclasses import replace

import torch
from torch import Tensor, fx

from gradrewrite.ir import editing
from gradrewrite.ir.markers import value_of
from gradrewrite.policy.insertions import Insertion
from gradrewrite.policy.scope import Context, refuse
from gradrewrite.rewriting.action_tracing import TracedAction, TraceMode, check_dense, trace_function
from gradrewrite.rewriting.canvas import Canvas
from gradrewrite.rewriting.insertion_points import InsertionPoint
from gradrewrite.rewriting.loss_gradients import unbound_as, weighted_sum
from gradrewrite.rewriting.loss_weighing import Weighing
from gradrewrite.sites import Site


def weigh_losses(canvas: Canvas, weighing: Weighing) -> dict[int, fx.Node]:
    """Insert the weighted sums of the gradients of each loss; return those of gradients, by output."""
    assert canvas.losses is not None
    group, members = weighing.group, weighing.members
    insertion, effect, first = group.insertion, weighing.effect, next(iter(members))
    where = f"group:{effect.group}"
    rows = [{k: canvas.current(own.node) for k, own in points.items()} for points in members.values()]
    for point, own in zip(members, rows, strict=True):
        for node in own.values():
            check_dense(insertion.action, point.site, value_of(node))
        _check_same_device(insertion, first.site, point.site)
    mode = canvas.mode(first.site, where)
    shared = [own for own in rows if len(own) > 1] or rows
    inputs = [canvas.losses.gramian(shared, mode.scale, first.before, is_opaque=mode.is_opaque)]
    if effect.reads_losses:
        inputs.append(canvas.losses.values(canvas.forward, first.before))
    if effect.statistics:
        inputs += canvas.losses.statistics(shared, effect.statistics, mode.scale, first.before)
    weights, traced, extras, new = _weights(canvas, weighing, first, inputs, replace(mode, scale=None))
    keys = canvas.packing.add(insertion, where, first.site, traced.reports, extras)
    canvas.packing.groups.append(str(effect.group))
    made, sums = [*canvas.losses.take_new(), *new], {}
    single: dict[torch.dtype, list[fx.Node]] = {}  # each weight
    for point, own in zip(members, rows, strict=True):
        point.replicas = next(iter(members[point].values())).replicas
        wide = torch.promote_types(value_of(point.node).dtype.to_real(), torch.float32)
        if wide not in single:
            single[wide], new = editing.compute(
                canvas.graph, functools.partial(unbound_as, wide), [weights], first.before
            )
            made += new
        value, *others = [*own.values(), *(single[wide][k] for k in own)]
        name, further = ("weighted sum", len(own)), list(map(value_of, others))
        part = canvas.tracer.trace_part(name, weighted_sum, insertion, point.site, value_of(value), further=further)
        (result,), new = canvas.splice(part, [value, *others], point)
        canvas.note(point.site, insertion, tuple(node.name for node in (*made, *new)), tuple(keys))
        made = []
        if point.marker is not None:
            editing.mark_instead(point.marker, result)
        elif point.output is not None:
            editing.replace_output(canvas.graph, point.output, result)
            sums[point.output] = result
        point.node = result
    return sums


def _weights(
    canvas: Canvas, weighing: Weighing, point: InsertionPoint, inputs: Sequence[fx.Node], mode: TraceMode
) -> tuple[fx.Node, TracedAction, list[fx.Node], list[fx.Node]]:
    """Insert the weights of the losses; return them, the trace, the outputs of its reports, and all new nodes."""
    insertion, effect, gramian = weighing.group.insertion, weighing.effect, inputs[0]
    if not inspect.ismethod(effect.function):  # messages name the user's function
        insertion = replace(insertion, action=effect.function)
    sized = value_of(gramian)[0].clone()  # of the shape of the weights

    def run(_: Tensor, *tensors: Tensor) -> Sequence[Tensor]:
        return effect.run(tensors)

    traced = trace_function(run, [sized], [point.site], insertion, mode, list(map(value_of, inputs)))
    (weights, *extras), new = canvas.splice(traced, [gramian, *inputs], point)
    return weights, traced, extras, new


def _check_same_device(insertion: Insertion, first: Site, site: Site) -> None:
    other = "" if site.device == first.device else f"{first.device} ({first})"
    refuse(insertion, Context(site, first_device=other))
