"""Rows of the monitor: what one ``loss.backward()`` reported, on its device and on the host."""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from numbers import Real

import torch
from torch import Tensor

from gradrewrite.failure import CheckedRun
from gradrewrite.records import Carried
from gradrewrite.sites import Site
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
class Added:
    """Figures that a row got after its backward; they come to the host by themselves.

    Attributes:
        names: Their addresses.
        pack: Their values, flat float32 or float64; complete on the current stream of their device.
    """

    names: tuple[str, ...]
    pack: Tensor
    _on_device: Tensor | None = None  # source of a copy under way, kept alive
    _ready: torch.cuda.Event | None = None
    _copied: torch.cuda.Event | None = None

    def __post_init__(self) -> None:
        """Note on the device that the figures are complete."""
        if self.pack.device.type == "cuda":
            self._ready = torch.cuda.Event()
            self._ready.record(torch.cuda.current_stream(self.pack.device))

    def start_copy(self) -> None:
        """Begin to copy; nothing waits."""
        if self._on_device is not None or self.pack.device.type == "cpu":
            return
        self._on_device = self.pack
        if self._ready is None:
            self.pack = self.pack.cpu()
            return
        stream = torch.cuda.current_stream(self.pack.device)
        stream.wait_event(self._ready)
        self.pack = _copy_to_host(self.pack)
        self._copied = torch.cuda.Event()
        self._copied.record(stream)

    def is_here(self) -> bool:
        """Whether the copy has arrived."""
        return self.pack.device.type == "cpu" and (self._copied is None or self._copied.query())

    def fetch(self) -> None:
        """Copy if that has not begun, and wait for it."""
        self.start_copy()
        if self._copied is not None:
            self._copied.synchronize()
        self._on_device = None

    def values(self) -> dict[str, float]:
        """The figures; the copy is here."""
        return dict(zip(self.names, floats_of(self.pack), strict=True))


@dataclass
class Row:
    """What one ``loss.backward()`` reported.

    Attributes:
        step: Number of the backward.
        runs: Its graphs, in the order in which their backwards ran.
        kept: Tensors that are kept.
        groups: Groups that were clipped.
        extra: Figures that the host knows (learning rates).
        added: Figures that came after the backward, by their addresses.
        was_read: Whether somebody has asked for it.
    """

    step: int = -1
    runs: list[Run] = field(default_factory=list)
    kept: dict[Site, Tensor] = field(default_factory=dict)
    groups: list[str] = field(default_factory=list)
    extra: dict[str, float] = field(default_factory=dict)
    added: dict[tuple[str, ...], Added] = field(default_factory=dict)
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
        for added in self.added.values():
            added.start_copy()
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
        if self._copied is None or not all(event.query() for event in self._copied):
            return False
        return all(added.is_here() for added in self.added.values())

    def fetch(self) -> None:
        """Copy if that has not begun, and wait for it."""
        self.start_copy()
        assert self._copied is not None
        for event in self._copied:
            event.synchronize()
        for run in self.runs:
            run.on_device = []
        for added in self.added.values():
            added.fetch()

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
                    adds_up = name in known and name in run.carried.counts
                    known[name] = known[name] + value if adds_up else value
            self._values = {name: known[name] for name in values}
        later = {name: value for added in self.added.values() for name, value in added.values().items()}
        return self._values | self.bounds() | self.extra | later

    def bounds(self) -> dict[str, float]:
        """Bounds of clips that are numbers, by address; those that are tensors are records of the graph."""
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


def pack_of(name: str, value: float | Tensor) -> Tensor:
    """One figure that a user gave, copied, as a flat float64 tensor, or float32 if it is a narrower float.

    Raises:
        TypeError: The name is no string, or the value no real number.
        ValueError: The name is empty or has an ``@``, or the value has not exactly one element.
    """
    if not isinstance(name, str):
        raise TypeError(f"monitor.log: name is a string, got {type(name).__name__}")
    if not name or "@" in name:
        raise ValueError(f"monitor.log: name is a text without '@', such as 'loss', got {name!r}")
    if isinstance(value, Real):
        return torch.tensor([float(value)], dtype=torch.float64, device="cpu")
    if not isinstance(value, Tensor) or value.is_complex():
        got = str(value.dtype) if isinstance(value, Tensor) else type(value).__name__
        raise TypeError(f"monitor.log({name!r}, ...): wanted a real number or tensor, got {got}")
    if value.numel() != 1:
        raise ValueError(f"monitor.log({name!r}, ...): wanted one element, got shape {tuple(value.shape)}")
    is_narrow = value.is_floating_point() and value.dtype != torch.float64
    return value.detach().reshape(1).to(torch.float32 if is_narrow else torch.float64, copy=True)


def _copy_to_host(pack: Tensor) -> Tensor:
    if pack.device.type == "cpu":
        return pack.contiguous()
    # Into pinned memory: a copy into any other waits for the device.
    return torch.empty_like(pack, device="cpu", pin_memory=True).copy_(pack, non_blocking=True)
