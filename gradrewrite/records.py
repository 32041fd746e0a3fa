"""Records: named scalars that actions report from inside the graph."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from contextvars import ContextVar
from dataclasses import dataclass, field

import torch
from torch import Tensor

from gradrewrite.errors import CallbackError
from gradrewrite.sites import Site


@dataclass
class Recording:
    """What one action reports while it is traced."""

    names: list[str] = field(default_factory=list)
    values: list[Tensor] = field(default_factory=list)
    kept: list[Tensor] = field(default_factory=list)
    logs: bool = False
    device: torch.device | None = None

    def clear(self) -> None:
        """Begin anew: a tracer may run a function more than once."""
        self.names.clear()
        self.values.clear()
        self.kept.clear()
        self.logs = False


@dataclass(frozen=True, slots=True)
class LogLine:
    """The records of one log line of a clip: three addresses ``record@site``."""

    site: Site
    max_abs: str
    mean_abs: str
    clipped: str


@dataclass(frozen=True, slots=True)
class Carried:
    """What leaves a rewritten backward beside the gradients, in the order of the extra outputs.

    Attributes:
        packs: Addresses ``record@site`` in each packed tensor, one tensor a device.
        kept: Sites whose tensors are kept.
        logs: The lines of clips that log.
        groups: Names of groups that are clipped together.
    """

    packs: tuple[tuple[str, ...], ...] = ()
    kept: tuple[Site, ...] = ()
    logs: tuple[LogLine, ...] = ()
    groups: tuple[str, ...] = ()


_recording: ContextVar[Recording | None] = ContextVar("gradrewrite_recording", default=None)


def record(name: str, value: Tensor | float) -> None:
    """Report a scalar from inside a tensor function.

    The value leaves the graph with the other records of the backward, as float32 (float64 if any record
    is float64); the host reads it only when the monitor is asked. Outside a rewrite (a tensor function
    called by hand) nothing happens.

    Args:
        name: Name of the record; its address is ``name@site``. A second record of that name at the same
            site becomes ``name.2``.
        value: A real tensor with one element, or a number. NaN and infinities are reported as they are.

    Raises:
        CallbackError: ``value`` has not exactly one element, or is complex.

    Example:
        >>> def watch(g):
        ...     record("largest", g.abs().amax())
        ...     return g
    """
    recording = _recording.get()
    if recording is None:
        return
    tensor = (
        value
        if isinstance(value, Tensor)
        else torch.full((), float(value), dtype=torch.float64, device=recording.device)
    )
    if tensor.numel() != 1 or tensor.is_complex():
        raise CallbackError(
            f"gr.record({name!r}, ...): a record is one real number; got shape {tuple(tensor.shape)}, {tensor.dtype}"
        )
    recording.names.append(_unused(str(name), recording.names))
    recording.values.append(tensor.reshape(()) if tensor.dim() else tensor)


def record_clip(before: Tensor, after: Tensor) -> None:
    """Report last what a log line of a clip needs: largest and mean absolute value before, and whether it acted.

    It acted if an element changed; NaN is no change. Empty tensors: not acted, both figures NaN.
    """
    recording = _recording.get()
    if recording is None:
        return
    recording.logs = True
    size = before.abs().to(torch.promote_types(before.abs().dtype, torch.float32))
    empty = before.numel() == 0
    record("max_abs", size.new_full((), torch.nan) if empty else size.amax())
    record("mean_abs", size.new_full((), torch.nan) if empty else size.mean())
    record("clipped", ((after != before) & (before == before)).any().to(size.dtype))


def keep(tensor: Tensor) -> None:
    """Carry a tensor out of the graph, to ``monitor.kept()``; it is copied where it leaves, at run time."""
    recording = _recording.get()
    if recording is not None:
        recording.kept.append(tensor)


@contextlib.contextmanager
def recording(device: torch.device) -> Iterator[Recording]:
    """Collect what is reported inside the block; numbers become tensors on ``device``."""
    current = Recording(device=device)
    token = _recording.set(current)
    try:
        yield current
    finally:
        _recording.reset(token)


def pack(*values: Tensor) -> Tensor:
    """Pack scalars of one device into one tensor ``[len(values)]``: float64 if any is, else float32."""
    dtype = torch.float64 if any(v.dtype == torch.float64 for v in values) else torch.float32
    return torch.stack([v.to(dtype) for v in values])


def _unused(name: str, taken: list[str]) -> str:
    if name not in taken:
        return name
    number = 2
    while f"{name}.{number}" in taken:
        number += 1
    return f"{name}.{number}"
