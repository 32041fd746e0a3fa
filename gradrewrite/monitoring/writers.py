"""Writers of records: JSON lines, TensorBoard."""

from __future__ import annotations

import errno
import itertools
import json
import math
import os
from collections import defaultdict, deque
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal, TypeAlias

from gradrewrite._utils.exponent_counts import EDGES, ExponentCounts, split_exponents
from gradrewrite._utils.warnings import warn
from gradrewrite.diagnostics.run_file import (
    LINE_STARTS,
    Header,
    clip_to_json,
    ops_to_json,
    origin_to_json,
    step_to_json,
)
from gradrewrite.diagnostics.run_log import Origin, Step
from gradrewrite.diagnostics.stacked_records import base_of, summed_up
from gradrewrite.distributed.groups import this_rank
from gradrewrite.ir.record_key import RecordKey
from gradrewrite.monitoring.step_record import StepRecord


class Writers:
    """Files with the record of every step, once and in order."""

    def __init__(self, records: deque[StepRecord], capacity: int, every: int | None) -> None:
        """Write the records of a recorder every so many steps: 100 if None, and at most half of ``capacity``."""
        self.num_dropped = 0  # how many records left the buffer before they were written, or, without a file, read
        self._records = records
        self._capacity = capacity
        self._every = every
        self._sinks: list[Sink] = []
        self._next: dict[object, int] = {}  # by the key of a sink: the first step that it has not had
        self._warned_of_late = False

    def __bool__(self) -> bool:
        return bool(self._sinks)

    def on_step(self, record: StepRecord) -> None:
        """Write the earlier steps that have arrived; count a record that leaves the buffer unwritten."""
        every = self._every or (min(100, max(1, self._capacity // 2)) if self._sinks else None)
        try:
            if every is not None and self._records:
                self._write_due(is_due=record.step % every == 0)
        finally:
            if len(self._records) == self._capacity:
                self._count_drop(self._records[0])

    def _count_drop(self, lost: StepRecord) -> None:
        if lost.step >= self.num_written if self._sinks else not lost.was_read:
            self.num_dropped += 1
            if self.num_dropped == 1 and self._sinks:
                warn(f"the monitor's buffer ({self._capacity} steps) was full before its steps were written")

    def flush(self) -> None:
        """Write the records that are still missing; waits for the device."""
        for record in self._records:
            record.read()
        self.write(list(self._records))

    @property
    def num_written(self) -> int:
        """Number of records in all files."""
        return min((self._next.get(sink.key, 0) for sink in self._sinks), default=0)

    def note_late(self, step: int, key: RecordKey | str) -> None:
        """Warn once of a late record for a step that a file has already."""
        if not self._warned_of_late and any(self._next.get(sink.key, 0) > step for sink in self._sinks):
            self._warned_of_late = True
            warn(f"{key} came after step {step} had been written to a file, which lacks it; add it before flush()")

    def find(self, key: object) -> Sink | None:
        """The sink of a key."""
        return next((sink for sink in self._sinks if sink.key == key), None)

    def attach(self, sink: Sink, records: Sequence[StepRecord], first: int = 0) -> None:
        """Write there too, beginning with these records, or with a later step; OSError if that fails."""
        if all(known is not sink for known in self._sinks):
            self._sinks.append(sink)
        if first:
            self._next[sink.key] = first
        self.write(records, raises=True)

    def detach(self, sink: Sink) -> None:
        """Write there no more."""
        self._sinks = [known for known in self._sinks if known is not sink]

    def forget(self, key: object) -> None:
        """Detach the sink of a key, and begin anew with its next one."""
        self._sinks = [known for known in self._sinks if known.key != key]
        self._next.pop(key, None)

    def _write_due(self, *, is_due: bool) -> None:
        """Write the arrived records; begin to copy the rest if it is due."""
        records = self._records
        waiting = list(itertools.islice(records, max(0, self.num_written - records[0].step), None))
        for record in waiting if is_due else ():
            record.start_reading()
        self.write(list(itertools.takewhile(StepRecord.is_here, waiting)))

    def write(self, records: Sequence[StepRecord], *, raises: bool = False) -> None:
        """Give each sink the records that it has not had; one that fails is let go of, with a warning or an error."""
        for sink in list(self._sinks):
            try:
                for record in records:
                    if record.step >= self._next.get(sink.key, 0):
                        sink.write(record.on_host())
                        self._next[sink.key] = record.step + 1
                sink.finish()
            except Exception as err:  # a writer's failure must not end training
                self._sinks.remove(sink)
                reason = getattr(err, "strerror", None) or f"{type(err).__name__}: {err}"
                step = self._next.get(sink.key, 0)
                text = f"{sink}: step {step} could not be written ({reason}); records are no longer written there"
                if raises and isinstance(err, OSError):
                    raise OSError(err.errno, text) from err
                if raises:
                    raise
                warn(f"{text}. Mend that and attach it again: steps still in the buffer are written then")


Mode: TypeAlias = Literal["a", "w", "x"]  # of opening a file, as ``open`` has them

_BLOCK = 1 << 16


def path_of_rank(path: str | os.PathLike[str]) -> str:
    """Return the path of this rank's file: ``{rank}`` is replaced, else ``.rank0`` goes before the ending.

    In a process that is alone only ``{rank}`` is replaced, by 0.
    """
    text, rank = os.fspath(path), this_rank()
    if "{rank}" in text:
        return text.replace("{rank}", str(rank or 0))
    if rank is None:
        return text
    stem, ending = os.path.splitext(text)
    return f"{stem}.rank{rank}{ending}"


class JsonLines:
    """A file with one object a line, ``{"step": 3, "graphs": 0, "records": {...}}``.

    The first line is ``{"run": {...}}``, the origin of the steps; it comes again where a later run goes on in the file.
    Before the first step of each set of graphs comes ``{"graphs": 0, "clips": [...], "ops": {...}}``: the number of the
    set; which records belong to which clip, its action, its rule and the call of its site; the op and the source line
    of activations and errors. Steps have ``"update": 1`` where it is another number, and ``"micro_batch": 2`` but for
    the first one of an update; on several ranks ``"rank": 1`` too. A step with a skipped update that was asked about
    has ``"culprits": "update 7 was skipped ..."``. The records of a loop are one object among the others, with a list
    over the iterations for each: ``"loop 0": {"dtype": "float32", "records": {"norm@error:lstm.l0/h": [...]}}``.

    A step is one write, so a kill leaves whole lines. What could not be written whole (a full disk) is taken back, and
    an unfinished line that an earlier run left is taken off when the file is opened.
    """

    def __init__(
        self,
        path: str | os.PathLike[str],
        origin: Callable[[], Origin] | None = None,  # asked at the first step
        mode: Mode = "a",
    ) -> None:
        self.path = Path(path)
        self.key = os.path.abspath(self.path)
        rank = this_rank()
        self._origin = origin  # None once it is written
        self._sets: list[Header] = []  # by their numbers in the file
        self._rank = {} if rank is None else {"rank": rank}
        self.path.parent.mkdir(parents=True, exist_ok=True)
        flags = os.O_RDWR | os.O_APPEND | os.O_CREAT | (os.O_EXCL if mode == "x" else 0) | getattr(os, "O_CLOEXEC", 0)
        self._file = os.open(self.path, flags, 0o644)
        self._check_first_line()
        if mode == "w":
            os.ftruncate(self._file, 0)
        self._mend()

    def begin(self, origin: Callable[[], Origin]) -> None:
        """Begin a part of the file, with its origin before the next step."""
        self._origin, self._sets = origin, []

    def write(self, step: Step) -> None:
        """Append one line, with that of a new set of graphs before it; OSError if they do not fit."""
        header = step.clips, step.ops
        is_new = header not in self._sets
        graphs = len(self._sets) if is_new else self._sets.index(header)
        rows: list[object] = [] if self._origin is None else [{"run": origin_to_json(self._origin())}]
        if is_new:
            clips, ops = list(map(clip_to_json, step.clips)), ops_to_json(step.ops)
            rows.append({"graphs": graphs, "clips": clips, **({"ops": ops} if ops else {})})
        rows.append({**step_to_json(step, graphs), **self._rank})
        self._append(b"".join(json.dumps(row, allow_nan=False).encode() + b"\n" for row in rows))
        self._origin = None
        if is_new:
            self._sets.append(header)

    def _append(self, data: bytes) -> None:
        written = 0
        try:
            while written < len(data):
                written += os.write(self._file, data[written:])
        except OSError:
            if written:
                os.ftruncate(self._file, os.lseek(self._file, 0, os.SEEK_END) - written)
            raise

    def finish(self) -> None:
        """Write nothing: a reader of all steps can sum them up."""

    def _check_first_line(self) -> None:
        """Raise OSError if the file begins with a line of something else."""
        size = os.lseek(self._file, 0, os.SEEK_END)
        begin = os.pread(self._file, min(size, max(map(len, LINE_STARTS))), 0)
        if begin and not any(start.startswith(begin) or begin.startswith(start) for start in LINE_STARTS):
            raise OSError(errno.EINVAL, f"{self.path} is no run log, and nothing is written into it; give another path")

    def _mend(self) -> None:
        """Take off a line that an earlier run did not finish; OSError if the file is none of ours."""
        at = size = os.lseek(self._file, 0, os.SEEK_END)
        tail = b""
        while at > 0 and b"\n" not in tail:
            block = min(at, _BLOCK)
            at -= block
            tail = os.pread(self._file, block, at) + tail
        unfinished = tail.rpartition(b"\n")[2]
        if unfinished and not any(start.startswith(unfinished[: len(start)]) for start in LINE_STARTS):
            raise OSError(errno.EINVAL, f"{self.path} is no run log, and nothing is written into it; give another path")
        if unfinished:
            os.ftruncate(self._file, size - len(unfinished))

    def __del__(self, close: Callable[[int], None] = os.close) -> None:  # at the very end ``os`` is None
        if hasattr(self, "_file"):
            close(self._file)

    def __str__(self) -> str:
        return str(self.path)


class ClipRates:
    """Shares of clipped steps since the last log, of iterations in loops."""

    def __init__(self) -> None:
        self._acted: dict[str, list[bool]] = defaultdict(list)

    def add(self, step: Step) -> None:
        """Count one step; a factor of NaN counts as clipped."""
        first = {address: base_of(own[0]) for stack in step.stacks for own in stack for address in own}
        for clip in step.clips:
            factor = str(clip.factor)
            rate = replace(RecordKey.parse(first.get(factor, factor)), record="rate")
            self._acted[str(rate)].append(step.records[factor] != 1)

    def take(self) -> dict[str, float]:
        """Return ``rate@site`` of the clips since the last call, each in [0, 1]."""
        rates = {address: sum(acted) / len(acted) for address, acted in self._acted.items()}
        self._acted.clear()
        return rates


class TensorBoard:
    """A ``SummaryWriter``, or anything with its ``add_scalar(tag, value, step)``; the tag is ``record/site``.

    Exponents are one histogram of absolute values, by ``add_histogram_raw``: buckets end at powers of two (zeros are in
    the first one), infinities and NaN are left out, sums are those of the middles of the buckets.

    Of a record in the iterations of a loop come ``norm_largest/site``, ``norm_largest_at/site`` (which iteration) and
    ``norm_last/site``.

    Whenever steps were written, ``rate/site`` follows: the share of them in which a clip acted. The step is the number
    of the update, with several micro-batches that of the backward.
    """

    def __init__(self, writer: Any) -> None:
        self.writer = writer
        self.key = id(writer)
        self._rates = ClipRates()
        self._last = 0
        self._shift: int | None = None  # from the number of a backward to that of its update, in the first step
        self._is_accumulated = False

    def write(self, step: Step) -> None:
        """Add one scalar a record, and one histogram for the exponents at a site."""
        self._shift = step.update - step.step if self._shift is None else self._shift
        self._is_accumulated |= step.micro_batch > 0
        at = step.step + self._shift if self._is_accumulated else step.update
        scalars, exponents = split_exponents(summed_up(step.records, step.stacks))
        for address, value in scalars.items():
            self.writer.add_scalar(address.replace("@", "/", 1), value, at)
        for address, counts in exponents.items() if hasattr(self.writer, "add_histogram_raw") else ():
            self._add_histogram(address.replace("@", "/", 1), counts, at)
        self._rates.add(step)
        self._last = at

    def _add_histogram(self, tag: str, exponents: ExponentCounts, step: int) -> None:
        counts, low = exponents.histogram(), exponents.ends
        middles = [0.0, *(1.5 * edge for edge in EDGES[1:-1])]
        self.writer.add_histogram_raw(
            tag,
            min=0.0 if exponents.zero or low is None else math.ldexp(1.0, low[0]),
            max=0.0 if low is None else math.ldexp(1.0, low[1] + 1),
            num=sum(counts),
            sum=sum(count * middle for count, middle in zip(counts, middles, strict=True)),
            sum_squares=sum(count * middle * middle for count, middle in zip(counts, middles, strict=True)),
            bucket_limits=list(EDGES[1:]),
            bucket_counts=counts,
            global_step=step,
        )

    def finish(self) -> None:
        """Add the rates of clips, at the last step."""
        for address, rate in self._rates.take().items():
            self.writer.add_scalar(address.replace("@", "/", 1), rate, self._last)

    def __str__(self) -> str:
        return f"TensorBoard ({type(self.writer).__name__})"


Sink = JsonLines | TensorBoard  # takes the records of a run, each once, in order; two sinks with one key are one
