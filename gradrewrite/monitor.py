"""The monitor: what a rewritten backward reported, read by the host only when it is asked."""

from __future__ import annotations

import logging
import threading
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from gradrewrite import _torch
from gradrewrite.records import Carried
from gradrewrite.sites import Site

logger = logging.getLogger("gradrewrite.monitor")

_MAX_PENDING = 1000
_MAX_OPEN = 1000


@dataclass
class _Run:
    """What one backward graph reported; tensors stay on their device until they are copied."""

    carried: Carried
    packs: list[Tensor]
    on_device: list[Tensor] = field(default_factory=list)  # sources of copies under way, kept alive

    def values(self) -> dict[str, float]:
        """Read all records; waits for the device."""
        pairs = zip(self.carried.packs, self.packs, strict=True)
        return {name: value for names, pack in pairs for name, value in zip(names, pack.tolist(), strict=True)}


@dataclass
class _Row:
    """What one ``loss.backward()`` reported."""

    runs: list[_Run] = field(default_factory=list)
    kept: dict[Site, Tensor] = field(default_factory=dict)
    groups: list[str] = field(default_factory=list)
    copied: list[torch.cuda.Event] = field(default_factory=list)

    def values(self) -> dict[str, float]:
        """Read all records; the last report of a site stands."""
        return {name: value for run in self.runs for name, value in run.values().items()}

    def has_logs(self) -> bool:
        """Whether a clip in it logs."""
        return any(run.carried.logs for run in self.runs)

    def start_copy(self) -> None:
        """Begin to copy the records to the host; nothing waits."""
        devices = {pack.device for run in self.runs for pack in run.packs if pack.device.type == "cuda"}
        for run in self.runs:
            run.on_device, run.packs = run.packs, [_copy_to_host(pack) for pack in run.packs]
        for device in devices:
            event = torch.cuda.Event()
            event.record(torch.cuda.current_stream(device))
            self.copied.append(event)

    def is_here(self) -> bool:
        """Whether the copy has arrived."""
        return all(event.query() for event in self.copied)

    def wait(self) -> None:
        """Wait for the copy."""
        for event in self.copied:
            event.synchronize()
        for run in self.runs:
            run.on_device = []

    def log(self) -> None:
        """Log the clips that acted; the copy must be here."""
        for run in self.runs:
            values = run.values() if run.carried.logs else {}
            for line in run.carried.logs:
                if values[line.clipped] > 0:
                    _log(line.site, values[line.max_abs], values[line.mean_abs])


class Monitor:
    """What the last backward of a rewritten model reported.

    A row is one ``loss.backward()``, however many graphs ran in it. Where a site ran several times in one
    backward (the model was called twice), its last report stands. Nothing here waits for the device before
    it is asked.
    """

    def __init__(self) -> None:
        """Begin empty."""
        self._lock = threading.RLock()
        self._open: dict[int, _Row] = {}  # by backward: one may run inside another, or on another thread
        self._last: _Row | None = None
        self._pending: deque[_Row] = deque()

    def latest(self) -> dict[str, float]:
        """Records of the last backward by address ``record@site``; ``{}`` when nothing was recorded.

        Waits for the device. Values are float32 (float64 if a source was), NaN and infinities as they were.
        """
        with self._lock:
            self._drain(wait=True)
            return self._last.values() if self._last is not None else {}

    def kept(self) -> dict[Site, Tensor]:
        """Tensors that ``Keep`` kept in the last backward, on their device, with their dtype; copies."""
        with self._lock:
            self._drain(wait=True)
            return dict(self._last.kept) if self._last is not None else {}

    def collect(self, carried: Carried, tensors: Sequence[Tensor]) -> list[str]:
        """Take what one backward graph reported (called by the run time, inside ``backward``).

        Args:
            carried: What the tensors are.
            tensors: The packed records, then what is kept.

        Returns:
            The groups that an earlier graph of the same backward had clipped already.
        """
        with self._lock:
            task = _torch.backward_id()
            if task not in self._open:
                # What a backward that failed left behind is of no use: numbers of backwards only grow.
                self._open = {known: row for known, row in self._open.items() if known > task - _MAX_OPEN}
                self._open[task] = _Row()
                _torch.at_end_of_backward(lambda: self._close(task))
            row = self._open[task]
            again = [group for group in carried.groups if group in row.groups]
            row.groups += carried.groups
            row.runs.append(_Run(carried, list(tensors[: len(carried.packs)])))
            row.kept.update(zip(carried.kept, tensors[len(carried.packs) :], strict=True))
            return again

    def _close(self, task: int) -> None:
        with self._lock:
            self._last = row = self._open.pop(task)
            if row.has_logs() and logger.isEnabledFor(logging.INFO):
                row.start_copy()
                self._pending.append(row)
            self._drain(wait=len(self._pending) > _MAX_PENDING)

    def _drain(self, *, wait: bool) -> None:
        """Log the clips of all rows that have arrived, in order."""
        while self._pending and (wait or self._pending[0].is_here()):
            row = self._pending.popleft()
            row.wait()
            row.log()


def _copy_to_host(pack: Tensor) -> Tensor:
    if pack.device.type == "cpu":
        return pack
    # Into pinned memory: a copy into any other waits for the device.
    return torch.empty_like(pack, device="cpu", pin_memory=True).copy_(pack, non_blocking=True)


def _log(site: Site, largest: float, mean: float) -> None:
    if site.kind == "gradient":
        logger.info("parameter=%s need clipping, max grad=%.6g avg grad=%.6g", site.name, largest, mean)
    else:
        logger.info("layer=%s need clipping, max error=%.6g avg error=%.6g", site.name, largest, mean)
