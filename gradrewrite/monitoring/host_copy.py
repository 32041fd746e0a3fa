"""Copies of records from their device to the host."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from dataclasses import dataclass
from numbers import Real

import torch
from torch import Tensor

from gradrewrite.ir.record_key import RecordKey


@dataclass
class LateRecord:
    """Records added to a step after its backward, copied to the host by themselves."""

    keys: tuple[RecordKey, ...]
    pack: Tensor  # their values, flat float32 or float64; complete on the current stream of their device
    _on_device: Tensor | None = None  # source of a copy under way, kept alive
    _ready: torch.cuda.Event | None = None
    _copied: torch.cuda.Event | None = None

    def __post_init__(self) -> None:
        if self.pack.device.type == "cuda":
            self._ready = torch.cuda.Event()
            self._ready.record(torch.cuda.current_stream(self.pack.device))

    def start_copy(self) -> None:
        """Start the copy; nothing waits."""
        if self._on_device is not None or self.pack.device.type == "cpu":
            return
        self._on_device = self.pack
        if self._ready is None:
            self.pack = self.pack.cpu()
            return
        stream = torch.cuda.current_stream(self.pack.device)
        stream.wait_event(self._ready)
        self.pack = copy_to_host(self.pack)
        self._copied = torch.cuda.Event()
        self._copied.record(stream)

    def is_here(self) -> bool:
        """Whether the copy has arrived."""
        return self.pack.device.type == "cpu" and (self._copied is None or self._copied.query())

    def fetch(self) -> None:
        """Wait for the copy, and begin it if need be."""
        self.start_copy()
        if self._copied is not None:
            self._copied.synchronize()
        self._on_device = None

    def values(self) -> dict[RecordKey, float]:
        """The figures; the copy is here."""
        return dict(zip(self.keys, floats_of(self.pack), strict=True))


def floats_of(pack: Tensor) -> Sequence[float]:
    """Values of a flat float tensor in host memory, read where they lie: no tensor operation that could wait."""
    number = ctypes.c_double if pack.dtype == torch.float64 else ctypes.c_float
    return list((number * pack.numel()).from_address(pack.data_ptr())) if pack.numel() else []


def number_of(value: float | Tensor) -> float:
    """Return a number, or the only element of a real tensor in host memory."""
    if not isinstance(value, Tensor):
        return float(value)
    (number,) = floats_of(value.detach().to(torch.float64).reshape(1))
    return number


def last_float_of(pack: Tensor) -> float:
    """Return the last value of a non-empty flat float tensor in host memory."""
    number = ctypes.c_double if pack.dtype == torch.float64 else ctypes.c_float
    value: float = number.from_address(pack.data_ptr() + (pack.numel() - 1) * pack.element_size()).value
    return value


def pack_of(name: str, value: float | Tensor) -> Tensor:
    """Copy a user's figure as a flat float64 tensor, float32 if it is a narrower float; TypeError or ValueError."""
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


def copy_to_host(pack: Tensor) -> Tensor:
    """Return a copy in host memory; where that is under way, nothing waits."""
    if pack.device.type == "cpu":
        return pack.contiguous()
    if pack.is_meta:  # there are no values
        return torch.full_like(pack, torch.nan, device="cpu")
    # Into pinned memory: a copy into any other waits for the device.
    return torch.empty_like(pack, device="cpu", pin_memory=True).copy_(pack, non_blocking=True)
