"""The monitor: records of rewritten backwards, read by the host on demand."""

from __future__ import annotations

import math
import os
from collections.abc import Sequence
from typing import Any, Literal, get_args

from torch import Tensor, distributed

from gradrewrite._utils.formatting import Table, nearest, table_of
from gradrewrite._utils.warnings import warn
from gradrewrite.diagnostics.health import examine
from gradrewrite.diagnostics.run_log import Finding, Step
from gradrewrite.distributed.figures import combine_over_ranks
from gradrewrite.errors import NonFiniteError
from gradrewrite.ir.record_key import RecordKey
from gradrewrite.ir.reports import OnFailure
from gradrewrite.monitoring.host_copy import pack_of
from gradrewrite.monitoring.messages import failure_of
from gradrewrite.monitoring.step_record import StepRecord
from gradrewrite.monitoring.step_recorder import StepRecorder
from gradrewrite.monitoring.writers import JsonLines, TensorBoard, path_of_rank
from gradrewrite.policy.numbers import python_number
from gradrewrite.replay.root_cause import find_anywhere
from gradrewrite.sites import Site


class _Records(dict[str, float]):
    """Records by address; a missing one is an error that names the nearest."""

    def __missing__(self, address: str) -> float:
        raise _no_record(address, list(self))


def _no_record(address: str, known: Sequence[str]) -> KeyError:
    names = nearest(address, list(dict.fromkeys(known)))
    return KeyError(f"no record {address!r}; nearest: {', '.join(names) or 'there are none'}")


