"""Packing of records: auxiliary outputs of a joint graph, and their layout."""

from __future__ import annotations

import itertools
import math
from collections import defaultdict
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import replace

import torch
from torch import Tensor, fx
from typing_extensions import assert_never

from gradrewrite._utils.formatting import without_addresses
from gradrewrite.errors import CallbackError
from gradrewrite.ir import editing
from gradrewrite.ir.markers import value_of
from gradrewrite.ir.outputs import BackwardOutputs, MeasuredTensor, Owner, Pack, Placed, PlacedReport, in_order
from gradrewrite.ir.provenance import Anchor
from gradrewrite.ir.record_key import RecordKey
from gradrewrite.ir.reports import (
    KEPT,
    Check,
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
from gradrewrite.numerics.measuring import OP_MEASURE, OP_PACK, pack, text_of
from gradrewrite.policy.insertions import Insertion, MeasureTensor, ReplaceTensor
from gradrewrite.rewriting.forward_values import ForwardValues
from gradrewrite.rewriting.record_nodes import RecordNode, RecordNumbering
from gradrewrite.sites import Site

# Bytes that are measured by one operation on the CPU. It keeps tensors alive for longer than the graph would, and reads
# them when they are no longer in a small cache; each operation costs about 10 us.
BATCH = 1 << 20


class RecordPacking:
    """Reports of the inserted actions, and the nodes of their outputs."""

    def __init__(self, label: str = "") -> None:
        self.numbering = RecordNumbering(label)
        self.records: list[RecordNode] = []
        self.placed: list[Placed[PlacedReport]] = []
        self.kept: list[fx.Node] = []  # of the placed reports of kept tensors
        self.groups: list[str] = []  # that are clipped together, or whose noise is drawn together
        self.noisy: set[str] = set()
        self.states: dict[str, tuple[Tensor, fx.Node]] = {}  # with new values
        self.of_loops: list[tuple[Pack, fx.Node, bool]] = []  # with their nodes; whether it is of activations

    @property
    def has_checks(self) -> bool:
        """Whether a finite check was placed."""
        return any(isinstance(placed.report, Check) for placed in self.placed)

    def add(
        self,
        insertion: Insertion,
        owner: Owner,
        site: Site,
        reports: Sequence[Report[Leaf]],
        outputs: Sequence[fx.Node],
        members: Sequence[Site] = (),
        replicas: int = 1,
        loss: str = "",
        seen: Anchor | None = None,
    ) -> list[RecordKey]:
        """Place the reports of a traced action; return the keys of its records.

        ``site`` is that of the insertion, or the first of a group, ``members`` are the sites of a group. ``loss`` is
        the name of that of the gradient, where it is not that of all. ``seen`` is the node that checks look at.
        """
        figures: list[Figures[Leaf]] = []
        for report in reports:
            match report:
                case Kept(what, number):
                    self.kept.append(outputs[number])
                    self._place(insertion, owner, Kept(self._name_of_kept(what, owner, loss), number, loss))
                case StateUpdate(key, state, number, is_carried):
                    if key in self.states and not is_carried:
                        raise CallbackError(
                            f"{key}: two actions set this state; give each a state of its own", code="state"
                        )
                    self.states[key] = state, outputs[number]
                case Scalars() | NormClip() | ValueClip() | Check():
                    figures.append(report)
                case _:
                    assert_never(report)
        found = self.numbering.of_action(figures, str(owner), list(map(str, members)), loss, _of_each_loss(insertion))
        tensor = self._tensor_of(insertion, site, replicas)
        keys: dict[tuple[int, int], RecordKey] = {}
        skipping = {one.count for one, _ in found if isinstance(one, Check) and one.on_failure == "skip"}
        for report, (keyed, factor) in zip(figures, found, strict=True):
            bounds = []
            for leaf, own in zip(leaves(report), leaves(keyed), strict=True):
                if isinstance(leaf, HostBound):
                    bounds.append((own, leaf.value))
                else:
                    keys[leaf.number, leaf.element] = own
            self._place(insertion, owner, keyed, factor, tuple(bounds), tensor, seen)
        ordered = sorted(keys.items())
        for number, group in itertools.groupby(ordered, key=lambda item: item[0][0]):
            own_keys = tuple(key for _, key in group)
            is_forward, skips = site.traits.in_forward, not skipping.isdisjoint(own_keys)
            self.records.append(RecordNode(own_keys, outputs[number], is_forward, skips))
        return [key for _, key in ordered]

    def measure(
        self,
        insertion: Insertion,
        site: Site,
        *,
        replicas: int = 1,
        loss: str = "",
        seen: Anchor | None = None,
    ) -> tuple[RecordKey, ...]:
        """Place the statistics of a measurement that is made elsewhere; return the keys of its records."""
        assert isinstance(insertion.effect, MeasureTensor)
        names, fails = tuple(insertion.effect.statistics), insertion.effect.fails
        keys = tuple(self.numbering.new(names, str(site), loss=loss))
        tensor, number = self._tensor_of(insertion, site, replicas), len(keys) - (fails is not None)
        if number:
            self._place(insertion, site, Scalars(names[:number], keys[:number]), tensor=tensor)
        if fails is not None:
            self._place(insertion, site, Check(keys[-1].record, keys[-1], fails), tensor=tensor, seen=seen)
        return keys

    def keep(self, insertion: Insertion, site: Site, number: int) -> None:
        """Place a tensor that is kept elsewhere, with its position among the kept ones."""
        self._place(insertion, site, Kept("tensor", number))

    def _name_of_kept(self, name: str, owner: Owner, loss: str) -> str:
        """Return the name of a kept tensor; a second one of a name there is ``name.2``."""
        if name in KEPT:
            return name
        placed = ((p.report, p.owner) for p in self.placed if isinstance(p.report, Kept))
        taken = {report.what for report, other in placed if (other, report.loss) == (owner, loss)}
        names = itertools.chain([name], (f"{name}.{n}" for n in itertools.count(2)))
        return next(one for one in names if one not in taken)

    def add_loop(
        self,
        placed: Iterable[Placed[PlacedReport]],
        packs: Iterable[tuple[Pack, fx.Node, bool]],
        kept: Iterable[fx.Node],
    ) -> None:
        """Place the reports of the iterations of a loop; the kept tensors are in the order of the reports."""
        self.placed += placed
        self.of_loops += packs
        self.kept += kept

    def count(self, records: Iterable[RecordNode]) -> None:
        """Place counts of elements that are not finite, at the boundary of a graph."""
        for record in records:
            self.records.append(record)
            names = tuple(key.record for key in record.keys)
            tensor = MeasuredTensor(dict.fromkeys(names, "nonfinite"), None)
            self.placed.append(Placed(Scalars(names, record.keys), record.keys[0].site, tensor=tensor))

    def _tensor_of(self, insertion: Insertion, site: Site, replicas: int) -> MeasuredTensor | None:
        """Return the tensor that an action measures; so many ranks have the same one."""
        names: Mapping[str, str] = {}
        match insertion.effect:
            case MeasureTensor(statistics):
                names = statistics
            case ReplaceTensor() as effect:
                names = {name: effect.statistics[name] for name in effect.observed}
        if not names or site.traits.at_guard:  # whose figures all ranks have
            return None
        size = None if None in site.shape else math.prod(size or 0 for size in site.shape)
        return MeasuredTensor(names, size, replicas, len(self.placed))

    def _place(
        self,
        insertion: Insertion,
        owner: Owner,
        report: PlacedReport,
        factor: RecordKey | None = None,
        bounds: tuple[tuple[RecordKey, float | Tensor], ...] = (),
        tensor: MeasuredTensor | None = None,
        seen: Anchor | None = None,
    ) -> None:
        is_check = isinstance(report, Check)
        assert not is_check or isinstance(owner, Site), f"a check of {insertion.action!r} is at no single site"
        action, seen = without_addresses(repr(insertion.action)), seen if is_check else None
        given = report, owner, action, insertion.rule, insertion.every, factor, bounds, tensor, seen
        self.placed.append(Placed(*given))

    def follow(self, current: Callable[[fx.Node], fx.Node], graph: fx.Graph) -> None:
        """Replace each node by its current successor, before anything is packed."""
        nodes = {node.name: node for node in graph.nodes}
        self.records = [replace(record, node=current(record.node)) for record in self.records]
        self.kept = list(map(current, self.kept))
        self.states = {key: (tensor, current(node)) for key, (tensor, node) in self.states.items()}
        for number, placed in enumerate(self.placed):
            if placed.seen is not None:
                seen = replace(placed.seen, node=current(nodes[placed.seen.node]).name)
                self.placed[number] = replace(placed, seen=seen)

    def pack_into(self, graph: fx.Graph, forward: ForwardValues) -> tuple[BackwardOutputs, list[fx.Node]]:
        """Pack the records and hold the auxiliary outputs; return these, and all new nodes."""
        groups: dict[tuple[torch.device, bool], list[RecordNode]] = defaultdict(list)
        order = [key for record in self.records for key in record.keys]
        for record in sorted(self.records, key=_comes_later):
            # Those of the forward are packed in the forward: one tensor is carried into the backward.
            groups[value_of(record.node).device, record.is_forward].append(record)
        packs: list[fx.Node] = []
        new: list[fx.Node] = []
        layouts: list[Pack] = []
        for (device, _), records in groups.items():
            if device.type == "cpu":
                records, added = _measure_in_batches(graph, records)
                new += added
            records = sorted(_measured_once(records), key=_comes_later)
            # On CUDA each value is written by the kernel that computes it, and a verdict would be one more kernel.
            num_skips = _num_skips(records)
            has_verdict = num_skips > 0 and device.type != "cuda"
            packed, added = _insert_pack(graph, records, range(num_skips if has_verdict else 0), graph.output_node())
            packs.append(packed)
            new += added
            layouts.append(Pack(tuple(key for record in records for key in record.keys), num_skips, has_verdict))
        for layout, node, _ in self.of_loops:
            packs.append(node)
            layouts.append(layout)
        order += [key for layout, _, _ in self.of_loops for key in layout.keys]
        of_kept = [placed.owner for placed in self.placed if isinstance(placed.report, Kept)]
        kept = [
            forward.for_backward(node) if isinstance(owner, Site) and owner.traits.in_forward else node
            for owner, node in zip(of_kept, self.kept, strict=True)
        ]
        new += (node for node, before in zip(kept, self.kept, strict=True) if node is not before)
        held = [*packs, *kept, *(node for _, node in self.states.values())]
        if held:
            early = [packed for packed, (_, is_forward) in zip(packs, groups, strict=False) if is_forward]
            early += [node for _, node, is_forward in self.of_loops if is_forward]
            new.append(editing.hold(graph, held, early))
        return self.outputs(layouts, order), new

    def outputs(self, packs: Iterable[Pack], order: Iterable[RecordKey]) -> BackwardOutputs:
        """Return the auxiliary outputs with these packs; the records of a step are in this order."""
        states = tuple((key, tensor) for key, (tensor, _) in self.states.items())
        placed, label = in_order(self.placed, order), self.numbering.label
        return BackwardOutputs(tuple(packs), placed, states, tuple(self.groups), frozenset(self.noisy), label)


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


def _of_each_loss(insertion: Insertion) -> Collection[str] | None:
    """Return the names of records of one loss; None for all records."""
    effect = insertion.effect
    if not (isinstance(effect, ReplaceTensor) and effect.reads == "losses"):
        return None
    return () if effect.of_others is None else effect.of_others.statistics
