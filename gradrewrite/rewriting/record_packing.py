"""Packing of records: auxiliary outputs of a joint graph, and their layout."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import partial

import torch
from torch import Tensor, fx

from gradrewrite._compat import make_fx
from gradrewrite.errors import CallbackError
from gradrewrite.ir import editing
from gradrewrite.ir.markers import value_of
from gradrewrite.ir.ops import measure_all, pack
from gradrewrite.ir.record_key import RecordKey
from gradrewrite.ir.record_layout import BackwardOutputs, Check, LogLine, NormClip, ValueClip
from gradrewrite.rewriting.action_tracing import TracedAction
from gradrewrite.rewriting.forward_values import ForwardValues
from gradrewrite.rewriting.record_nodes import RecordNode, RecordNumbering
from gradrewrite.sites import Site

# Bytes that are measured by one operation on the CPU. It keeps tensors alive for longer than the graph would, and reads
# them when they are no longer in a small cache; each operation costs about 10 us.
BATCH = 1 << 20


@dataclass
class RecordPacking:
    """The nodes for the auxiliary outputs of the backward.

    Attributes:
        records: Nodes of records.
        checks: The finite checks.
        kept: Nodes that ``Keep`` keeps, by their site.
        kept_as: What each of them is.
        logs: Log lines of clips.
        groups: Names of the groups that are clipped together.
        clips: The clips of which a factor is known.
        group_logs: Clips by norm of groups that log.
        shown: The keys of a step that come in the place of a key, where it is not that key alone.
        bounds: Bounds of clips that the host has.
        states: What actions remember, by key, with the nodes of the new values.
        numbering: Makes the keys of records.
    """

    records: list[RecordNode] = field(default_factory=list)
    checks: list[Check] = field(default_factory=list)
    kept: list[tuple[Site, fx.Node]] = field(default_factory=list)
    kept_as: list[str] = field(default_factory=list)
    logs: list[LogLine] = field(default_factory=list)
    groups: list[str] = field(default_factory=list)
    noisy: set[str] = field(default_factory=set)
    clips: list[NormClip | ValueClip] = field(default_factory=list)
    group_logs: list[NormClip] = field(default_factory=list)
    shown: dict[RecordKey, tuple[RecordKey, ...]] = field(default_factory=dict)
    bounds: list[tuple[RecordKey, float | Tensor]] = field(default_factory=list)
    states: dict[str, tuple[Tensor, fx.Node]] = field(default_factory=dict)
    numbering: RecordNumbering = field(default_factory=RecordNumbering)

    def add(
        self, where: str, site: Site, traced: TracedAction, extras: Sequence[fx.Node], members: Sequence[Site] = ()
    ) -> list[RecordKey]:
        """Add the outputs of a traced action beside the replacement.

        Args:
            where: The site of its records.
            site: Its site, or the first.
            traced: The action.
            extras: Nodes of what it returns.
            members: The sites of its last records, if they are of members of a group.

        Returns:
            The keys of its records.
        """
        bound = None if traced.bound is None else traced.bound[0]
        reported = traced.records[:-1] if traced.has_members else traced.records
        named, key_of_bound = self.numbering.of_action(reported, where, bound)
        if traced.norm_dtype is not None:
            self._add_norm_clip(named, key_of_bound, traced)
        if traced.has_members:
            names = zip(traced.records[-1], members, strict=True)
            named.append([key for name, member in names for key in self.numbering.new([name], str(member))])
        for own, node in zip(named, extras, strict=False):
            self.records.append(RecordNode(tuple(own), node, site.kind == "activation", traced.fails == "skip"))
        keys = [key for own in named for key in own]
        first_state = len(extras) - len(traced.states)
        self.kept += [(site, node) for node in extras[len(traced.records) : first_state]]
        self.kept_as += traced.kept_as
        for (key, tensor), node in zip(traced.states, extras[first_state:], strict=True):
            if key in self.states:
                raise CallbackError(f"{key}: two actions set this state; give each a state of its own")
            self.states[key] = tensor, node
        if traced.has_strength:
            self._add_value_clip(before=keys[0], after=keys[1], clipped=keys[-1])
        if traced.logs:
            self.logs.append(LogLine(site, *keys[-3:]))
        if traced.bound is not None and key_of_bound is not None:
            self.bounds.append((key_of_bound, traced.bound[1]))
        return keys

    def _add_norm_clip(
        self, named: Sequence[Sequence[RecordKey]], key_of_bound: RecordKey | None, traced: TracedAction
    ) -> None:
        norm = named[0][0]
        bound = key_of_bound or next(key for own in named for key in own if key.record == "bound")
        (factor,) = self.numbering.new(["factor"], norm.site, occurrence=norm.occurrence)
        clip = NormClip(norm, bound, factor, traced.norm_dtype == torch.float64)
        self.clips.append(clip)
        self.shown[norm] = (norm, factor)
        if traced.logs_group:
            self.group_logs.append(clip)

    def _add_value_clip(self, before: RecordKey, after: RecordKey, clipped: RecordKey) -> None:
        (factor,) = self.numbering.new(["factor"], clipped.site)
        self.clips.append(ValueClip(before, after, clipped, factor))
        self.shown |= {before: (factor,), after: ()}

    def follow(self, current: Callable[[fx.Node], fx.Node], graph: fx.Graph) -> None:
        """Replace each node by its current successor, before anything is packed."""
        nodes = {node.name: node for node in graph.nodes}
        self.records = [replace(record, node=current(record.node)) for record in self.records]
        self.kept = [(site, current(node)) for site, node in self.kept]
        self.states = {key: (tensor, current(node)) for key, (tensor, node) in self.states.items()}
        self.checks = [replace(check, node=current(nodes[check.node]).name) for check in self.checks]

    def pack_into(self, graph: fx.Graph, forward: ForwardValues) -> tuple[BackwardOutputs, list[fx.Node]]:
        """Pack the records, hold the auxiliary outputs, and return their layout.

        All new nodes are returned too.
        """
        groups: dict[tuple[torch.device, bool], list[RecordNode]] = defaultdict(list)
        keys = [key for record in self.records for key in record.keys]
        order = tuple(shown for key in keys for shown in self.shown.get(key, (key,)))
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
            run = partial(pack, checks=range(num_checks))
            packed, added = _insert(run, graph, records, graph.output_node())
            packs.append(packed)
            new += added
        kept = [node if site.kind != "activation" else forward.for_backward(node) for site, node in self.kept]
        new += (node for node, (_, before) in zip(kept, self.kept, strict=True) if node is not before)
        held = [*packs, *kept, *(node for _, node in self.states.values())]
        if held:
            early = [packed for packed, (_, is_forward) in zip(packs, groups, strict=True) if is_forward]
            new.append(editing.hold(graph, held, early))
        return self._layout(list(groups.values()), order), new

    def _layout(self, packs: Sequence[Sequence[RecordNode]], order: tuple[RecordKey, ...]) -> BackwardOutputs:
        return BackwardOutputs(
            packs=tuple(tuple(key for record in records for key in record.keys) for records in packs),
            keys=order,
            num_skips=tuple(map(_num_skips, packs)),
            verdicts=tuple(
                _num_skips(records) > 0 and value_of(records[0].node).device.type != "cuda" for records in packs
            ),
            kept=tuple(site for site, _ in self.kept),
            kept_as=tuple(self.kept_as),
            logs=tuple(self.logs),
            groups=tuple(self.groups),
            checks=tuple(sorted(self.checks, key=lambda check: check.order)),
            clips=tuple(self.clips),
            group_logs=tuple(self.group_logs),
            bounds=tuple(self.bounds),
            states=tuple((key, tensor) for key, (tensor, _) in self.states.items()),
            counts=frozenset(self.numbering.counts),
            noisy=frozenset(self.noisy),
        )


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


def _insert(
    run: Callable[[Sequence[tuple[Tensor, Sequence[str]]]], Tensor],
    graph: fx.Graph,
    records: Sequence[RecordNode],
    before: fx.Node,
) -> tuple[fx.Node, list[fx.Node]]:
    """Insert an operation on the values of records; returns its node, and all new ones."""
    nodes = [record.node for record in records]
    statistics = [record.statistics for record in records]
    traced = make_fx.trace(
        lambda *values: [run(list(zip(values, statistics, strict=True)))], [value_of(n) for n in nodes]
    )
    tag = "is_forward" if records[0].is_forward else "is_backward"
    (result,), new = editing.splice(traced, graph, nodes, before, tag)
    return result, new


def _measure_in_batches(graph: fx.Graph, records: Sequence[RecordNode]) -> tuple[list[RecordNode], list[fx.Node]]:
    """Measure values soon after they are made, while they are in a cache, several by one operation.

    Args:
        graph: The joint graph, changed in place.
        records: The records that are packed together.

    Returns:
        The records, those of the last batch still to be measured; and the new nodes.
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
                figures, added = _insert(measure_all, graph, members, before)
                keys = tuple(key for record in members for key in record.keys)
                done.append(RecordNode(keys, figures, members[0].is_forward, skips))
                new.extend(added)
        batch.clear()

    for record in sorted((r for r in records if r.statistics), key=lambda r: position[r.node]):
        own = _bytes_of(value_of(record.node))
        if batch and size + own > BATCH:
            measure()
            size = 0
        batch.append(record)
        size += own
    writes = bool(graph.find_nodes(op="call_function", target=torch.ops.aten.copy_.default))
    if size > BATCH or (writes and records[0].is_forward):  # which may change at the end what was computed before
        measure()
    return [*done, *batch], new


def _bytes_of(value: Tensor) -> int:
    """Size of a tensor in bytes; that of a batch where it is not known before the graph runs."""
    number = value.numel()
    return number * value.element_size() if isinstance(number, int) else BATCH
