"""Weights of examples, their noise, and figures of them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import torch
from torch import Tensor, fx

from gradrewrite.ir import editing
from gradrewrite.ir.markers import value_of
from gradrewrite.numerics.statistics import norm_of
from gradrewrite.policy.insertions import MeasureExampleGradients, WeighExampleGradients
from gradrewrite.policy.recording import recording
from gradrewrite.policy.state_store import StateScope
from gradrewrite.rewriting.action_tracing import TraceMode, trace_function
from gradrewrite.rewriting.canvas import Canvas
from gradrewrite.rewriting.example_gradients import Asked
from gradrewrite.rewriting.lowering import Group


def insert_example_weights(
    canvas: Canvas, group: Group, effect: WeighExampleGradients, where: str, nodes: Sequence[fx.Node], mode: TraceMode
) -> None:
    """Insert the weights of examples, and the gradients that they make."""
    if effect.per_parameter:
        for point, node in zip(group.points, nodes, strict=True):
            at, own = str(point.site), replace(group, points=[point])
            _insert_weights(canvas, own, effect, at, [node], canvas.mode(point.site, at), mode.states)
    else:
        _insert_weights(canvas, group, effect, where, nodes, mode, mode.states)
    if effect.noise is not None:  # without it, clips of several backwards add up to that of all their examples
        name = f"{effect.group} (noise)"  # a global clip may have a group of the same name
        canvas.packing.groups.append(name)
        canvas.packing.noisy.add(name)


def _insert_weights(
    canvas: Canvas,
    group: Group,
    effect: WeighExampleGradients,
    where: str,
    nodes: Sequence[fx.Node],
    mode: TraceMode,
    noise_states: StateScope | None,
) -> None:
    """Insert the weights that follow from one norm of each example."""
    assert canvas.examples is not None
    insertion, points, site = group.insertion, group.points, group.points[0].site
    asked = Asked(insertion, effect.examples)
    scale, mode = mode.scale, replace(mode, scale=None)
    squares = canvas.examples.total_square_norms(points, nodes, asked, scale)
    traced = trace_function(lambda s: effect.run([s]), [value_of(squares)], [site], insertion, mode)
    (weights, *extras), new = canvas.splice(traced, [squares], points[0])
    keys = canvas.packing.add(insertion, where, site, traced.reports, extras)
    shared = (*canvas.examples.take_new(), *new)
    for point, node in zip(points, nodes, strict=True):
        with recording(point.site.device, states=noise_states):
            result = canvas.examples.weighted_gradient(point, node, weights, asked, effect.noise, scale)
        made = tuple(n.name for n in (*shared, *canvas.examples.take_new()))
        canvas.note(point.site, insertion, made, tuple(keys))
        canvas.replace(point, result)
        shared = ()


def insert_example_figures(
    canvas: Canvas, group: Group, effect: MeasureExampleGradients, where: str, nodes: Sequence[fx.Node], mode: TraceMode
) -> None:
    """Insert the figures of the examples of a group."""
    assert canvas.examples is not None
    insertion, points, scale = group.insertion, group.points, mode.scale
    squares = canvas.examples.total_square_norms(points, nodes, Asked(insertion, effect.examples), scale)

    def add_up(*gradients: Tensor) -> list[Tensor]:
        norms = torch.stack([norm_of(g).to(gradients[0].device, torch.float64) for g in gradients])
        return [norms.square().sum() if scale is None else norms.square().sum() / scale.to(norms.device).square()]

    def run(squares: Tensor, of_batch: Tensor) -> list[Tensor]:
        effect.run(squares, of_batch)
        return [squares]

    tag = "is_backward" if scale is None else "must_be_in_backward"
    (of_batch,), made = editing.compute(canvas.graph, add_up, nodes, points[0].before, tag)
    traced = trace_function(
        run, [value_of(squares)], [points[0].site], insertion, replace(mode, scale=None), [value_of(of_batch)]
    )
    (_, *extras), new = canvas.splice(traced, [squares, of_batch], points[0])
    keys = canvas.packing.add(insertion, where, points[0].site, traced.reports, extras)
    names = tuple(node.name for node in (*canvas.examples.take_new(), *made, *new))
    for n, point in enumerate(points):
        canvas.note(point.site, insertion, () if n else names, tuple(keys))
