"""The monitor: what rewritten backwards reported, read by the host only when it is asked."""

from __future__ import annotations

import atexit
import itertools
import math
import os
import threading
import weakref
from collections import deque
from collections.abc import Sequence
from typing import Any, get_args

import torch
from torch import Tensor

from gradrewrite import _torch
from gradrewrite.doctor import diagnose
from gradrewrite.errors import NonFiniteError
from gradrewrite.failure import find_anywhere, find_failure
from gradrewrite.guards import Guard
from gradrewrite.history import Finding, Step
from gradrewrite.records import Carried, Check, OnFailure
from gradrewrite.rows import Row, Run
from gradrewrite.sinks import JsonLines, Sink, TensorBoard
from gradrewrite.sites import Site
from gradrewrite.suggest import nearest
from gradrewrite.table import Table, table_of
from gradrewrite.voice import Voice, warn
from gradrewrite.witness import Witness

_MAX_OPEN = 1000


class Monitor:
    """What the backwards of a rewritten model reported.

    A row is one ``loss.backward()``, however many graphs ran in it. Where a site ran several times in one backward
    (the model was called twice), counts of elements add up and of all else the last report stands. The last
    ``capacity`` rows stay on their device; nothing waits for the device before the host asks, or the interval is over.
    Reading is safe from any thread.

    Attributes:
        capacity: How many rows are kept.
        every: After how many rows they are copied to the host, without waiting, and written to files; None: only when
            something is read.
    """

    def __init__(self, capacity: int = 1000, *, every: int | None = None) -> None:
        """Begin empty.

        Raises:
            ValueError: ``capacity`` or ``every`` is not a whole number >= 1, or ``every`` exceeds ``capacity``.
        """
        for name, value in (("capacity", capacity), ("every", every)):
            if value is not None and (isinstance(value, bool) or not isinstance(value, int) or value < 1):
                raise ValueError(f"Monitor: {name} is a whole number >= 1, got {value!r}")
        if every is not None and every > capacity:
            raise ValueError(f"Monitor: every={every} rows would not fit into capacity={capacity}")
        self.capacity = capacity
        self.every = every
        self._lock = threading.RLock()
        self._open: dict[int, Row] = {}  # by backward: one may run inside another, or on another thread
        self._rows: deque[Row] = deque()
        self._num_rows = 0
        self._num_dropped = 0
        self._voice = Voice()
        self._sinks: list[Sink] = []
        self._next: dict[object, int] = {}  # by the key of a sink: the first step that it has not had
        self._guards: list[Guard] = []
        self._num_groups = 0
        self._last_skip: Check | None = None

    @property
    def dropped(self) -> int:
        """How many rows left the buffer before the host had read them."""
        return self._num_dropped

    @property
    def skipped(self) -> int:
        """How many updates ``gr.guard`` has skipped; waits for the device."""
        with self._lock:
            return sum(guard.skipped for guard in self._guards)

    def latest(self) -> dict[str, float]:
        """Records of the last backward by address ``record@site``; ``{}`` when nothing was recorded.

        Waits for the device. Values are float32 (float64 if a source was), NaN and infinities as they were.
        """
        rows = self._read(last=1)
        return dict(rows[-1].values()) if rows else {}

    def history(self, address: str) -> list[float]:
        """One record over the rows in the buffer, oldest first; NaN where a row lacks it. Waits for the device.

        Raises:
            KeyError: There are rows, and none has that record.
        """
        rows = [row.values() for row in self._read()]
        if rows and not any(address in row for row in rows):
            known = list(dict.fromkeys(name for row in rows for name in row))
            raise KeyError(f"no record {address!r}; nearest: {', '.join(nearest(address, known)) or 'there are none'}")
        return [row.get(address, math.nan) for row in rows]

    def kept(self) -> dict[Site, Tensor]:
        """Tensors that ``Keep`` kept in the last backward, on their device, with their dtype; copies."""
        with self._lock:
            self._voice.log()
            self._voice.warn()
            return dict(self._rows[-1].kept) if self._rows else {}

    def table(self) -> Table:
        """All records over the rows in the buffer; ``print`` shows it. Waits for the device."""
        rows = self._read()
        parts = [f"{len(rows)} of {self._num_rows} steps"]
        if self._num_dropped:
            parts.append(f"{self._num_dropped} were dropped unread (capacity {self.capacity})")
        if self._guards:
            parts.append(f"{self.skipped} updates skipped")
        return table_of([row.values() for row in rows], ", ".join(parts))

    def diagnose(self) -> tuple[Finding, ...]:
        """Plain answers from the rows in the buffer, the gravest first; ``()`` if nothing is found."""
        return diagnose([Step(row.step, row.values() | row.bounds()) for row in self._read()])

    def to_jsonl(self, path: str | os.PathLike[str]) -> None:
        """Append the rows to a file, one JSON object a line, and the later ones as they come.

        Later rows are written every ``every`` rows (100 if None, at most half of ``capacity``), by ``flush``, and when
        the program ends. Non-finite numbers are the strings ``"NaN"``, ``"Infinity"`` and
        ``"-Infinity"``. If a later row cannot be written (a full disk), a warning says so and training goes on
        without the file.

        Raises:
            OSError: The file cannot be written now.
        """
        with self._lock:
            known = next((s for s in self._sinks if s.key == os.path.abspath(path)), None)
            self._attach(known or JsonLines(path))

    def to_tensorboard(self, writer: Any) -> None:
        """Write the rows with a ``SummaryWriter``, tag ``record/site``, and the later ones as ``to_jsonl`` does.

        Raises:
            TypeError: ``writer`` has no ``add_scalar``.
        """
        if not callable(getattr(writer, "add_scalar", None)):
            raise TypeError(f"Monitor.to_tensorboard takes a SummaryWriter, got {type(writer).__name__}")
        with self._lock:
            known = next((s for s in self._sinks if s.key == id(writer)), None)
            self._attach(known or TensorBoard(writer))

    def flush(self) -> None:
        """Write the rows that are still missing to the files that are attached. Waits for the device."""
        with self._lock:
            self._write(self._read())

    def watch(self, guard: Guard, num_groups: int) -> int:
        """Tell a guard of every check that skips (called by ``gr.guard``); returns the number of its first group."""
        with self._lock:
            self._guards.append(guard)
            self._num_groups += num_groups
            return self._num_groups - num_groups

    def add(self, figures: dict[str, float]) -> None:
        """Add figures to the last row (called by ``gr.guard``)."""
        with self._lock:
            if self._rows:
                self._rows[-1].extra = self._rows[-1].extra | figures  # another thread may be reading the old one

    def failure(self, *, anywhere: bool = False) -> NonFiniteError | None:
        """What failed in the last row, as an error; None if nothing did. Waits for the device.

        The step is replayed op by op if it still can be: until the next backward, and until its inputs or the
        parameters are changed.

        Args:
            anywhere: Take all that leaves the model for checked, not only where checks stand.
        """
        with self._lock:
            if not self._rows:
                return None
            row = self._rows[-1]
            row.fetch()
            if anywhere:
                return find_anywhere(row.step, row.checked_runs())
            return find_failure(row.step, row.checked_runs(), get_args(OnFailure), replays=True)

    def last_skip(self) -> NonFiniteError:
        """The failure for which the last update was skipped; its step may be over, if later micro-batches passed."""
        with self._lock:
            for row in reversed(self._rows):
                row.fetch()
                error = find_failure(row.step, row.checked_runs(), ("skip",), replays=True)
                if error is not None:
                    return error
            assert self._last_skip is not None
            note = f"the row that says where is not in the buffer (capacity {self.capacity}); this is the first check"
            return NonFiniteError(self._last_skip.site, step=self._num_rows - 1, note=note)

    def collect(
        self,
        carried: Carried,
        tensors: Sequence[Tensor],
        witness: Witness | None = None,
        parameters: Sequence[weakref.ref[Tensor]] = (),
    ) -> list[str]:
        """Take what one backward graph reported (called by the run time, inside ``backward``).

        Args:
            carried: What the tensors are.
            tensors: The packed records, then what is kept.
            witness: What a replay needs, where something is checked.
            parameters: Those whose gradients the graph computes.

        Returns:
            The groups that an earlier graph of the same backward had clipped already.
        """
        with self._lock:
            task = _torch.backward_id()
            if task not in self._open:
                # What a backward that failed left behind is of no use: numbers of backwards only grow.
                self._open = {known: row for known, row in self._open.items() if known > task - _MAX_OPEN}
                self._open[task] = Row()
                _torch.at_end_of_backward(lambda: self._close(task))
                for guard in self._alive():
                    guard.begin()
            row = self._open[task]
            again = [group for group in carried.groups if group in row.groups]
            row.groups += carried.groups
            row.runs.append(Run(carried, list(tensors[: len(carried.packs)]), witness))
            row.kept.update(zip(carried.kept, tensors[len(carried.packs) :], strict=True))
            for pack, count in zip(row.runs[-1].packs, carried.num_skips, strict=True):
                if count:
                    bad = (pack[:count].amax() > 0).to(torch.float32)
                    self._last_skip = next(c for c in carried.checks if c.on_failure == "skip")
                    for guard in self._alive():
                        guard.note(bad, parameters)
            return again

    def _alive(self) -> list[Guard]:
        return [guard for guard in self._guards if guard.is_alive]

    def _close(self, task: int) -> None:
        with self._lock:
            row = self._open.pop(task)
            row.step = self._num_rows
            if self._rows:
                self._rows[-1].forget_witnesses()
                self._rows[-1].kept = {}
            try:
                self._write_if_due()
            finally:
                self._append(row)
            self._voice.warn(self.capacity)  # of the steps before
            self._voice.add(row, is_guarded=bool(self._alive()))
            self._voice.log(self.capacity)
        if row.has(lambda carried: any(c.on_failure == "raise" for c in carried.checks)):
            row.fetch()
            error = find_failure(row.step, row.checked_runs(), ("raise",), replays=True)
            if error is not None:
                raise error

    def _append(self, row: Row) -> None:
        if not self._num_rows:
            atexit.register(_flush, weakref.ref(self))
        row.close()
        if len(self._rows) == self.capacity:
            lost = self._rows.popleft()
            if lost.step >= self._num_written() if self._sinks else not lost.was_read:
                self._num_dropped += 1
                if self._num_dropped == 1 and self._sinks:
                    warn(f"the monitor's buffer ({self.capacity} rows) was full before its rows were written")
        self._rows.append(row)
        self._num_rows += 1

    def _num_written(self) -> int:
        """How many rows all files have."""
        return min((self._next.get(sink.key, 0) for sink in self._sinks), default=0)

    def _write_if_due(self) -> None:
        """Write what has arrived, and begin to copy what is due; the last row may still grow."""
        every = self.every or (min(100, max(1, self.capacity // 2)) if self._sinks else None)
        if every is None or not self._rows:
            return
        waiting = list(itertools.islice(self._rows, max(0, self._num_written() - self._rows[0].step), None))
        if self._num_rows % every == 0:
            for row in waiting:
                row.start_copy()
                row.was_read = True
        self._write(list(itertools.takewhile(Row.is_here, waiting)))

    def _read(self, last: int | None = None) -> list[Row]:
        """The rows of the buffer, on the host."""
        with self._lock:
            self._voice.log()
            self._voice.warn()
            rows = list(self._rows)[-last:] if last is not None else list(self._rows)
            for row in rows:
                row.fetch()
                row.was_read = True
            return rows

    def _attach(self, sink: Sink) -> None:
        if all(known is not sink for known in self._sinks):
            self._sinks.append(sink)
        self._write(self._read(), raises=True)

    def _write(self, rows: Sequence[Row], *, raises: bool = False) -> None:
        """Give each sink the rows that it has not had."""
        for sink in list(self._sinks):
            try:
                for row in rows:
                    if row.step >= self._next.get(sink.key, 0):
                        sink.write(row.step, row.values() | row.bounds())
                        self._next[sink.key] = row.step + 1
            except Exception as err:  # a writer's failure must not end training
                self._sinks.remove(sink)
                reason = getattr(err, "strerror", None) or f"{type(err).__name__}: {err}"
                step = self._next.get(sink.key, 0)
                text = f"{sink}: step {step} could not be written ({reason}); records are no longer written there"
                if raises and isinstance(err, OSError):
                    raise OSError(err.errno, text) from err
                if raises:
                    raise
                warn(f"{text}. Mend that and attach it again: rows still in the buffer are written then")


def _flush(ref: weakref.ref[Monitor]) -> None:
    """Write and say what is left when the program ends."""
    monitor = ref()
    if monitor is not None:
        monitor.flush()
