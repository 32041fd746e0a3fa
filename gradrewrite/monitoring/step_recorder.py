"""The step recorder: takes what backward graphs report, and keeps the records of the last steps."""

from __future__ import annotations

import atexit
import itertools
import sys
import threading
import weakref
from collections import deque
from collections.abc import Mapping, Sequence
from functools import partial
from typing import Protocol

import torch
from torch import Tensor, distributed

from gradrewrite._compat import autograd
from gradrewrite.diagnostics.step_snapshot import StepSnapshot
from gradrewrite.ir.record_key import RecordKey
from gradrewrite.ir.record_layout import BackwardOutputs, Check
from gradrewrite.monitoring.host_copy import LateRecord
from gradrewrite.monitoring.step_record import GraphRecord, StepRecord
from gradrewrite.sites import Site

_MAX_OPEN = 1000


class StepListener(Protocol):
    """Reacts to finished steps."""

    def on_step(self, record: StepRecord) -> None:
        """React to a step whose backward is over; its figures may still be on their device."""
        ...

    def flush(self) -> None:
        """React to what has waited for its figures; waits for the device."""
        ...


class RecordWriter(StepListener, Protocol):
    """Writes records to files."""

    def __bool__(self) -> bool:
        """Whether there is a file."""
        ...

    def note_late(self, step: int, key: RecordKey) -> None:
        """A record was added to a step after its backward."""
        ...


class SkipGuard(Protocol):
    """Watches an optimizer (``gr.guard``)."""

    def begin(self) -> None:
        """A backward begins."""
        ...

    def follow(self) -> None:
        """Be in the lists of the recorders that its models have now."""
        ...

    def note(self, bad: Tensor, parameters: Sequence[weakref.ref[Tensor]]) -> None:
        """Take the verdict of one graph: 0-d float32 on its device, 1 if a check that skips failed."""
        ...

    @property
    def is_alive(self) -> bool:
        """Whether its optimizer is still there."""
        ...

    @property
    def has_step_sites(self) -> bool:
        """Whether it runs the actions at step sites."""
        ...

    @property
    def skipped(self) -> int:
        """Number of updates that were skipped; waits for the device."""
        ...


