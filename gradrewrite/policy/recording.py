"""Records: named scalars from inside the graph, reported by actions."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping, Sequence
from contextvars import ContextVar
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING, TypeGuard

import torch
from torch import Tensor

from gradrewrite._compat import dtensors
from gradrewrite.errors import CallbackError
from gradrewrite.ir.ops import measure
from gradrewrite.ir.record_layout import OnFailure
from gradrewrite.ir.stages import reduce_all
from gradrewrite.ir.statistics import (
    IN_UNITS,
    largest_of,
    mean_of,
    measure_shards,
    norm_of,
    share_of,
    shares_of,
    size_of,
)
from gradrewrite.policy.state_store import StateScope

if TYPE_CHECKING:
    from torch.distributed.tensor import DTensor


@dataclass
class Recording:
    """The records of one action while it is traced.

    Attributes:
        names: Names of the records in each value, as they were given: occurrences are numbered where they leave.
        values: Tensors of one or more records.
        kept: Tensors that are kept.
        kept_as: What each of them is.
        logs: Whether the action logs.
        fails: What a finite check does; its value is the last one.
        bound: The bound of a clip if the host has it: the name of its record, and a number or a tensor.
        norm_dtype: Type of the norm that is the first record, where a clip bounds it.
        logs_group: Whether a clip of a group logs.
        has_members: Whether the last value has one record for each member of a group.
        has_strength: Whether the records begin with the norms before and after a clip.
        device: Where numbers become tensors.
        is_opaque: Whether statistics are one opaque operation.
        scale: The loss scale that the action sees through, if any.
        states: The states of the actions here; None where they have none of their own.
    """

    names: list[tuple[str, ...]] = field(default_factory=list)
    values: list[Tensor] = field(default_factory=list)
    kept: list[Tensor] = field(default_factory=list)
    kept_as: list[str] = field(default_factory=list)
    logs: bool = False
    fails: OnFailure | None = None
    bound: tuple[str, float | Tensor] | None = None
    norm_dtype: torch.dtype | None = None
    logs_group: bool = False
    has_members: bool = False
    has_strength: bool = False
    device: torch.device = field(default_factory=partial(torch.device, "cpu"))
    is_opaque: bool = False
    scale: Tensor | None = None
    states: StateScope | None = None

    def clear(self) -> None:
        """Remove all records: a tracer may run a function more than once."""
        self.names.clear()
        self.values.clear()
        self.kept.clear()
        self.kept_as.clear()
        self.logs = False
        self.fails = None
        self.bound = None
        self.norm_dtype = None
        self.logs_group = False
        self.has_members = False
        self.has_strength = False
        if self.states is not None:
            self.states.begin()

    def add(self, names: Sequence[str], value: Tensor) -> None:
        """Report a tensor of as many records as there are names."""
        self.names.append(tuple(names))
        self.values.append(value)


_recording: ContextVar[Recording | None] = ContextVar("gradrewrite_recording", default=None)


def current_recording() -> Recording | None:
    """Return the collector of the traced action's records; None outside of a rewrite."""
    return _recording.get()


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
        CallbackError: ``value`` has not exactly one element, or is complex; or ``name`` has an ``@``.

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
    if "@" in str(name):
        raise CallbackError(
            f"gr.record({name!r}, ...): the name of a record has no '@', which separates it from its site"
        )
    recording.add([str(name)], tensor.reshape(()) if tensor.dim() else tensor)


def record_clip(before: Tensor, after: Tensor, *, strength: bool = False) -> None:
    """Report the figures of a clip's log line; they come last.

    They are the largest and the mean absolute value before, and whether it acted. It acted if an element changed; NaN
    is no change. Empty tensors: not acted, both figures NaN.

    Args:
        before: The tensor.
        after: What the clip made of it.
        strength: Report before these figures the L2 norms before and after, of which the host makes ``factor`` (a
            quotient in the graph would be one more launch), and ``share``, that of the elements that changed.
    """
    recording = _recording.get()
    if recording is None:
        return
    recording.logs = True
    if dtensors.is_dtensor(before):
        _record_clip_of_shards(recording, before, after, strength=strength)
        return
    size = size_of(before)
    changed = _changed(before, after)
    if strength:
        recording.has_strength = True
        record("norm_before", norm_of(before))
        record("norm_after", norm_of(after))
        share = share_of(changed)
        record("share", share)
        acted = share > 0
    else:
        acted = reduce_all(torch.any, changed)
    record("max_abs", largest_of(size))
    record("mean_abs", mean_of(size))
    record("clipped", acted.to(size.dtype))


def _changed(before: Tensor, after: Tensor) -> Tensor:
    """A mask of the elements that changed; NaN is no change."""
    return (after != before) & (before == before)


