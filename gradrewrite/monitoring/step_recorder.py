"""The step recorder: the reports of backward graphs, as records of the last steps."""

from __future__ import annotations

import atexit
import sys
import threading
import weakref
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from functools import partial

from torch import Tensor, distributed

from gradrewrite._compat import autograd
from gradrewrite.ir.outputs import BackwardOutputs
from gradrewrite.ir.record_key import RecordKey
from gradrewrite.monitoring.guards import Guards, let_guards_follow
from gradrewrite.monitoring.messages import StepMessages, raise_failed
from gradrewrite.monitoring.run_links import RunLinks
from gradrewrite.monitoring.step_record import StepRecord, verdicts_of
from gradrewrite.monitoring.writers import Writers
from gradrewrite.policy.sampling import SamplingSettings
from gradrewrite.replay.step_snapshot import StepSnapshot
from gradrewrite.sites import Site

_MAX_OPEN = 1000
_LOSS = RecordKey("loss", 1, "run")


class StepRecorder:
    """The records of the last steps of a training run."""

    def __init__(self, capacity: int, every: int | None = None) -> None:
        self.capacity = capacity  # how many records are kept
        self.lock = threading.RLock()  # held while records, listeners or guards change; reentrant
        self.records: deque[StepRecord] = deque(maxlen=capacity)  # records of the last steps, oldest first
        self.num_steps = 0  # how many steps there were
        self.update_key = 0  # another one for each update of guarded optimizers, or backward without any
        # Told of each step before its record joins the others, for the oldest may leave them then.
        self.writers = Writers(self.records, capacity, every)
        own = weakref.ref(self)  # no cycle: ``__del__`` is to run at once
        self.guards = guards = Guards(self.lock, lambda: 0 if (recorder := own()) is None else recorder.num_steps)
        # Told of each step after that; both with the lock held.
        self.messages = StepMessages(capacity, lambda: any(guard.is_alive for guard in guards))
        self.links = RunLinks()
        self.last_skip: Site | None = None  # of the check that skips of the last graph that has one
        self.sampling = SamplingSettings()
        # Records for the next step, of a backward that records nothing: its update makes the record.
        self._early: dict[tuple[RecordKey, ...], Tensor] = {}
        self._has_begun = False
        self._outer = threading.local()  # ``backward``: the outer one of a recomputed part of the model
        self._outer_backwards: set[int] = set()  # those that run
        self._open: dict[int, StepRecord] = {}  # by backward: one may run inside another, or on another thread
        _to_flush.add(self)

    def note_last_skip(self, site: Site | None) -> None:
        """Take note of the site of a check that skips, unless there is one."""
        self.last_skip = self.last_skip or site

    @property
    def last_update(self) -> int:
        """Number of the last step's update; -1 without a step."""
        return self.records[-1].update if self.records else -1

    def flush(self) -> None:
        """Log, warn and write the waiting steps; waits for the device."""
        with self.lock:
            self.messages.flush()
            self.writers.flush()

    def __del__(self) -> None:
        """Flush where there is a file: the last backward may be over long before the program is."""
        if self.__dict__.get("writers") and self.num_steps and not sys.is_finalizing():
            self.flush()

    def last_used_step(self) -> int:
        """Return the last step that a new guard adds nothing to; -1 if there is none.

        Such are steps of guards that were removed, and a step that updates alone made: no backward recorded anything,
        so nothing tells whether one has followed, and a guard is rarely added between a backward and its last update.
        """
        with self.lock:
            if self.records and not self.records[-1].graphs:
                return self.records[-1].step
            return self.guards.closed

    def note_forward(self) -> None:
        """A forward begins. In a backward a checkpoint computes a part again; a reentrant one for a backward inside."""
        if autograd.backward_id() == -1:
            self._outer.backward = -1
            return
        outer = self._outer.backward = self.step_backward()
        with self.lock:
            if outer not in self._outer_backwards:
                self._outer_backwards.add(outer)
                autograd.at_end_of_backward(partial(self._finish, outer))

    def step_backward(self) -> int:
        """Number of the running backward, of the outermost where one runs inside another; -1 outside of one."""
        task, outer = autograd.backward_id(), getattr(self._outer, "backward", -1)
        is_inside = outer not in (-1, task) and outer in self._outer_backwards and autograd.is_called_by_python()
        return outer if is_inside else task

    def collect(
        self,
        outputs: BackwardOutputs,
        tensors: Sequence[Tensor],
        snapshot: StepSnapshot | None = None,
        parameters: Sequence[weakref.ref[Tensor]] = (),
        is_due: Callable[[int], bool] = lambda _: True,
        update: int = -1,
    ) -> list[str]:
        """Record the report of one backward graph, inside ``backward``.

        ``parameters`` are those whose gradients it computes, ``is_due`` is asked for intervals of measurements,
        ``update`` is the number of the update.
        Returns the groups that an earlier graph of the same backward had clipped already.
        """
        with self.lock:
            task = self.step_backward()
            record = self._open.get(task)
            if record is None:
                record = self._begin(task)
                record.update = update
            again = [group for group in outputs.groups if group in record.groups]
            record.groups += outputs.groups
            record.add(outputs, tensors, snapshot, is_due)
            if "skip" in outputs.checked:
                self._note_verdicts(outputs, tensors, parameters)
            return again

    def collect_whole(
        self,
        outputs: BackwardOutputs,
        tensors: Sequence[Tensor],
        snapshot: StepSnapshot | None,
        parameters: Sequence[weakref.ref[Tensor]],
        is_due: Callable[[int], bool],
        update: int,
        *,
        notes_verdicts: bool,
    ) -> None:
        """Record the report of a graph with forward and backward; NonFiniteError if a check raises.

        ``notes_verdicts``: an update that follows is to know the checks that skip.
        """
        record = StepRecord(update=update, groups=list(outputs.groups))
        record.add(outputs, tensors, snapshot, is_due)
        record.close()
        with self.lock:
            if not self._has_begun:
                self._has_begun = True
                let_guards_follow()
            if "skip" in outputs.checked:
                self.last_skip = next(c.site for c in outputs.checks if c.report.on_failure == "skip")
                if notes_verdicts:
                    self._note_verdicts(outputs, tensors, parameters)
            self._append(record)
            self.messages.on_step(record)
        raise_failed(record)

    def _begin(self, task: int) -> StepRecord:
        if self._open:  # what a backward that failed left behind is of no use: numbers of backwards only grow
            self._open = {known: record for known, record in self._open.items() if known > task - _MAX_OPEN}
        record = self._open[task] = StepRecord()
        if task not in self._outer_backwards:  # else the end of the outer backward is waited for
            autograd.at_end_of_backward(partial(self._finish, task))
        if not self._has_begun:
            self._has_begun = True
            let_guards_follow()
        if self.guards:
            if self.records and self.records[-1].update_key == self.update_key and self.guards.is_cleared():
                self.update_key += 1  # the gradients of the last backward went without an update
            for guard in self.guards.live:
                guard.begin()
        return record

    def _note_verdicts(
        self, outputs: BackwardOutputs, packs: Sequence[Tensor], parameters: Sequence[weakref.ref[Tensor]]
    ) -> None:
        self.last_skip = next(c.site for c in outputs.checks if c.report.on_failure == "skip")
        guards = self.guards.live if self.guards else ()
        if not guards:
            return
        for bad in verdicts_of(outputs, packs):
            for guard in guards:
                guard.note(bad, parameters)

    def collect_update(
        self,
        outputs: BackwardOutputs,
        tensors: Sequence[Tensor],
        previous: int,
        is_due: Callable[[int], bool],
        number: int = -1,
    ) -> int:
        """Record the report of a step graph in the record of the last backward, or else in a record of its own.

        ``previous`` is the step that took the same optimizer's last report, -1 without one, ``number`` that of the
        update. Returns the step that took this one. NonFiniteError if a check that raises failed.
        """
        update = StepRecord()
        update.add(outputs, tensors, is_due=is_due)
        update.close()
        with self.lock:
            if self.records and self.records[-1].step != previous:
                record = self.records[-1]
                record.updates.append(update)
                update.step = record.step
                if outputs.keys:
                    self.writers.note_late(record.step, outputs.keys[0])
            else:
                record = StepRecord(update=number, updates=[update])
                update.step = self.num_steps
                self._append(record)
            update.update = record.update
            record.kept |= update.kept
            update.kept = {}
            if "skip" in outputs.checked:
                self.last_skip = next(c.site for c in outputs.checks if c.report.on_failure == "skip")
            self.messages.on_step(update)
        raise_failed(update)
        return update.step

    def note_update(self, agreeing: distributed.ProcessGroup | None = None) -> None:
        """A guarded optimizer has made a step, or skipped it, with the other ranks of a group.

        Later backwards belong to the next one.
        """
        with self.lock:
            self.update_key += 1
            self.links.note_update(agreeing)

    def keep(self, backward: int, snapshot: StepSnapshot | None) -> None:
        """Keep a graph of a backward; None: it cannot be replayed."""
        with self.lock:
            self.links.keep(backward, snapshot, self.update_key, self.guards.is_cleared)

    def drop_step(self) -> None:
        """Gradients without an update are gone, and so is their step."""
        with self.lock:
            if self.records and self.records[-1].update_key == self.update_key:
                self.update_key += 1  # later backwards are no micro-batches of the same update
        self.links.drop_step()

    def add_host_values(self, values: Mapping[RecordKey, float]) -> None:
        """Add records that the host knows to the last step, if there is one."""
        with self.lock:
            if self.records:
                self.records[-1].host_values |= values

    def add_late(self, keys: tuple[RecordKey, ...], pack: Tensor, *, is_own: bool = False) -> bool:
        """Add records on a device to the last step, in place of those under the same keys; False without a step.

        ``is_own``: nobody asked for them, so a file that lacks them is no matter for a warning.
        """
        with self.lock:
            if not self.records:
                return False
            self.records[-1].add_late(keys, pack)
            if not is_own:
                self.writers.note_late(self.records[-1].step, keys[0])
            return True

    def log(self, key: RecordKey, pack: Tensor) -> bool:
        """Add a record of the user's to the last step, or the next one; False without a step to come.

        It is for the next one where the last step is that of an update alone, and a backward has run since, or it has
        the record already: the backward has recorded nothing, and the next update makes the step.
        """
        with self.lock:
            guards = self.guards.live if self.guards else []
            if key == _LOSS:
                for guard in guards:
                    guard.note_loss(pack)
            last = self.records[-1] if self.records else None
            is_over = any(guard.makes_next_record for guard in guards)
            is_ahead = last is None or (not last.graphs and (is_over or (key,) in last.late))
            if is_ahead and any(guard.may_have_step_actions for guard in guards):
                self._early[key,] = pack
                return True
            return self.add_late((key,), pack)

    def _finish(self, task: int) -> None:
        self._outer_backwards.discard(task)
        with self.lock:
            record = self._open.pop(task, None)
            if record is None:  # of an outer backward without reports
                return
            record.close()
            self._append(record)
            self.messages.on_step(record)
        raise_failed(record)  # without the lock; it leaves the backward

    def _append(self, record: StepRecord) -> None:
        """Let a record join the others; the lock is held."""
        record.step = self.num_steps
        if not self.guards:
            self.update_key += 1
        record.update_key = self.update_key
        last = self.records[-1] if self.records else None
        if record.update < 0:
            record.update = 0 if last is None else last.update + 1
        if last is not None and last.graphs and (last.update_key, last.update) == (record.update_key, record.update):
            record.micro_batch = last.micro_batch + 1
        record.is_accumulated = record.micro_batch > 0 or (last is not None and last.is_accumulated)
        for keys, pack in self._early.items():
            record.add_late(keys, pack)
        self._early.clear()
        if self.records:
            self.records[-1].let_go()
        try:
            self.writers.on_step(record)
        finally:
            self.records.append(record)
            self.num_steps += 1


_to_flush: weakref.WeakSet[StepRecorder] = weakref.WeakSet()


@atexit.register
def _flush_all() -> None:
    """Log, warn and write the remaining steps when the program ends."""
    for recorder in list(_to_flush):
        _to_flush.discard(recorder)
        recorder.flush()