class StepRecorder:
    """The records of the last steps of a training run.

    Attributes:
        capacity: How many records are kept.
        lock: Held while records, listeners or guards change; reentrant.
        records: The records of the last steps, oldest first.
        num_steps: How many steps there were.
        writer: Told of each step before its record joins the others, for the oldest may leave them then.
        listeners: Told of each step after that; both with the lock held.
        raising: Told last, without the lock; what they raise leaves the backward.
        guards: Guards of optimizers.
        num_guards: How many were added since there was none; numbers the groups of step sites.
        closed: Number of the last step that belongs to guards which were removed; -1 if there is none.
        last_skip: The check that skips of the last graph that has one.
        lone_skip: Site of a check that skips and may fail on one rank of several that have equal parameters; None if
            there is none.
        process_group: The group of the data parallelism that the model was last called in, or that averages its
            gradients.
    """

    def __init__(self, capacity: int) -> None:
        self.capacity = capacity
        self.lock = threading.RLock()
        self.records: deque[StepRecord] = deque()
        self.num_steps = 0
        self.writer: RecordWriter | None = None
        self.listeners: list[StepListener] = []
        self.raising: list[StepListener] = []
        self.guards: list[SkipGuard] = []
        self.num_guards = 0
        self.closed = -1
        self.last_skip: Check | None = None
        self.lone_skip: Site | None = None
        self.process_group: distributed.ProcessGroup | None = None
        self._num_groups = 0
        self._has_begun = False
        self._open: dict[int, StepRecord] = {}  # by backward: one may run inside another, or on another thread
        _to_flush.add(self)

    def flush(self) -> None:
        """Log, warn and write what has waited for its figures; waits for the device."""
        with self.lock:
            for listener in self.listeners:
                listener.flush()
            if self.writer is not None:
                self.writer.flush()

    def __del__(self) -> None:
        """Flush where there is a file: the last backward may be over long before the program is."""
        if self.__dict__.get("writer") and self.num_steps and not sys.is_finalizing():
            self.flush()

    @property
    def live_guards(self) -> list[SkipGuard]:
        """The guards whose optimizer is still there."""
        with self.lock:
            if not self.guards:
                let_guards_follow()
            return [guard for guard in self.guards if guard.is_alive]

    def add_guard(self, guard: SkipGuard, num_groups: int) -> int:
        """Add a guard, which is told of every check that skips; return the number of its first group of parameters."""
        with self.lock:
            self.guards.append(guard)
            if all(known is not guard for known in _guards.values()):
                _guards[next(_numbers)] = guard
            self.num_guards += 1
            self._num_groups += num_groups
            return self._num_groups - num_groups

    def last_used_step(self) -> int:
        """Return the number of the last step that a guard which is added now adds nothing to; -1 if there is none.

        Such are steps of guards that were removed, and a step that updates alone made: no backward recorded anything,
        so nothing tells whether one has followed, and a guard is rarely added between a backward and its last update.
        """
        with self.lock:
            if self.records and not self.records[-1].graphs:
                return self.records[-1].step
            return self.closed

    def remove_guard(self, guard: SkipGuard) -> None:
        """Remove a guard; what guards report that are added later begins a record of its own."""
        with self.lock:
            self.guards.remove(guard)
            self.closed = self.num_steps - 1
            if not self.guards:
                self.num_guards = self._num_groups = 0

    def collect(
        self,
        outputs: BackwardOutputs,
        tensors: Sequence[Tensor],
        snapshot: StepSnapshot | None = None,
        parameters: Sequence[weakref.ref[Tensor]] = (),
    ) -> list[str]:
        """Take what one backward graph reported; called inside ``backward``.

        Args:
            outputs: What the tensors are.
            tensors: The packed records, then what is kept.
            snapshot: What a replay needs, where something is checked.
            parameters: Those whose gradients the graph computes.

        Returns:
            The groups that an earlier graph of the same backward had clipped already.
        """
        with self.lock:
            task = autograd.backward_id()
            record = self._open.get(task)
            if record is None:
                record = self._begin(task)
            again = [group for group in outputs.groups if group in record.groups]
            record.groups += outputs.groups
            number = len(outputs.packs)
            record.graphs.append(GraphRecord(outputs, list(tensors[:number]), snapshot))
            if outputs.kept:
                record.kept.update(zip(outputs.kept_keys, tensors[number:], strict=True))
            if any(outputs.num_skips):
                self._note_verdicts(outputs, tensors, parameters)
            return again

    def _begin(self, task: int) -> StepRecord:
        """Open the record of a backward."""
        if self._open:  # what a backward that failed left behind is of no use: numbers of backwards only grow
            self._open = {known: record for known, record in self._open.items() if known > task - _MAX_OPEN}
        record = self._open[task] = StepRecord()
        autograd.at_end_of_backward(partial(self._finish, task))
        if not self._has_begun:
            self._has_begun = True
            let_guards_follow()
        if self.guards:
            for guard in self.live_guards:
                guard.begin()
        return record

    def _note_verdicts(
        self, outputs: BackwardOutputs, packs: Sequence[Tensor], parameters: Sequence[weakref.ref[Tensor]]
    ) -> None:
        """Tell the guards whether a check that skips failed."""
        self.last_skip = next(c for c in outputs.checks if c.on_failure == "skip")
        guards = self.live_guards if self.guards else ()
        if not guards:
            return
        for pack, count, has_verdict in zip(packs, outputs.num_skips, outputs.verdicts, strict=False):
            if count:
                bad = (pack[-1] if has_verdict else pack[:count].amax().clamp(max=1.0)).to(torch.float32)
                for guard in guards:
                    guard.note(bad, parameters)

    def collect_update(self, outputs: BackwardOutputs, tensors: Sequence[Tensor], previous: int) -> int:
        """Take what a step graph reported: into the record of the last backward, else into a record of its own.

        Args:
            outputs: What the tensors are.
            tensors: The packed records, then what is kept.
            previous: Number of the step that took what the same optimizer reported last; -1 if there is none.

        Returns:
            Number of the step that took it.

        Raises:
            NonFiniteError: A check that raises failed.
        """
        update = StepRecord()
        number = len(outputs.packs)
        update.graphs.append(GraphRecord(outputs, list(tensors[:number])))
        update.close()
        kept = dict(zip(outputs.kept_keys, tensors[number:], strict=True))
        with self.lock:
            if self.records and self.records[-1].step != previous:
                record = self.records[-1]
                record.updates.append(update)
                update.step = record.step
                if self.writer is not None and outputs.keys:
                    self.writer.note_late(record.step, outputs.keys[0])
            else:
                record = StepRecord(updates=[update])
                update.step = self.num_steps
                self._append(record)
            record.kept.update(kept)
            if any(outputs.num_skips):
                self.last_skip = next(c for c in outputs.checks if c.on_failure == "skip")
            for listener in self.listeners:
                listener.on_step(update)
        for listener in self.raising:
            listener.on_step(update)
        return update.step

    def add_host_values(self, values: Mapping[RecordKey, float]) -> None:
        """Add records that the host knows to the last step, if there is one."""
        with self.lock:
            if self.records:
                self.records[-1].host_values |= values

    def add_late(self, keys: tuple[RecordKey, ...], pack: Tensor, *, is_own: bool = False) -> bool:
        """Add records on a device to the last step, in place of those that were added under the same keys.

        Args:
            keys: Their keys.
            pack: Their values, flat float32 or float64; nobody changes it later.
            is_own: Whether nobody asked for them: a file that lacks them is then no matter for a warning.

        Returns:
            Whether there is a step.
        """
        with self.lock:
            if not self.records:
                return False
            self.records[-1].late[keys] = LateRecord(keys, pack)
            if self.writer is not None and not is_own:
                self.writer.note_late(self.records[-1].step, keys[0])
            return True

    def _finish(self, task: int) -> None:
        with self.lock:
            record = self._open.pop(task)
            record.close()
            self._append(record)
            for listener in self.listeners:
                listener.on_step(record)
        for listener in self.raising:
            listener.on_step(record)

    def _append(self, record: StepRecord) -> None:
        """Let a record join the others; the lock is held."""
        record.step = self.num_steps
        if self.records:
            self.records[-1].drop_snapshots()
            self.records[-1].kept = {}
        try:
            if self.writer is not None:
                self.writer.on_step(record)
        finally:
            if len(self.records) == self.capacity:
                self.records.popleft()
            self.records.append(record)
            self.num_steps += 1


_guards: weakref.WeakValueDictionary[int, SkipGuard] = weakref.WeakValueDictionary()  # by number, in order
_numbers = itertools.count()


def let_guards_follow() -> None:
    """Let all guards follow models that have another monitor now, in the order in which the guards were made."""
    for guard in list(_guards.values()):
        guard.follow()


_to_flush: weakref.WeakSet[StepRecorder] = weakref.WeakSet()


@atexit.register
def _flush_all() -> None:
    """Log, warn and write what is left when the program ends."""
    for recorder in list(_to_flush):
        _to_flush.discard(recorder)
        recorder.flush()
