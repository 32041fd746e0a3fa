"""The monitor: what rewritten backwards reported, read by the host only when it is asked."""

from __future__ import annotations

import atexit
import math
import os
import sys
import threading
import weakref
from collections import deque
from collections.abc import Sequence
from typing import Any, get_args

import torch
from torch import Tensor

from gradrewrite._compat import autograd
from gradrewrite._formatting import Table, nearest, table_of
from gradrewrite._warnings import warn
from gradrewrite.diagnostics.doctor import diagnose
from gradrewrite.diagnostics.root_cause import find_anywhere, find_failure
from gradrewrite.diagnostics.run_log import Finding, Step
from gradrewrite.diagnostics.step_snapshot import Witness
from gradrewrite.errors import NonFiniteError
from gradrewrite.ir.record_layout import Carried, Check, OnFailure
from gradrewrite.monitoring.guards import Guard, Guards
from gradrewrite.monitoring.host_copy import Added, pack_of
from gradrewrite.monitoring.log_lines import Voice
from gradrewrite.monitoring.step_record import Row, Run
from gradrewrite.monitoring.writers import JsonLines, Outlets, TensorBoard
from gradrewrite.sites import Site

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
        self._outlets = Outlets()
        self._guards = Guards()
        self._last_skip: Check | None = None

    @property
    def dropped(self) -> int:
        """How many rows left the buffer before the host had read them."""
        return self._num_dropped

    @property
    def skipped(self) -> int:
        """How many updates ``gr.guard`` has skipped; waits for the device."""
        with self._lock:
            return self._guards.skipped

    @property
    def is_guarded(self) -> bool:
        """Whether ``gr.guard`` has given it an optimizer that is still there."""
        with self._lock:
            return bool(self._guards.alive)

    def latest(self) -> dict[str, float]:
        """Records of the last backward by address ``record@site``; ``{}`` when nothing was recorded.

        Waits for the device. Values are float32 (float64 if a source was), NaN and infinities as they were.
        """
        rows = self._values(last=1)
        return rows[-1] if rows else {}

    def history(self, address: str) -> list[float]:
        """One record over the rows in the buffer, oldest first; NaN where a row lacks it. Waits for the device.

        Raises:
            KeyError: There are rows, and none has that record.
        """
        rows = self._values()
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
        rows = self._values()
        parts = [f"{len(rows)} of {self._num_rows} steps"]
        if self._num_dropped:
            parts.append(f"{self._num_dropped} were dropped unread (capacity {self.capacity})")
        if self._guards:
            parts.append(f"{self.skipped} updates skipped")
        return table_of(rows, ", ".join(parts))

    def diagnose(self) -> tuple[Finding, ...]:
        """Plain answers from the rows in the buffer, the gravest first; ``()`` if nothing is found."""
        return diagnose(self.steps())

    def steps(self) -> list[Step]:
        """The rows in the buffer, oldest first, with the bounds of clips. Waits for the device."""
        with self._lock:
            return [Step(row.step, row.values()) for row in self._read()]

    def log(self, name: str, value: float | Tensor) -> None:
        """Add a scalar of your own, such as the loss, to the row of the last backward; nothing waits for the device.

        Its address is ``name@run``. Logged again before the next backward is over, the last value stands. NaN and
        infinities are kept as they are. What is logged after ``flush`` or ``to_jsonl`` has written the row is in
        the monitor and not in the file; a warning says so once.

        Args:
            name: Any text without ``@``.
            value: A real number, or a real tensor with one element on any device: detached, and copied at once
                (float64 if it is that or no floating point, else float32).

        Raises:
            RuntimeError: No backward has been recorded yet.
            TypeError: ``name`` is no string, or ``value`` no real number.
            ValueError: ``name`` is empty or has an ``@``, or ``value`` has not exactly one element.

        Example:
            >>> import gradrewrite as gr
            >>> from gradrewrite.passes import Observe
            >>> model = gr.transform(torch.nn.Linear(2, 1), gr.on("gradient:*", Observe("norm")))
            >>> loss = model(torch.ones(1, 2)).square().sum()
            >>> loss.backward()
            >>> model.monitor.log("loss", loss)
            >>> model.monitor.latest()["loss@run"] == loss.item()
            True
        """
        if not self.add_pack((f"{name}@run",), pack_of(name, value)):
            raise RuntimeError(
                f"monitor.log({name!r}, ...) adds to the last backward, and none has been recorded yet: call it after "
                "loss.backward(), with a policy that records something (Observe, CheckFinite, a clip by norm)"
            )

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
            self._outlets.attach(self._outlets.find(os.path.abspath(path)) or JsonLines(path), self._read())

    def to_tensorboard(self, writer: Any) -> None:
        """Write the rows with a ``SummaryWriter``, tag ``record/site``, and the later ones as ``to_jsonl`` does.

        Raises:
            TypeError: ``writer`` has no ``add_scalar``.
        """
        if not callable(getattr(writer, "add_scalar", None)):
            raise TypeError(f"Monitor.to_tensorboard takes a SummaryWriter, got {type(writer).__name__}")
        with self._lock:
            self._outlets.attach(self._outlets.find(id(writer)) or TensorBoard(writer), self._read())

    def flush(self) -> None:
        """Write the rows that are still missing to the files that are attached. Waits for the device."""
        with self._lock:
            self._outlets.write(self._read())

    def __del__(self) -> None:
        """Write what is left: its model may be deleted long before the program ends."""
        if self.__dict__.get("_outlets") and self._num_rows and not sys.is_finalizing():
            self.flush()

    def watch(self, guard: Guard, num_groups: int) -> int:
        """Tell a guard of every check that skips (called by ``gr.guard``); returns the number of its first group."""
        with self._lock:
            return self._guards.add(guard, num_groups)

    def add(self, figures: dict[str, float]) -> None:
        """Add figures to the last row (called by ``gr.guard``)."""
        with self._lock:
            if self._rows:
                self._rows[-1].extra |= figures

    def add_pack(self, names: tuple[str, ...], pack: Tensor, *, is_own: bool = False) -> bool:
        """Add figures on a device to the last row; in place of those that were added under the same names.

        Args:
            names: Their addresses.
            pack: Their values, flat float32 or float64; nobody changes it later.
            is_own: Whether nobody asked for them: a file that lacks them is then no matter for a warning.

        Returns:
            Whether there is a row.
        """
        with self._lock:
            if not self._rows:
                return False
            self._rows[-1].added[names] = Added(names, pack)
            if not is_own:
                self._outlets.note_late(self._rows[-1].step, names[0])
            return True

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
            task = autograd.backward_id()
            if task not in self._open:
                # What a backward that failed left behind is of no use: numbers of backwards only grow.
                self._open = {known: row for known, row in self._open.items() if known > task - _MAX_OPEN}
                self._open[task] = Row()
                autograd.at_end_of_backward(lambda: self._close(task))
                for guard in self._guards.alive:
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
                    for guard in self._guards.alive:
                        guard.note(bad, parameters)
            return again

    def _close(self, task: int) -> None:
        with self._lock:
            row = self._open.pop(task)
            row.step = self._num_rows
            if self._rows:
                self._rows[-1].forget_witnesses()
                self._rows[-1].kept = {}
            try:
                every = self.every or (min(100, max(1, self.capacity // 2)) if self._outlets else None)
                if every is not None and self._rows:
                    self._outlets.write_due(self._rows, is_due=self._num_rows % every == 0)
            finally:
                self._append(row)
            self._voice.warn(self.capacity)  # of the steps before
            self._voice.add(row, is_guarded=bool(self._guards.alive))
            self._voice.log(self.capacity)
        if row.has(lambda carried: any(c.on_failure == "raise" for c in carried.checks)):
            row.fetch()
            error = find_failure(row.step, row.checked_runs(), ("raise",), replays=True)
            if error is not None:
                raise error

    def _append(self, row: Row) -> None:
        if not self._num_rows:
            _to_flush.add(self)
        row.close()
        if len(self._rows) == self.capacity:
            lost = self._rows.popleft()
            if lost.step >= self._outlets.num_written if self._outlets else not lost.was_read:
                self._num_dropped += 1
                if self._num_dropped == 1 and self._outlets:
                    warn(f"the monitor's buffer ({self.capacity} rows) was full before its rows were written")
        self._rows.append(row)
        self._num_rows += 1

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

    def _values(self, last: int | None = None) -> list[dict[str, float]]:
        """Their records; under the lock, for the last row may still grow."""
        with self._lock:
            return [row.values() for row in self._read(last)]


_to_flush: weakref.WeakSet[Monitor] = weakref.WeakSet()


@atexit.register
def _flush() -> None:
    """Write and say what is left when the program ends."""
    for monitor in list(_to_flush):
        _to_flush.discard(monitor)
        monitor.flush()
