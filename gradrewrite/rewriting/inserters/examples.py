"""Weights of the examples of a batch, and their noise."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from torch import fx

from gradrewrite.ir.markers import value_of
from gradrewrite.policy.insertions import WeighExampleGradients
from gradrewrite.policy.recording import recording
from gradrewrite.rewriting.action_tracing import TraceMode, trace_function
from gradrewrite.rewriting.canvas import Canvas
from gradrewrite.rewriting.example_gradients import Asked
from gradrewrite.rewriting.lowering import Group


def insert_example_clip(
    canvas: Canvas, group: Group, effect: WeighExampleGradients, where: str, nodes: Sequence[fx.Node], mode: TraceMode
) -> None:
    """Insert the weights of examples, and the gradients that they make."""
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
        with recording(point.site.device, states=mode.states):
            result = canvas.examples.weighted_gradient(point, node, weights, asked, effect.noise, scale)
        made = tuple(n.name for n in (*shared, *canvas.examples.take_new()))
        canvas.note(point.site, insertion, made, tuple(keys))
        canvas.replace(point, result)
        shared = ()
    if effect.noise is not None:  # without it, clips of several backwards add up to that of all their examples
        name = f"{effect.group} (noise)"  # a global clip may have a group of the same name
        canvas.packing.groups.append(name)
        canvas.packing.noisy.add(name)
