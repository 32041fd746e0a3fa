"""Step records: the reports of one ``loss.backward()``, on its device and on the host."""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field
from itertools import chain
from operator import itemgetter

import torch
from torch import Tensor

from gradrewrite.diagnostics.failures import cause_of
from gradrewrite.diagnostics.run_log import Origin, Step
from gradrewrite.errors import NonFiniteError
from gradrewrite.ir.outputs import BackwardOutputs, ClipRecords, Owner, Pack
from gradrewrite.ir.record_key import RecordKey
from gradrewrite.ir.reports import NormClip, OnFailure, acting_bound
from gradrewrite.monitoring.host_copy import LateRecord, copy_to_host, floats_of, last_float_of, number_of
from gradrewrite.monitoring.wholes import How, Summands
from gradrewrite.replay.step_snapshot import CheckedGraph, StepSnapshot


def verdicts_of(outputs: BackwardOutputs, packs: Sequence[Tensor]) -> list[Tensor]:
    """Return the verdicts on checks that skip, one a pack with such: 0-d float32, 1 if one of them failed, else 0."""
    return [
        (pack[-1] if own.has_verdict else pack[: own.num_skips].amax().clamp(max=1.0)).to(torch.float32)
        for pack, own in zip(packs, outputs.packs, strict=False)
        if own.num_skips
    ]


@dataclass(slots=True)
class GraphRecord:
    """The records of one backward graph; tensors stay on their device until they are copied."""

    outputs: BackwardOutputs  # what the tensors are
    packs: list[Tensor]  # packed records
    snapshot: StepSnapshot | None = None  # inputs of a replay; None where nothing is checked, or they were let go
    on_device: list[Tensor] = field(default_factory=list)  # sources of copies under way, kept alive
    undue: Collection[RecordKey] = ()  # records that nobody reads: their intervals were not due
    # Bounds of clips that the host has, as they were when this was made.
    bounds: dict[RecordKey, float] = field(init=False)

    def __post_init__(self) -> None:
        self.bounds = dict(self.outputs.acting_numbers)
        for key, bound in self.outputs.live_bounds:
            self.bounds[key] = acting_bound(number_of(bound))

    def values(self) -> dict[RecordKey, float]:
        """All records; the packs are on the host."""
        pairs = zip(self.outputs.packs, self.packs, strict=True)
        # A verdict may follow the records.
        return {key: value for own, pack in pairs for key, value in zip(own.keys, _records_in(own, pack), strict=False)}

    def records(self) -> dict[RecordKey, float]:
        """All records and the factors of clips; the packs are on the host."""
        values = self.values()
        known = values | self.bounds if self.outputs.clips else values
        factors = {clip.factor: clip.on_host(known).factor() for clip in self.outputs.clips}
        return {key: value for key, value in (values | factors).items() if key not in self.undue}

    def has_passed(self, mode: OnFailure) -> bool:
        """Whether the packs are in host memory, and no check of this kind failed."""
        return not self.on_device and all([pack.is_cpu for pack in self.packs]) and not self.has_failed(mode)

    def has_failed(self, mode: OnFailure) -> bool:
        """Whether a check of this kind failed; the packs are on the host."""
        of_packs = zip(self.packs, self.outputs.checked.get(mode, ()), self.outputs.packs, strict=False)
        for pack, positions, layout in of_packs:
            if not positions:
                continue
            if mode == "skip" and layout.has_verdict:
                if last_float_of(pack) > 0:  # the verdict on them
                    return True
            elif max(itemgetter(*positions, positions[0])(floats_of(pack))) > 0:
                return True
        return False


def _records_in(layout: Pack, pack: Tensor) -> Sequence[float]:
    values = floats_of(pack)
    return values if layout.positions is None else [values[n] for n in layout.positions]