class Monitor:
    """The records of a rewritten model's backward passes.

    A step is one ``loss.backward()``, however many graphs ran in it. Where a site ran several times in one backward
    (the model was called twice), counts of elements add up and of all else the last value is kept. The last
    ``capacity`` steps stay on their device; nothing waits for the device before the host asks, or the interval is over.
    Reading is safe from any thread.

    Attributes:
        capacity: How many steps are kept.
        every: After how many steps they are copied to the host, without waiting, and written to files; None: only when
            something is read.
    """

    def __init__(self, capacity: int = 1000, *, every: int | None = None) -> None:
        """Create a monitor without records.

        Raises:
            ValueError: ``capacity`` or ``every`` is not a whole number >= 1, or ``every`` exceeds ``capacity``.
        """
        capacity, every = python_number(capacity), python_number(every)
        for name, value in (("capacity", capacity), ("every", every)):
            if value is not None and (isinstance(value, bool) or not isinstance(value, int) or value < 1):
                raise ValueError(f"Monitor: {name} is a whole number >= 1, got {value!r}")
        if every is not None and every > capacity:
            raise ValueError(f"Monitor: every={every} steps would not fit into capacity={capacity}")
        self.capacity = capacity
        self.every = every
        self._recorder = StepRecorder(capacity, every)
        self._lock = self._recorder.lock
        self._warned_of_bound = False

    def __repr__(self) -> str:
        return f"Monitor(capacity={self.capacity}, every={self.every}): {self._recorder.num_steps} steps"

    def _repr_html_(self) -> str:
        return self.table()._repr_html_()

    @property
    def dropped(self) -> int:
        """Number of steps that left the buffer before the host had read them."""
        return self._recorder.writers.num_dropped

    @property
    def skipped(self) -> int:
        """Number of updates that ``gr.guard`` has skipped; waits for the device."""
        with self._lock:
            recorder = self._recorder
            counts = [*recorder.num_skipped, *(guard.num_skipped for guard in recorder.guards)]
            return sum(int(count) for count in counts if count is not None)

    @property
    def is_guarded(self) -> bool:
        """Return whether ``gr.guard`` has given it an optimizer that still exists."""
        return bool(self._recorder.live_guards)

    def latest(self) -> dict[str, float]:
        """Records of the last backward by address ``record@site``; ``{}`` when nothing was recorded.

        Waits for the device. Values are float32 (float64 if a source was), NaN and infinities as they were.
        """
        rows = self._steps(last=1)
        return _Records(rows[-1].records if rows else {})

    def __deepcopy__(self, memo: dict[int, Any]) -> Monitor:
        """Return the monitor itself.

        Code that is compiled with copied arguments, as by Lightning, reports to the monitor that was given.
        """
        return self

    def reduce(
        self, how: Literal["mean", "max", "sum"] = "mean", process_group: distributed.ProcessGroup | None = None
    ) -> dict[str, float]:
        """Return the records of the last backward, combined over ranks; ``{}`` where no rank has any.

        A collective call: all ranks of the group make it, at the same point of the program. Waits for the device. A
        record that some ranks lack is combined over those that have it. NaN on one rank makes the result NaN, for
        ``"max"`` too; infinities are combined as numbers are. Records that are global already (those of sharded
        gradients at step sites, ``skipped@optimizer``) are equal on all ranks, and so is their mean.

        Args:
            how: ``"mean"``, ``"max"`` or ``"sum"``.
            process_group: The ranks. By default those of the DistributedDataParallel in which the model was called,
                or of the largest group of ``AllReduce``, else all; without any, the result is that of ``latest``.

        Raises:
            ValueError: ``how`` is none of the three.
        """
        if how not in ("mean", "max", "sum"):
            raise ValueError(f'Monitor.reduce: how is "mean", "max" or "sum", got {how!r}')
        return combine_over_ranks(self.latest(), how, process_group or self._recorder.process_group)

    def history(self, address: str) -> list[float]:
        """One record over the steps in the buffer, oldest first; NaN where a step lacks it. Waits for the device.

        Raises:
            KeyError: There are steps, and none has that record.
        """
        rows = [step.records for step in self._steps()]
        if rows and not any(address in row for row in rows):
            raise _no_record(address, [name for row in rows for name in row])
        return [row.get(address, math.nan) for row in rows]

    def kept(self, what: Literal["tensor", "example_norms", "second_moment"] = "tensor") -> dict[Site, Tensor]:
        """Return copies of the tensors kept in the last backward.

        They are those of ``Keep(what)``, on their device, with their dtype.

        Raises:
            ValueError: ``what`` is nothing that ``Keep`` keeps.
        """
        known = ("tensor", "example_norms", "second_moment")
        if what not in known:
            raise ValueError(f"kept(what) is one of {', '.join(map(repr, known))}, got {what!r}")
        with self._lock:
            self._recorder.messages.flush()
            records = self._recorder.records
            found = records[-1].kept if records else {}
            return {site: tensor for (own, site), tensor in found.items() if own == what}

    def table(self) -> Table:
        """All records over the steps in the buffer; ``print`` shows it. Waits for the device."""
        rows = [step.records for step in self._steps()]
        parts = [f"{len(rows)} of {self._recorder.num_steps} steps"]
        if self.dropped:
            parts.append(f"{self.dropped} were dropped unread (capacity {self.capacity})")
        if self._recorder.guards or self._recorder.num_skipped:
            parts.append(f"{self.skipped} updates skipped")
        return table_of(rows, ", ".join(parts))

    def diagnose(self) -> tuple[Finding, ...]:
        """Return the faults of the run in the buffer, the gravest first; ``()`` if it is healthy.

        The judge is that of ``gr.diagnose`` and ``gradrewrite report``: the causes of a bad outcome come first, then
        what else was found. What is no fault, as a clip that always acts where the loss falls, is left out.
        """
        return examine(self.steps()).faults

    def steps(self) -> list[Step]:
        """The steps in the buffer, oldest first, with the bounds of clips. Waits for the device."""
        return self._steps()

    def log(self, name: str, value: float | Tensor) -> None:
        """Add a scalar of your own, such as the loss, to the step of the last backward; nothing waits for the device.

        Its address is ``name@run``. Logged again before the next backward is over, the last value is kept. NaN and
        infinities are kept as they are. Where no backward records anything, but step sites may, it is added to the
        step that the next ``optimizer.step()`` makes. ``SkipSpikes(of="loss")`` reads ``"loss"``: log it once for each
        micro-batch, before ``optimizer.step()``. What is logged after ``flush`` or ``to_jsonl`` has written the step is
        in the monitor and not in the file; a warning tells once.

        Args:
            name: Any text without ``@``.
            value: A real number, or a real tensor with one element on any device: detached, and copied at once
                (float64 if it is that or no floating point, else float32).

        Raises:
            RuntimeError: No backward has been recorded yet, and no guarded optimizer may have actions at step sites.
            TypeError: ``name`` is no string, or ``value`` no real number.
            ValueError: ``name`` is empty or has an ``@``, or ``value`` has not exactly one element.

        Example:
            >>> import torch, gradrewrite as gr
            >>> from gradrewrite.passes import Observe
            >>> model = gr.transform(torch.nn.Linear(2, 1), gr.on("gradient:*", Observe("norm")))
            >>> loss = model(torch.ones(1, 2)).square().sum()
            >>> loss.backward()
            >>> model.monitor.log("loss", loss)
            >>> model.monitor.latest()["loss@run"] == loss.item()
            True
        """
        pack = pack_of(name, value)
        if not self._recorder.log(RecordKey.of(name, "run"), pack):
            raise RuntimeError(
                f"monitor.log({name!r}, ...) adds to the last backward, and none has been recorded yet: call it after "
                "loss.backward(), with a policy that records something (Observe, CheckFinite, a clip by norm), or with "
                "actions at step sites and gr.guard"
            )

    def to_jsonl(self, path: str | os.PathLike[str]) -> None:
        """Append the steps to a file, one JSON object a line, and the later ones as they come.

        Later steps are written every ``every`` steps (100 if None, at most half of ``capacity``), by ``flush``, and
        when the program ends. Non-finite numbers are the strings ``"NaN"``, ``"Infinity"`` and
        ``"-Infinity"``. If a later step cannot be written (a full disk), a warning says so and training goes on
        without the file.

        On several ranks each writes a file of its own: ``run.jsonl`` becomes ``run.rank0.jsonl``, unless the path
        says with ``{rank}`` where the rank belongs. ``gradrewrite doctor run.rank*.jsonl`` reads them together.

        Raises:
            OSError: The file cannot be written now.
        """
        with self._lock:
            own, writers = path_of_rank(path), self._recorder.writers
            writers.attach(writers.find(os.path.abspath(own)) or JsonLines(own), self._read())

    def to_tensorboard(self, writer: Any) -> None:
        """Write the steps with a ``SummaryWriter``, tag ``record/site``, and the later ones as ``to_jsonl`` does.

        ``rate/site`` is the share of the steps written together in which a clip acted.

        Raises:
            TypeError: ``writer`` has no ``add_scalar``.
        """
        if not callable(getattr(writer, "add_scalar", None)):
            raise TypeError(f"Monitor.to_tensorboard takes a SummaryWriter, got {type(writer).__name__}")
        with self._lock:
            writers = self._recorder.writers
            writers.attach(writers.find(id(writer)) or TensorBoard(writer), self._read())

    def flush(self) -> None:
        """Write the steps that are still missing to the files that are attached. Waits for the device."""
        self._recorder.flush()

    def failure(self, *, anywhere: bool = False) -> NonFiniteError | None:
        """Return the failure of the last step as an error; None if nothing failed. Waits for the device.

        The step is replayed op by op if it still can be: until the next backward, and until its inputs or the
        parameters are changed.

        Args:
            anywhere: Take all that leaves the model for checked, not only the sites of checks.
        """
        with self._lock:
            if not self._recorder.records:
                return None
            record = self._recorder.records[-1]
            if not anywhere:
                failures = (failure_of(part, get_args(OnFailure)) for part in (record, *record.updates))
                return next((failure for failure in failures if failure is not None), None)
            record.fetch()
            return find_anywhere(record.step, record.checked_graphs())

    def _read(self, last: int | None = None) -> list[StepRecord]:
        with self._lock:
            self._recorder.messages.flush()
            records = list(self._recorder.records)[-(last or 0) :]
            for record in records:
                record.fetch()
                for part in (record, *record.updates):
                    self._look_at_bounds(part)
                record.was_read = True
            return records

    def _steps(self, last: int | None = None) -> list[Step]:
        with self._lock:  # the last record may still grow
            return [record.on_host() for record in self._read(last)]

    def _look_at_bounds(self, record: StepRecord) -> None:
        """Warn once of a clip with a bound of 0, in a record that was not looked at before."""
        key = None if record.has_known_bounds or self._warned_of_bound else record.zero_bound()
        record.has_known_bounds = True
        if key is not None:
            self._warned_of_bound = True
            warn(
                f"{key} was 0 or negative at step {record.step}: the clip makes zeros, so that nothing is learned "
                "there. Give it a bound > 0 (a number in its tensor, a gr.Schedule above 0); infinity only measures"
            )


def steps_since(monitor: Monitor, step: int) -> list[Step]:
    """Return the steps from this one on, as far as they are in the buffer. Waits for the device."""
    with monitor._lock:
        new = monitor._recorder.num_steps - step
        return monitor._steps(last=new) if new > 0 else []


def recorder_of(monitor: Monitor) -> StepRecorder:
    """Return the recorder behind a monitor."""
    return monitor._recorder
