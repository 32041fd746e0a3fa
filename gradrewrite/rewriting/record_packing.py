"""Packing of records: auxiliary outputs of a joint graph, and their layout."""

from __future__ import annotations

import itertools
import math
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor, fx
from typing_extensions import assert_never

from gradrewrite._utils.formatting import without_addresses
from gradrewrite.errors import CallbackError
from gradrewrite.ir import editing
from gradrewrite.ir.markers import value_of
from gradrewrite.ir.ops import OP_MEASURE, OP_PACK, pack, text_of
from gradrewrite.ir.record_key import RecordKey, with_label
from gradrewrite.ir.record_layout import BackwardOutputs, ClipRecords, FiniteCheck, MeasuredTensor, SiteOp
from gradrewrite.ir.reports import (
    Check,
    Clip,
    Figures,
    HostBound,
    Kept,
    Leaf,
    NormClip,
    Report,
    Scalars,
    StateUpdate,
    ValueClip,
    leaves,
)
from gradrewrite.ir.values import num_bytes
from gradrewrite.policy.insertions import Insertion, MeasureTensor, ReplaceTensor
from gradrewrite.rewriting.forward_values import ForwardValues
from gradrewrite.rewriting.record_nodes import LossOf, RecordNode, RecordNumbering
from gradrewrite.sites import IN_FORWARD, Site

# Bytes that are measured by one operation on the CPU. It keeps tensors alive for longer than the graph would, and reads
# them when they are no longer in a small cache; each operation costs about 10 us.
BATCH = 1 << 20


