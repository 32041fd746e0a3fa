"""Insertions at single points: replacements, measurements, copies for the host."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import fx
from typing_extensions import assert_never

from gradrewrite.distributed.layouts import Layout
from gradrewrite.errors import CallbackError
from gradrewrite.ir.bases import base_of
from gradrewrite.ir.markers import value_of
from gradrewrite.ir.provenance import Anchor
from gradrewrite.numerics.statistics import IN_UNITS
from gradrewrite.policy.actions import describe
from gradrewrite.policy.insertions import (
    AverageOverRanks,
    HoldElements,
    Insertion,
    JudgeUpdate,
    KeepTensor,
    KeepZeroErrors,
    MeasureExampleGradients,
    MeasureTensor,
    Omitted,
    OtherValues,
    PerExample,
    RecomputeSaved,
    ReplaceBackward,
    ReplaceGroup,
    ReplaceTensor,
    ScaleGroup,
    ScaleParameter,
    StoreSaved,
    WeighExampleGradients,
    WeighLossGradients,
)
from gradrewrite.rewriting.action_tracing import check_dense
from gradrewrite.rewriting.canvas import Canvas
from gradrewrite.rewriting.example_gradients import Asked
from gradrewrite.rewriting.insertion_points import InsertionPoint
from gradrewrite.rewriting.record_nodes import RecordNode


def insert(canvas: Canvas, point: InsertionPoint, insertions: Sequence[Insertion]) -> None:
    """Insert at one site, in order; averages come in buckets."""
    current = point.node = canvas.current(point.node)
    now, later = _split(canvas, point, insertions)
    for insertion in now:
        before = current
        match insertion.effect:
            case MeasureTensor() as effect if _is_on_cuda(current) and point.layout is None:
                base = base_of(current, canvas.changed)  # equal measurements are one in the compiled graph
                value, mode = value_of(base), canvas.mode_at(point)
                traced = canvas.tracer.trace(insertion, effect.run, point.site, value, mode)
                (_, *extras), new = canvas.splice(traced, [base], point)
            case MeasureTensor() | ReplaceTensor() | KeepTensor() as effect:
                further, others = _further_arguments(canvas, point, insertion, current)
                value, *values = map(value_of, (current, *further))
                mode, layouts = canvas.mode_at(point), _layouts_of(point, others)
                traced = canvas.tracer.trace(insertion, effect.run, point.site, value, mode, values, layouts)
                (current, *extras), new = canvas.splice(traced, [current, *further], point)
                canvas.note_states(mode, traced, extras, new)
            case ScaleParameter() | HoldElements():
                check_dense(insertion.action, point.site, value_of(current))
                canvas.note(point.site, insertion)
                continue
            case Omitted(names):
                canvas.packing.numbering.new(names, str(point.site), loss=point.records_of)
                continue
            case (
                AverageOverRanks()
                | StoreSaved()
                | RecomputeSaved()
                | ReplaceBackward()
                | KeepZeroErrors()
                | ReplaceGroup()
                | ScaleGroup()
                | WeighExampleGradients()
                | MeasureExampleGradients()
                | WeighLossGradients()
                | JudgeUpdate()
            ):
                raise AssertionError(f"{insertion.action!r} is at no single point of a gradient")
            case _:
                assert_never(insertion.effect)
        given, seen = (insertion, point.site, point.site, traced.reports, extras), Anchor(before.name, point.order)
        keys = canvas.packing.add(*given, replicas=point.replicas, loss=point.records_of, seen=seen)
        made = tuple(node.name for node in (*canvas.take_new(), *new))
        canvas.note(point.site, insertion, made, tuple(keys))
    if current is not point.node:
        canvas.replace(point, current)
    for insertion, measure in later:
        canvas.note(point.site, insertion)
        _measure(canvas, point, insertion, measure)


def _further_arguments(
    canvas: Canvas, point: InsertionPoint, insertion: Insertion, current: fx.Node
) -> tuple[list[fx.Node], list[Layout | None]]:
    """Return the further arguments of an action, and their layouts."""
    reads = insertion.effect.reads if isinstance(insertion.effect, ReplaceTensor) else ""
    match reads:
        case PerExample():
            assert canvas.examples is not None
            asked, scale = Asked(insertion, reads), canvas.scale_on(point.site.device)
            given = canvas.examples.quantities(point, current, asked, scale)
            return given, [point.value_layout][: len(given)]
        case OtherValues(_, reads_value):
            own = [_value_at(canvas, point, insertion)] if reads_value else []
            found = [*own, *canvas.other_values(insertion, reads, point)]
            return [node for node, _ in found], [layout for _, layout in found]
        case "losses":
            assert canvas.losses is not None
            rows, scale = [canvas.loss_rows[point.site]], canvas.scale_on(point.site.device)
            is_opaque = point.site.device.type != "cuda"
            return [canvas.losses.gramian(rows, scale, point.before, is_opaque=is_opaque)], [point.value_layout]
        case "value":
            node, layout = _value_at(canvas, point, insertion)
            return [node], [layout]
    return [], []


def _value_at(canvas: Canvas, point: InsertionPoint, insertion: Insertion) -> tuple[fx.Node, Layout | None]:
    if point.value is None:
        raise CallbackError(
            f"{point.site}: {describe(insertion.action)} has two required parameters, the gradient and what it is the "
            "gradient of, which this graph does not have; give the second one a default"
        )
    return canvas.forward.for_backward(point.value), point.value_layout


def _split(
    canvas: Canvas, point: InsertionPoint, insertions: Sequence[Insertion]
) -> tuple[list[Insertion], list[tuple[Insertion, MeasureTensor]]]:
    """Split off the last measurements: several values are measured by one operation."""
    now = list(insertions)
    later: list[tuple[Insertion, MeasureTensor]] = []
    while now and isinstance(measure := now[-1].effect, MeasureTensor) and _is_put_off(canvas, point, measure):
        later.insert(0, (now.pop(), measure))
    return now, later


def _is_put_off(canvas: Canvas, point: InsertionPoint, measure: MeasureTensor) -> bool:
    """Return whether a measurement can be put off.

    It can at gradients, and on devices with an operation of our own for measurements.
    """
    value = value_of(point.node)
    is_put_off = point.output is not None or canvas.measures_apart(value.device)
    is_traced = _is_on_cuda(point.node) or point.layout is not None
    if not is_put_off or is_traced or value.layout is not torch.strided or value.is_complex():
        return False
    return canvas.mode(point.site).scale is None or IN_UNITS.isdisjoint(measure.statistics.values())


def _measure(canvas: Canvas, point: InsertionPoint, insertion: Insertion, measure: MeasureTensor) -> None:
    if not measure.statistics:
        return
    seen = Anchor(point.node.name, point.order)
    keys = canvas.packing.measure(insertion, point.site, replicas=point.replicas, loss=point.records_of, seen=seen)
    statistics, is_forward = tuple(measure.statistics.values()), point.site.traits.in_forward
    skips = measure.fails == "skip"
    canvas.packing.records.append(RecordNode(keys, point.node, is_forward, skips, statistics))


def _is_on_cuda(node: fx.Node) -> bool:
    return value_of(node).device.type == "cuda"


def _layouts_of(point: InsertionPoint, others: Sequence[Layout | None]) -> Sequence[Layout | None]:
    layouts = (point.layout, *others)
    return layouts if any(layout is not None for layout in layouts) else ()
