"""Insertions at the part of a gradient on this rank."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from gradrewrite.distributed.shards import Spread
from gradrewrite.ir.elementwise import constants_of, reason_not_elementwise
from gradrewrite.ir.markers import value_of
from gradrewrite.ir.provenance import Anchor
from gradrewrite.ir.reports import KEPT, Kept, Leaf, Report, StateUpdate
from gradrewrite.policy.insertions import Insertion, KeepTensor, MeasureTensor, ReplaceTensor
from gradrewrite.policy.scope import Context, refuse
from gradrewrite.rewriting.action_tracing import TracedAction, TraceMode
from gradrewrite.rewriting.canvas import Canvas
from gradrewrite.rewriting.inserters.single import insert
from gradrewrite.rewriting.insertion_points import InsertionPoint
from gradrewrite.rewriting.record_nodes import RecordNode


def insert_at_part(canvas: Canvas, point: InsertionPoint, insertion: Insertion, spread: Spread) -> list[RecordNode]:
    """Insert at a part; return the measurements of the whole gradient.

    PolicyError for an action that is not elementwise.
    """
    match insertion.effect:
        case MeasureTensor() as measure:
            return _measure(canvas, point, insertion, measure)
        case ReplaceTensor() | KeepTensor() as effect:
            refuse_unless_elementwise(canvas, point, insertion, effect, spread)
    insert(canvas, point, [insertion])
    return []


def _measure(canvas: Canvas, point: InsertionPoint, insertion: Insertion, measure: MeasureTensor) -> list[RecordNode]:
    node = canvas.current(point.node)
    keys = canvas.packing.measure(insertion, point.site, seen=Anchor(node.name, point.order))
    canvas.note(point.site, insertion, (), keys)
    return [RecordNode((key,), node, is_forward=False, skips=measure.fails == "skip") for key in keys]


def refuse_unless_elementwise(
    canvas: Canvas, point: InsertionPoint, insertion: Insertion, effect: ReplaceTensor | KeepTensor, spread: Spread
) -> None:
    """Raise PolicyError for a replacement that needs whole gradients; it is traced on those, so all ranks agree."""
    sizes = [int(size or 0) for size in point.site.shape]
    traced = _traced_at(canvas, point, insertion, effect, sizes)
    reason = reason_not_elementwise(traced.graph.graph)
    if not reason:
        larger = _traced_at(canvas, point, insertion, effect, [2 * size for size in sizes])
        is_same = constants_of(traced.graph.graph) == constants_of(larger.graph.graph)
        reason = "" if is_same else "it depends on the shape of the gradient"
    if not all(_is_of_part(report) for report in traced.reports):
        reason = "its records would be those of the part of one rank"
    if traced.has_states:
        reason = "what it remembers would be that of the part of one rank"
    refuse(insertion, Context(point.site, num_ranks=len(spread.ranks), needs_whole=reason))


def _is_of_part(report: Report[Leaf]) -> bool:
    return isinstance(report, StateUpdate) or (isinstance(report, Kept) and report.what in KEPT)


def _traced_at(
    canvas: Canvas,
    point: InsertionPoint,
    insertion: Insertion,
    effect: ReplaceTensor | KeepTensor,
    sizes: Sequence[int],
) -> TracedAction:
    part, reads_value = value_of(point.node), isinstance(effect, ReplaceTensor) and effect.reads == "value"
    with part.fake_mode:  # type: ignore[attr-defined]
        whole = torch.empty(sizes, dtype=part.dtype, device=part.device)
        further = [torch.empty_like(whole)] if reads_value else []
    mode = TraceMode(states=canvas.states_at(str(point.site)))
    return canvas.tracer.trace(insertion, effect.run, point.site, whole, mode, further)