@dataclass(slots=True, eq=False)
class StepRecord:
    """The records of one ``loss.backward()``."""

    step: int = -1  # number of the backward
    update: int = -1  # number of the update, or, where no optimizer is guarded, of the backward; those of ``gr.State``
    micro_batch: int = 0  # number among the backwards of the update
    is_accumulated: bool = False  # whether updates have several, as far as that is known by then
    update_key: int = -1  # equal for the backwards of one update; each has its own without a guard
    graphs: list[GraphRecord] = field(default_factory=list)  # its graphs, in the order in which their backwards ran
    kept: dict[tuple[str, Owner, str], Tensor] = field(default_factory=dict)
    groups: list[str] = field(default_factory=list)  # groups that were clipped
    host_values: dict[RecordKey, float] = field(default_factory=dict)  # records that the host knows (learning rates)
    # Records that came after the backward, by their keys.
    late: dict[tuple[RecordKey, ...], LateRecord] = field(default_factory=dict)
    # What optimizers reported of their steps since this backward and before the next: one record for each.
    updates: list[StepRecord] = field(default_factory=list)
    # Errors of the step, by the checks that failed in each of its graphs.
    failures: dict[tuple[tuple[RecordKey, ...], ...], NonFiniteError] = field(default_factory=dict)
    failure: NonFiniteError | None = None  # the op behind its non-finite values, where a replay has looked for it
    culprits: str = ""  # who made its update skip, in words; ``""`` where nobody asked
    was_read: bool = False  # whether it has been read
    _has_known_bounds: bool = False  # whether somebody has looked at its bounds for zeros
    _ready: dict[torch.device, torch.cuda.Event] = field(default_factory=dict)
    _copied: list[torch.cuda.Event] | None = None
    _values: dict[RecordKey, float] | None = None

    def add(
        self,
        outputs: BackwardOutputs,
        tensors: Sequence[Tensor],
        snapshot: StepSnapshot | None = None,
        is_due: Callable[[int], bool] = lambda _: True,
    ) -> None:
        """Add the report of a graph: its packs, then its kept tensors.

        ``is_due`` is asked for the intervals of measurements.
        """
        number = len(outputs.packs)
        self.graphs.append(GraphRecord(outputs, list(tensors[:number]), snapshot, undue=outputs.undue(is_due)))
        if outputs.kept:
            kept = zip(outputs.kept_keys(is_due), tensors[number:], strict=True)
            self.kept |= {key: tensor for key, tensor in kept if key is not None}

    def add_late(self, keys: tuple[RecordKey, ...], pack: Tensor) -> None:
        """Add records after the backward; where the copy to the host has begun, that of these begins too."""
        self.late[keys] = LateRecord(keys, pack)
        if self._copied is not None:
            self.late[keys].start_copy()

    def close(self) -> None:
        """Note on each device that the records are complete: who copies them waits for that on the device."""
        for graph in self.graphs:
            for pack in graph.packs:
                if pack.is_cuda and pack.device not in self._ready:
                    self._ready[pack.device] = torch.cuda.Event()
                    self._ready[pack.device].record(torch.cuda.current_stream(pack.device))

    @property
    def _parts(self) -> list[LateRecord | StepRecord]:
        return [*self.late.values(), *self.updates]

    def start_copy(self) -> None:
        """Start the copy of the records to the host; nothing waits."""
        for part in self._parts:
            part.start_copy()
        if self._copied is not None:
            return
        self._copied = []
        for device, ready in self._ready.items():
            torch.cuda.current_stream(device).wait_event(ready)
        for graph in self.graphs:
            graph.on_device, graph.packs = graph.packs, [copy_to_host(pack) for pack in graph.packs]
        for device in self._ready:
            event = torch.cuda.Event()
            event.record(torch.cuda.current_stream(device))
            self._copied.append(event)

    def is_here(self) -> bool:
        """Whether the copy has arrived."""
        if self._copied is None or not all(event.query() for event in self._copied):
            return False
        return all(part.is_here() for part in self._parts)

    def fetch(self) -> None:
        """Wait for the copy, and begin it if need be."""
        self.start_copy()
        assert self._copied is not None
        for event in self._copied:
            event.synchronize()
        for graph in self.graphs:
            graph.on_device = []
        for part in self._parts:
            part.fetch()

    def read(self) -> None:
        """Wait for the copy, for a reader of the records."""
        self.fetch()
        self.was_read = True

    def start_reading(self) -> None:
        """Start the copy, for a later reader of the records."""
        self.start_copy()
        self.was_read = True

    def note_culprits(self, text: str) -> None:
        """Take the culprits of its skipped update, in words."""
        self.culprits = text

    def take_zero_bound(self) -> RecordKey | None:
        """Return ``zero_bound()`` the first time; then None."""
        found = None if self._has_known_bounds else self.zero_bound()
        self._has_known_bounds = True
        return found

    def values(self) -> dict[RecordKey, float]:
        """All records in the order of the sites of the forward; counts of a site that reported several times add up."""
        if self._values is None:
            # Behind a graph break the later graph's backward runs first.
            keys = [key for graph in reversed(self.graphs) for key in graph.outputs.keys]
            known: dict[RecordKey, float] = {}
            for graph in self.graphs:
                for key, value in graph.records().items():
                    adds_up = key in known and key in graph.outputs.counts
                    known[key] = known[key] + value if adds_up else value
            self._values = {key: known[key] for key in keys if key in known}
        updates = {key: value for update in self.updates for key, value in update.values().items()}
        bounds = {key: value for graph in self.graphs for key, value in graph.bounds.items()}
        late = {key: value for added in self.late.values() for key, value in added.values().items()}
        return self._values | updates | bounds | self.host_values | late

    def add_to(self, summands: Summands, how: How | None) -> None:
        """Add the records of the step to those of other parts; each graph is a part of its own. The copy is here."""
        rest = dict(self.values())
        if how is not None:
            summands.add(rest, {}, how)
            return
        for graph in self.graphs:
            records, measured = graph.records(), graph.outputs.measured
            summands.add({key: value for key, value in records.items() if key in measured}, measured, how)
            rest = {key: value for key, value in rest.items() if key not in measured}
        summands.add(rest, {}, how)

    def on_host(self, origin: Origin | None = None) -> Step:
        """Return the records of the step, its clips and its origin; the copy is here."""
        records = {str(key): value for key, value in self.values().items()}
        ops = [own.outputs.ops for own in reversed(self.graphs)]
        own_ops = ops[0] if len(ops) == 1 else tuple(dict.fromkeys(chain(*ops)))
        stacks = tuple(stack for own in reversed(self.graphs) for stack in own.outputs.stacks)
        numbers = self.update, self.micro_batch
        failure = None if self.failure is None else cause_of(self.failure)
        return Step(self.step, records, self.clips(), own_ops, self.culprits, *numbers, origin, stacks, failure)

    def clips(self) -> tuple[ClipRecords, ...]:
        """Return the clips, in the order of ``values``."""
        own = [clip for graph in reversed(self.graphs) for clip in graph.outputs.clips]
        found = [*own, *(clip for update in self.updates for clip in update.clips())]
        return tuple(dict.fromkeys(found)) if len(self.graphs) + len(self.updates) > 1 else tuple(found)

    def zero_bound(self) -> RecordKey | None:
        """The first bound of a clip that made zeros, None without one; the copy to the host must have arrived."""
        values = self.values()
        for graph in self.graphs:
            for clip in graph.outputs.clips:
                if isinstance(clip.report, NormClip) and values[clip.factor] <= 0:
                    return clip.report.bound
            for key, bound in graph.bounds.items():
                if key.record == "limit" and bound <= 0:
                    return key
        return None

    def is_checked(self, modes: Collection[OnFailure]) -> bool:
        """Whether there are checks of one of these kinds, other than those that the host knows to have passed."""
        return any(mode in g.outputs.checked and not g.has_passed(mode) for g in self.graphs for mode in modes)

    def has_failed(self, modes: Collection[OnFailure]) -> bool:
        """Whether a check of one of these kinds failed; the copy is here."""
        return any([graph.has_failed(mode) for graph in self.graphs for mode in modes])

    def has_bad_norms(self) -> bool:
        """Whether a norm of a gradient in host memory is not finite."""
        packs = [pack for graph in self.graphs for pack in graph.packs]
        if not all([pack.is_cpu for pack in packs]) or all([bool(torch.isfinite(pack).all()) for pack in packs]):
            return False
        values = {key: value for graph in self.graphs for key, value in graph.values().items()}
        return any(
            "norm" in key.record and key.site.startswith(("gradient:", "group:")) and not math.isfinite(value)
            for key, value in values.items()
        )

    def checked_graphs(self) -> list[CheckedGraph]:
        """The graphs, for a look at their checks; the copy is here."""
        return [CheckedGraph(graph.outputs, graph.values(), graph.snapshot) for graph in self.graphs]

    def let_go(self) -> None:
        """Let go of the inputs of the step, and of kept tensors."""
        self.kept = {}
        for graph in self.graphs:
            graph.snapshot = None