@dataclass
class RecordPacking:
    """The nodes for the auxiliary outputs of the backward."""

    records: list[RecordNode] = field(default_factory=list)
    checks: list[FiniteCheck] = field(default_factory=list)
    kept: list[tuple[Site, fx.Node]] = field(default_factory=list)  # what ``Keep`` keeps
    kept_as: list[str] = field(default_factory=list)  # what each of them is
    kept_every: list[int] = field(default_factory=list)  # after how many steps it is kept again
    # keys of measurements, by the number of steps from one to the next
    measured: dict[RecordKey, MeasuredTensor] = field(default_factory=dict)
    sampled: dict[int, set[RecordKey]] = field(default_factory=lambda: defaultdict(set))
    groups: list[str] = field(default_factory=list)  # that are clipped together
    noisy: set[str] = field(default_factory=set)
    clips: list[ClipRecords] = field(default_factory=list)  # of which a factor is known
    # keys that readers see in the place of a key: a factor behind a norm, and in the place of the norms around a clip
    shown: dict[RecordKey, tuple[RecordKey, ...]] = field(default_factory=dict)
    bounds: list[tuple[RecordKey, float | Tensor]] = field(default_factory=list)  # that the host has
    states: dict[str, tuple[Tensor, fx.Node]] = field(default_factory=dict)  # with new values
    ops: dict[SiteOp, None] = field(default_factory=dict)  # of the recorded activations and errors, in order
    numbering: RecordNumbering = field(default_factory=RecordNumbering)

    def add(
        self,
        insertion: Insertion,
        where: str,
        site: Site,
        reports: Sequence[Report[Leaf]],
        outputs: Sequence[fx.Node],
        members: Sequence[Site] = (),
        replicas: int = 1,
        loss: LossOf | None = None,
    ) -> tuple[list[RecordKey], list[Check[RecordKey]]]:
        """Take the reports of a traced action; return the keys of its records, at ``where``, and its finite checks.

        ``site`` is that of the insertion, or the first of a group, ``members`` are the sites of a group. ``loss`` is
        that of the gradient, where it is not that of all.
        """
        figures: list[Figures[Leaf]] = []
        for report in reports:
            match report:
                case Kept(what, number):
                    self.kept.append((site, outputs[number]))
                    self.kept_as.append(what)
                    self.kept_every.append(insertion.every or 1)
                case StateUpdate(key, state, number):
                    if key in self.states:
                        raise CallbackError(
                            f"{key}: two actions set this state; give each a state of its own", code="state"
                        )
                    self.states[key] = state, outputs[number]
                case Scalars() | NormClip() | ValueClip() | Check():
                    figures.append(report)
                case _:
                    assert_never(report)
        if figures and where == str(site):
            self.note_op(site)
        placed = self.numbering.of_action(figures, where, list(map(str, members)), loss)
        keys = self._place(figures, [keyed for keyed, _ in placed])
        checks = [keyed for keyed, _ in placed if isinstance(keyed, Check)]
        for keyed, factor in placed:
            if factor is not None:
                assert isinstance(keyed, NormClip | ValueClip)
                clip = _clip_records(insertion, where, site, keyed, factor)
                self._add_clip(replace(clip, name=f"{clip.name}{self.numbering.label}"))
        skipping = {check.count for check in checks if check.on_failure == "skip"}
        ordered = sorted(keys.items())
        for number, flat in itertools.groupby(ordered, key=lambda item: item[0][0]):
            found = tuple(key for _, key in flat)
            is_forward, skips = site.kind in IN_FORWARD, not skipping.isdisjoint(found)
            self.records.append(RecordNode(found, outputs[number], is_forward, skips))
        self.note_measured(insertion, [key for _, key in ordered], site, replicas)
        return [key for _, key in ordered], checks

    def note_measured(self, insertion: Insertion, keys: Sequence[RecordKey], site: Site, replicas: int = 1) -> None:
        """Note the records of a measurement; so many ranks have the same tensor."""
        if insertion.every is not None:
            self.sampled[insertion.every].update(keys)
        names: Mapping[str, str] = {}
        match insertion.effect:
            case MeasureTensor(statistics):
                names = statistics
            case ReplaceTensor() as effect:
                names = {name: effect.statistics[name] for name in effect.observed}
        if site.kind != "step":  # whose gradient all ranks have
            size = None if None in site.shape else math.prod(size or 0 for size in site.shape)
            number, own = len(self.measured), [key for key in keys if key.record in names]
            self.measured |= {key: MeasuredTensor(names[key.record], size, replicas, number) for key in own}

    def note_op(self, site: Site) -> None:
        """List the op of a recorded site, if it has one."""
        if site.op:
            of_site = SiteOp.of(site)
            self.ops[replace(of_site, name=with_label(of_site.name, self.numbering.label))] = None

    def _place(
        self, reports: Sequence[Figures[Leaf]], placed: Sequence[Figures[RecordKey]]
    ) -> dict[tuple[int, int], RecordKey]:
        """Return the keys of reports, by output and element; take bounds."""
        keys: dict[tuple[int, int], RecordKey] = {}
        for report, keyed in zip(reports, placed, strict=True):
            for leaf, own in zip(leaves(report), leaves(keyed), strict=True):
                if isinstance(leaf, HostBound):
                    self.bounds.append((own, leaf.value))
                else:
                    keys[leaf.number, leaf.element] = own
        return keys

    def _add_clip(self, clip: ClipRecords) -> None:
        self.clips.append(clip)
        if isinstance(clip.report, NormClip):
            self.shown[clip.report.norm] = (clip.report.norm, clip.factor)
        else:
            self.shown |= {clip.report.before: (clip.factor,), clip.report.after: ()}

    def follow(self, current: Callable[[fx.Node], fx.Node], graph: fx.Graph) -> None:
        """Replace each node by its current successor, before anything is packed."""
        nodes = {node.name: node for node in graph.nodes}
        self.records = [replace(record, node=current(record.node)) for record in self.records]
        self.kept = [(site, current(node)) for site, node in self.kept]
        self.states = {key: (tensor, current(node)) for key, (tensor, node) in self.states.items()}
        self.checks = [replace(check, node=current(nodes[check.node]).name) for check in self.checks]

    def pack_into(self, graph: fx.Graph, forward: ForwardValues) -> tuple[BackwardOutputs, list[fx.Node]]:
        """Pack the records and hold the auxiliary outputs; return their layout and all new nodes."""
        groups: dict[tuple[torch.device, bool], list[RecordNode]] = defaultdict(list)
        order = [shown for record in self.records for key in record.keys for shown in self.shown.get(key, (key,))]
        for record in sorted(self.records, key=_comes_later):
            # Those of the forward are packed in the forward: one tensor is carried into the backward.
            groups[value_of(record.node).device, record.is_forward].append(record)
        packs: list[fx.Node] = []
        new: list[fx.Node] = []
        for (device, _), records in groups.items():
            if device.type == "cpu":
                records[:], added = _measure_in_batches(graph, records)
                new += added
            records[:] = sorted(_measured_once(records), key=_comes_later)
            # On CUDA each value is written by the kernel that computes it, and a verdict would be one more kernel.
            num_checks = 0 if device.type == "cuda" else _num_skips(records)
            packed, added = _insert_pack(graph, records, range(num_checks), graph.output_node())
            packs.append(packed)
            new += added
        kept = [node if site.kind != "activation" else forward.for_backward(node) for site, node in self.kept]
        new += (node for node, (_, before) in zip(kept, self.kept, strict=True) if node is not before)
        held = [*packs, *kept, *(node for _, node in self.states.values())]
        if held:
            early = [packed for packed, (_, is_forward) in zip(packs, groups, strict=True) if is_forward]
            new.append(editing.hold(graph, held, early))
        return self._layout(list(groups.values()), order), new

    def _layout(self, packs: Sequence[Sequence[RecordNode]], order: Sequence[RecordKey]) -> BackwardOutputs:
        return BackwardOutputs(
            packs=tuple(tuple(key for record in records for key in record.keys) for records in packs),
            keys=tuple(order),
            num_skips=tuple(map(_num_skips, packs)),
            verdicts=tuple(
                _num_skips(records) > 0 and value_of(records[0].node).device.type != "cuda" for records in packs
            ),
            kept=tuple(replace(site, name=f"{site.name}{self.numbering.label}") for site, _ in self.kept),
            kept_as=tuple(self.kept_as),
            groups=tuple(self.groups),
            checks=tuple(sorted(self.checks, key=lambda check: check.order)),
            clips=tuple(self.clips),
            bounds=tuple(self.bounds),
            states=tuple((key, tensor) for key, (tensor, _) in self.states.items()),
            counts=frozenset(self.numbering.counts),
            noisy=frozenset(self.noisy),
            sampled=tuple((every, frozenset(keys)) for every, keys in self.sampled.items()),
            kept_every=tuple(self.kept_every),
            measured=self.measured,
            ops=tuple(self.ops),
        )