def _record_clip_of_shards(recording: Recording, before: DTensor, after: Tensor, *, strength: bool) -> None:
    """Report the figures of ``record_clip`` for a global tensor, by one collective."""
    unchanged = _changed(before, after).logical_not().to(torch.float32)
    reports: list[tuple[Tensor, tuple[str, ...]]] = [
        (before, ("max_abs", "mean_abs", "norm")),
        (after, ("norm",)),
        (unchanged, ("zeros",)),
    ]
    figures = measure_shards(
        [(tensor, names) for tensor, names in reports if dtensors.is_dtensor(tensor)],
        lambda part, names: measure(part, names, is_opaque=recording.is_opaque),
    )
    largest, mean, norm_before, norm_after, share = figures.unbind()
    if strength:
        recording.has_strength = True
        for name, figure in (("norm_before", norm_before), ("norm_after", norm_after), ("share", share)):
            record(name, figure)
    for name, figure in (("max_abs", largest), ("mean_abs", mean), ("clipped", (share > 0).to(mean.dtype))):
        record(name, figure)


def record_norm(name: str, norm: Tensor, bound: float | Tensor, *, is_computed: bool = False) -> None:
    """Report a clip's norm and bound, first.

    The bound is reported from inside the graph if it is a tensor on a device.

    What the clip multiplies by follows from both, and is computed where they are read.

    Args:
        name: Name of the record of the norm.
        norm: The norm.
        bound: The bound.
        is_computed: Whether the graph computes the bound.
    """
    record(name, norm)
    recording = _recording.get()
    if recording is not None:
        recording.norm_dtype = norm.dtype
    if isinstance(bound, Tensor) and (is_computed or _is_on_device(bound)):
        own = bound.detach().to(norm.device)
        record("bound", own if is_computed else own.clamp(min=0))
    elif recording is not None:
        recording.bound = ("bound", bound)


def record_shares(norms: Tensor, norm_type: float) -> None:
    """Report last the share of each member of a group in its total norm, and that the clip of the group logs.

    Args:
        norms: The norms of the members, ``[members]``; see ``statistics.shares_of``.
        norm_type: Their order.
    """
    recording = _recording.get()
    if recording is None:
        return
    recording.logs_group = recording.has_members = True
    recording.add(["norm_share"] * norms.numel(), shares_of(norms, norm_type))


def record_limit(limit: float | Tensor, device: torch.device) -> None:
    """Report the largest absolute value that passes a clip.

    It is reported from inside the graph if it is a tensor on a device.
    """
    recording = _recording.get()
    if _is_on_device(limit):
        record("limit", limit.detach().to(device).clamp(min=0))
    elif recording is not None:
        recording.bound = ("limit", limit)


def _is_on_device(bound: float | Tensor) -> TypeGuard[Tensor]:
    """Whether a bound is read inside the graph; one in host memory would have to be copied to the device, and wait."""
    return isinstance(bound, Tensor) and bound.device.type != "cpu"


def keep(tensor: Tensor, what: str = "tensor") -> None:
    """Keep a tensor as an output of the graph, for ``monitor.kept``.

    It is copied where it leaves, at run time.
    """
    recording = _recording.get()
    if recording is not None:
        recording.kept.append(tensor)
        recording.kept_as.append(what)


def record_statistics(tensor: Tensor, statistics: Mapping[str, str], *, fails: OnFailure | None = None) -> None:
    """Report statistics of a tensor, by the names of the records; in units of the unscaled loss.

    Args:
        tensor: What is measured.
        statistics: For each name of a record, a key of ``statistics.STATISTICS``.
        fails: What follows if the last figure is not 0.
    """
    recording = _recording.get()
    if recording is None:
        return
    recording.fails = fails
    in_units = {name: key for name, key in statistics.items() if recording.scale is not None and key in IN_UNITS}
    plain = {name: key for name, key in statistics.items() if name not in in_units}
    if tensor.device.type == "cuda" and not recording.is_opaque:
        # Each by itself: the kernel that computes it writes it into the pack, and no stack comes in between.
        groups = [{name: key} for name, key in (*plain.items(), *in_units.items())]
    else:
        groups = [group for group in (plain, in_units) if group]
    for group in groups:
        values = measure(tensor, list(group.values()), is_opaque=recording.is_opaque)
        if group.keys() <= in_units.keys():
            assert recording.scale is not None
            values = values / recording.scale
        recording.add(list(group), values)


@contextlib.contextmanager
def recording(
    device: torch.device,
    *,
    is_opaque: bool = False,
    scale: Tensor | None = None,
    states: StateScope | None = None,
) -> Iterator[Recording]:
    """Collect the reports inside the block; numbers become tensors on ``device``."""
    current = Recording(device=device, is_opaque=is_opaque, scale=scale, states=states)
    token = _recording.set(current)
    try:
        yield current
    finally:
        _recording.reset(token)
