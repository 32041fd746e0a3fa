"""Rows of the monitor: what one ``loss.backward()`` reported, on its device and on the host."""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from gradrewrite.failure import CheckedRun
from gradrewrite.records import Carried
from gradrewrite.sites import Site
from gradrewrite.statistics import COUNTS
from gradrewrite.witness import Witness


@dataclass
class Run:
    """What one backward graph reported; tensors stay on their device until they are copied."""

    carried: Carried
    packs: list[Tensor]
    witness: Witness | None = None
    on_device: list[Tensor] = field(default_factory=list)  # sources of copies under way, kept alive

    def values(self) -> dict[str, float]:
        """All records; the packs are on the host."""
        pairs = zip(self.carried.packs, self.packs, strict=True)
        return {name: value for names, pack in pairs for name, value in zip(names, floats_of(pack), strict=True)}


@dataclass
class Row:
    """What one ``loss.backward()`` reported.

    Attributes:
        step: Number of the backward.
        runs: Its graphs, in the order in which their backwards ran.
        kept: Tensors that are kept.
        groups: Groups that were clipped.
        extra: Figures that the host knows (learning rates).
        was_read: Whether somebody has asked for it.
    """

    step: int = -1
    runs: list[Run] = field(default_factory=list)
    kept: dict[Site, Tensor] = field(default_factory=dict)
    groups: list[str] = field(default_factory=list)
    extra: dict[str, float] = field(default_factory=dict)
    was_read: bool = False
    _ready: dict[torch.device, torch.cuda.Event] = field(default_factory=dict)
    _copied: list[torch.cuda.Event] | None = None
    _values: dict[str, float] | None = None

    def close(self) -> None:
        """Note on each device that the records are complete: who copies them waits for that on the device."""
        for device in {pack.device for run in self.runs for pack in run.packs if pack.device.type == "cuda"}:
            self._ready[device] = torch.cuda.Event()
            self._ready[device].record(torch.cuda.current_stream(device))

    def start_copy(self) -> None:
        """Begin to copy the records to the host; nothing waits."""
        if self._copied is not None:
            return
        self._copied = []
        for device, ready in self._ready.items():
            torch.cuda.current_stream(device).wait_event(ready)
        for run in self.runs:
            run.on_device, run.packs = run.packs, [_copy_to_host(pack) for pack in run.packs]
        for device in self._ready:
            event = torch.cuda.Event()
            event.record(torch.cuda.current_stream(device))
            self._copied.append(event)

    def is_here(self) -> bool:
        """Whether the copy has arrived."""
        return self._copied is not None and all(event.query() for event in self._copied)

    def fetch(self) -> None:
        """Copy if that has not begun, and wait for it."""
        self.start_copy()
        assert self._copied is not None
        for event in self._copied:
            event.synchronize()
        for run in self.runs:
            run.on_device = []

    def values(self) -> dict[str, float]:
        """All records in the order of the sites of the forward; the copy is here.

        Where a site reported several times, counts of elements add up; of all else the last report stands.
        """
        if self._values is None:
            # Behind a graph break the later graph's backward runs first.
            values = dict.fromkeys(name for run in reversed(self.runs) for pack in run.carried.packs for name in pack)
            known: dict[str, float] = {}
            for run in self.runs:
                for name, value in run.values().items():
                    is_count = name.partition("@")[0].partition(".")[0] in COUNTS
                    known[name] = known[name] + value if is_count and name in known else value
            self._values = {name: known[name] for name in values}
        return self._values | self.extra

    def bounds(self) -> dict[str, float]:
        """Bounds of norm clips that are numbers, by address; those that are tensors are records."""
        return {name: value for run in self.runs for name, value in run.carried.bounds}

    def has(self, wanted: Callable[[Carried], bool]) -> bool:
        """Whether a graph carries something."""
        return any(wanted(run.carried) for run in self.runs)

    def checked_runs(self) -> list[CheckedRun]:
        """The graphs, for a look at their checks; the copy is here."""
        return [CheckedRun(run.carried, run.values(), run.witness) for run in self.runs]

    def forget_witnesses(self) -> None:
        """Let go of the inputs of the step."""
        for run in self.runs:
            run.witness = None


def floats_of(pack: Tensor) -> Sequence[float]:
    """Values of a flat float tensor in host memory, read where they lie: no tensor operation that could wait."""
    number = ctypes.c_double if pack.dtype == torch.float64 else ctypes.c_float
    return list((number * pack.numel()).from_address(pack.data_ptr())) if pack.numel() else []


def _copy_to_host(pack: Tensor) -> Tensor:
    if pack.device.type == "cpu":
        return pack.contiguous()
    # Into pinned memory: a copy into any other waits for the device.
    return torch.empty_like(pack, device="cpu", pin_memory=True).copy_(pack, non_blocking=True)