def _clip_records(
    insertion: Insertion, where: str, site: Site, report: Clip[RecordKey], factor: RecordKey
) -> ClipRecords:
    action = without_addresses(repr(insertion.action))
    if where == str(site):
        return ClipRecords(site.kind, site.name, site.call, action, insertion.rule, report, factor)
    before, kind, name = where.partition("group:")
    return ClipRecords(f"{before}{kind[:-1]}", name, 0, action, insertion.rule, report, factor)


def _comes_later(record: RecordNode) -> bool:
    """Order records: counts of checks that skip come first."""
    return not record.skips


def _num_skips(records: Sequence[RecordNode]) -> int:
    return sum(len(record.keys) for record in records if record.skips)


def _measured_once(records: Sequence[RecordNode]) -> list[RecordNode]:
    """Merge statistics of one tensor into one read; counts of skipping checks stay apart."""
    found: dict[tuple[fx.Node, bool] | int, RecordNode] = {}
    for number, record in enumerate(records):
        place = (record.node, record.skips) if record.statistics else number
        same = found.get(place)
        if same is not None:
            record = replace(same, keys=same.keys + record.keys, statistics=same.statistics + record.statistics)
        found[place] = record
    return list(found.values())


def _insert_pack(
    graph: fx.Graph, records: Sequence[RecordNode], checks: Sequence[int], before: fx.Node
) -> tuple[fx.Node, list[fx.Node]]:
    nodes, statistics = [record.node for record in records], [record.statistics for record in records]
    tag, values = _tag_of(records), [value_of(node) for node in nodes]
    if values[0].device.type != "cuda":
        node = editing.insert_call(graph, OP_PACK, (nodes, text_of(statistics), list(checks)), before, tag)
        return node, [node]
    (result,), new = editing.compute(
        graph, lambda *xs: [pack(list(zip(xs, statistics, strict=True)), checks)], nodes, before, tag
    )
    return result, new


def _tag_of(records: Sequence[RecordNode]) -> str:
    return "is_forward" if records[0].is_forward else "is_backward"


def _measure_in_batches(graph: fx.Graph, records: Sequence[RecordNode]) -> tuple[list[RecordNode], list[fx.Node]]:
    """Measure values soon after they are made, while they are in a cache, several by one operation.

    Of the records that are packed together, those of the last batch are still to be measured. New nodes are returned
    too.
    """
    position = {node: number for number, node in enumerate(graph.nodes)}
    done = [record for record in records if not record.statistics]
    new: list[fx.Node] = []
    batch: list[RecordNode] = []
    size = 0

    def measure() -> None:
        for skips in (False, True):
            members = _measured_once([record for record in batch if record.skips == skips])
            if members:
                last = max((record.node for record in members), key=position.__getitem__)
                before = last.next
                while before.op == "placeholder":
                    before = before.next
                args = ([record.node for record in members], text_of([record.statistics for record in members]))
                figures = editing.insert_call(graph, OP_MEASURE, args, before, _tag_of(members))
                keys = tuple(key for record in members for key in record.keys)
                done.append(RecordNode(keys, figures, members[0].is_forward, skips))
                new.append(figures)
        batch.clear()

    for record in sorted((r for r in records if r.statistics), key=lambda r: position[r.node]):
        own = num_bytes(value_of(record.node))
        own = BATCH if own is None else own
        if batch and size + own > BATCH:
            measure()
            size = 0
        batch.append(record)
        size += own
    writes = bool(graph.find_nodes(op="call_function", target=torch.ops.aten.copy_.default))
    if size > BATCH or (writes and records[0].is_forward):  # which may change at the end what was computed before
        measure()
    return [*done, *batch], new
