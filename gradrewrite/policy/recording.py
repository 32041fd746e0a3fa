"""Reports of actions while they are traced: records, clips, checks, kept tensors."""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING, TypeAlias

import torch
from torch import Tensor

from gradrewrite._compat import dtensors
from gradrewrite._utils.elements import MOST, names_of_elements
from gradrewrite.errors import CallbackError, UnsupportedGradientError
from gradrewrite.ir.reports import (
    KEPT,
    Check,
    HostBound,
    Kept,
    Leaf,
    LogFigures,
    NormClip,
    OnFailure,
    Output,
    Report,
    Scalars,
    StateUpdate,
    ValueClip,
)
from gradrewrite.numerics.measuring import measure
from gradrewrite.numerics.stages import reduce_all
from gradrewrite.numerics.statistics import (
    IN_UNITS,
    STATISTICS,
    UNSCALED,
    largest_of,
    mean_of,
    measure_shards,
    norm_of,
    share_of,
    shares_of,
    size_of,
)
from gradrewrite.policy.current import CURRENT
from gradrewrite.policy.state_store import StateKind, StateScope, random_stream

if TYPE_CHECKING:
    from torch.distributed.tensor import DTensor


@dataclass
class Recording:
    """The reports of one action while it is traced."""

    reports: list[Report[Leaf]] = field(default_factory=list)
    outputs: list[Tensor] = field(default_factory=list)  # the tensors of the leaves
    device: torch.device = field(default_factory=partial(torch.device, "cpu"))  # where numbers become tensors
    is_opaque: bool = False  # statistics are one opaque operation
    scale: Tensor | None = None  # that the action sees through
    states: StateScope | None = None  # of the actions here; None where they have none of their own
    _stream: StateKind = field(default_factory=random_stream)
    _num_draws: int = 0
    _drawn: Tensor | None = None  # from the stream

    def clear(self) -> None:
        """Remove all reports: a tracer may run a function more than once."""
        self.reports.clear()
        self.outputs.clear()
        self._num_draws = 0
        if self.states is not None:
            self.states.begin()

    def output(self, tensor: Tensor) -> int:
        """Add an output; returns its position."""
        self.outputs.append(tensor)
        return len(self.outputs) - 1

    def figure(self, value: Tensor) -> Leaf:
        """Add an output with one figure."""
        return Output(self.output(value))

    def figures(self, values: Tensor, count: int) -> tuple[Leaf, ...]:
        """Add a flat output with this number of figures."""
        number = self.output(values)
        return tuple(Output(number, element) for element in range(count))

    def draw(self) -> tuple[Tensor, int]:
        """Return the random stream of the action before its backward, and the number of the next draw from it."""
        assert self.states is not None
        if self._drawn is None or not self._num_draws:
            self._drawn = self.states.value(self._stream, self.device)
            self.states.set(self._stream, self.device, self._drawn + torch.arange(2, device=self.device))
        self._num_draws += 1
        return self._drawn, self._num_draws - 1

    def close(self) -> None:
        """Report the new values of states, as the last outputs."""
        if self.states is not None:
            carried = self.states.carried
            for key, (state, value) in self.states.updates.items():
                self.reports.append(StateUpdate(key, state, self.output(value), key in carried))


def record(name: str, value: Tensor | float) -> None:
    """Report a scalar or a short vector from inside a tensor function.

    The value leaves the graph with the other records of the backward, as float32 (float64 if any record
    is float64); the host reads it only when the monitor is asked. Outside a rewrite (a tensor function
    called by hand) nothing happens.

    The elements of a vector are the records ``name[0]@site``, ``name[1]@site``, ...;
    ``monitor.history("name@site", per="element")`` has one row for each backward. A run log keeps one list; tables
    and other logs have a few figures of all elements.

    Args:
        name: Name of the record; its address is ``name@site``. A second record of that name at the same
            site becomes ``name.2``.
        value: A real tensor with one element, or a number; or a vector ``[n]``, n from 2 to 4,096, with a length
            that is the same in every batch. NaN and infinities are reported as they are.

    Raises:
        CallbackError: ``value`` is no number and no such vector, or is complex; or ``name`` has an ``@``.

    Example:
        >>> def watch(g):
        ...     record("largest", g.abs().amax())
        ...     return g
    """
    recording = CURRENT.get()
    if recording is None:
        return
    tensor = value
    if not isinstance(tensor, Tensor):
        tensor = torch.full((), float(tensor), dtype=torch.float64, device=recording.device)
    if tensor.is_complex() or not _is_recorded(tensor.shape):
        raise CallbackError(
            f"gr.record({name!r}, ...): a record is one real number, or a vector of 2 to {MOST:,} in every batch; got "
            f"shape {tuple(tensor.shape)}, {tensor.dtype}; gr.keep keeps a tensor",
            code="record",
        )
    if "@" in str(name):
        raise CallbackError(
            f"gr.record({name!r}, ...): the name of a record has no '@', which separates it from its site",
            code="record",
        )
    number = tensor.numel()
    if number > 1:
        recording.reports.append(Scalars(names_of_elements(str(name), number), recording.figures(tensor, number), True))
        return
    figure = recording.figure(tensor.reshape(()) if tensor.dim() else tensor)
    recording.reports.append(Scalars((str(name),), (figure,)))


def _is_recorded(shape: torch.Size) -> bool:
    """Whether a tensor of this shape can be a record: one element, or a short vector of a known length."""
    if any(not isinstance(size, int) for size in shape):
        return False
    return shape.numel() == 1 or (len(shape) == 1 and 1 < shape[0] <= MOST)


def record_all(names: Sequence[str], values: Tensor) -> None:
    """Report the elements of a vector under these names, as ``record`` does."""
    recording = CURRENT.get()
    if recording is not None:
        recording.reports.append(Scalars(tuple(names), recording.figures(values, len(names))))


def record_norm_clip(
    name: str,
    norm: Tensor,
    bound: float | Tensor,
    *,
    is_computed: bool = False,
    log: tuple[Tensor, Tensor] | None = None,
    shares: tuple[Tensor, float] | None = None,
) -> None:
    """Report a clip by norm; the host computes its factor from norm and bound when records are read.

    A bound is an output of the graph if it is a tensor on a device, or ``is_computed`` in the graph. ``log`` is the
    tensor before and after the clip, if it has a log line; ``shares`` the norms of the members of a group,
    ``[members]``, and their order, if the group has one; see ``statistics.shares_of``.
    """
    recording = CURRENT.get()
    if recording is None:
        return
    own = recording.figure(norm.reshape(()) if norm.dim() else norm)
    if isinstance(bound, Tensor) and is_computed:
        limit: Leaf = recording.figure(bound.detach().to(norm.device))
    else:
        limit = _bound(recording, bound, norm.device)
    figures = None if log is None else _clip_figures(recording, *log)[1]
    members = None
    if shares is not None:
        norms, norm_type = shares
        members = recording.figures(shares_of(norms, norm_type), norms.numel())
    recording.reports.append(NormClip(name, own, limit, norm.dtype == torch.float64, figures, members))


def record_value_clip(before: Tensor, after: Tensor, limit: float | Tensor | None) -> None:
    """Report a clip by value; ``limit`` is the largest absolute value that passes, None if the bounds differ in size.

    It acted if an element changed; NaN is no change. Empty tensors: not acted, largest and mean value NaN.
    """
    recording = CURRENT.get()
    if recording is None:
        return
    (norm_before, norm_after, share), figures = _clip_figures(recording, before, after, with_strength=True)
    bound = None if limit is None else _bound(recording, limit, before.device)
    recording.reports.append(ValueClip(norm_before, norm_after, share, figures, bound))


def _bound(recording: Recording, bound: float | Tensor, device: torch.device) -> Leaf:
    """Return the leaf of a bound: an output if it is on a device; one in host memory is read there."""
    if isinstance(bound, Tensor) and bound.device.type != "cpu":
        return recording.figure(bound.detach().to(device).clamp(min=0))
    return HostBound(bound)


_ClipFigures: TypeAlias = tuple[tuple[Leaf, ...], LogFigures[Leaf]]


def _clip_figures(recording: Recording, before: Tensor, after: Tensor, *, with_strength: bool = False) -> _ClipFigures:
    """Return the figures of a log line, behind those of the strength of a clip where these are asked for.

    The latter are the norms before and after the clip, of which the host makes a factor (a quotient in the graph would
    be one more launch), and the share of the elements that changed.
    """
    if dtensors.is_dtensor(before):
        return _clip_figures_of_shards(recording, before, after, with_strength=with_strength)
    size = size_of(before)
    changed = _changed(before, after)
    strength: tuple[Leaf, ...] = ()
    if with_strength:
        figures = norm_of(before), norm_of(after), share_of(changed)
        strength = tuple(map(recording.figure, figures))
        acted = figures[2] > 0
    else:
        acted = reduce_all(torch.any, changed)
    largest, mean = recording.figure(largest_of(size)), recording.figure(mean_of(size))
    return strength, LogFigures(largest, mean, recording.figure(acted.to(size.dtype)))


def _changed(before: Tensor, after: Tensor) -> Tensor:
    """Return a mask of the elements that changed; NaN is no change."""
    return (after != before) & (before == before)


def _clip_figures_of_shards(
    recording: Recording, before: DTensor, after: Tensor, *, with_strength: bool
) -> _ClipFigures:
    unchanged = _changed(before, after).logical_not().to(torch.float32)
    reports: list[tuple[Tensor, tuple[str, ...]]]
    reports = [(before, ("max_abs", "mean_abs", "norm")), (after, ("norm",)), (unchanged, ("zeros",))]
    figures = measure_shards(
        [(tensor, names) for tensor, names in reports if dtensors.is_dtensor(tensor)],
        lambda part, names: measure(part, names, is_opaque=recording.is_opaque),
    )
    largest, mean, norm_before, norm_after, share = figures.unbind()
    strength = tuple(map(recording.figure, (norm_before, norm_after, share))) if with_strength else ()
    clipped = (share > 0).to(mean.dtype)
    return strength, LogFigures(*map(recording.figure, (largest, mean, clipped)))


def keep(name: str, tensor: Tensor) -> None:
    """Keep a tensor of a tensor function in ``monitor.kept(name)``.

    A copy of it leaves the graph, on its device, for as long as the monitor has no later backward. In a loop each
    iteration keeps one. It may have any shape and dtype; NaN and infinities are kept. Outside a rewrite (a tensor
    function called by hand) nothing happens.

    Args:
        name: Name in ``model.monitor.kept(name)``, which has the tensors by site; of a group the key is the text
            ``group:default``. A second tensor of that name at the same site becomes ``name.2``.
        tensor: What is kept.

    Raises:
        CallbackError: ``tensor`` is none; or ``name`` is empty, has an ``@``, or is one of ``Keep``: ``"tensor"``,
            ``"example_norms"``, ``"second_moment"``.

    Example:
        >>> import gradrewrite as gr
        >>> def drop_small(g):
        ...     mask = g.abs() > 0.5
        ...     gr.keep("mask", mask)
        ...     return g * mask
        >>> model = gr.transform(torch.nn.Linear(2, 1), gr.on("gradient:weight", drop_small))
        >>> model(torch.tensor([[0.25, 2.0]])).sum().backward()
        >>> model.monitor.kept("mask")["gradient:weight"]
        tensor([[False,  True]])
    """
    recording = CURRENT.get()
    if recording is None:
        return
    if not isinstance(tensor, Tensor):
        raise CallbackError(f"gr.keep({name!r}, ...): a tensor is kept, got {type(tensor).__name__}", code="record")
    if not isinstance(name, str) or not name or "@" in name or name in KEPT:
        raise CallbackError(
            f"gr.keep({name!r}, ...): a name is a text without '@', and none of {', '.join(map(repr, KEPT))}, which "
            "Keep has",
            code="record",
        )
    keep_as(tensor, name)


def keep_as(tensor: Tensor, what: str = "tensor") -> None:
    """Keep a tensor as an output of the graph, for ``monitor.kept``; it is copied where it leaves, at run time."""
    recording = CURRENT.get()
    if recording is not None:
        recording.reports.append(Kept(what, recording.output(tensor)))


def record_statistics(tensor: Tensor, statistics: Mapping[str, str], *, fails: OnFailure | None = None) -> None:
    """Report statistics of a tensor in units of the unscaled loss: keys of ``STATISTICS``, by the names of the records.

    ``fails`` says what follows if the last figure is not 0.
    """
    unordered = [name for name, key in statistics.items() if not STATISTICS[key].takes_complex]
    if tensor.is_complex() and unordered:
        raise UnsupportedGradientError(
            f"Observe({unordered[0]!r}) needs real numbers and the tensor is {tensor.dtype}; use 'max_abs'"
        )
    recording = CURRENT.get()
    if recording is None:
        return
    in_units = {name: key for name, key in statistics.items() if recording.scale is not None and key in IN_UNITS}
    plain = {name: key for name, key in statistics.items() if name not in in_units}
    if tensor.device.type == "cuda" and not recording.is_opaque:
        # Each by itself: the kernel that computes it writes it into the pack, and no stack comes in between. Parts of
        # one statistic are computed together.
        ordered = [*plain.items(), *in_units.items()]
        groups = [dict(own) for _, own in itertools.groupby(ordered, lambda item: STATISTICS[item[1]].traced)]
    else:
        unscaled = {name: in_units.pop(name) for name, key in list(in_units.items()) if key in UNSCALED}
        groups = [group for group in (plain, in_units, unscaled) if group]
    figures: dict[str, Leaf] = {}
    for group in groups:
        measured, scale = tensor, None if IN_UNITS.isdisjoint(group.values()) else recording.scale
        if scale is not None and not UNSCALED.isdisjoint(group.values()):
            measured, scale = tensor.to(torch.promote_types(tensor.dtype, torch.float32)) / scale, None
        values = measure(measured, list(group.values()), is_opaque=recording.is_opaque)
        values = values if scale is None else values / scale
        figures |= zip(group, recording.figures(values, len(group)), strict=True)
    check = figures.popitem() if fails is not None else None
    if figures:
        recording.reports.append(Scalars(tuple(figures), tuple(figures.values())))
    if check is not None and fails is not None:
        recording.reports.append(Check(*check, fails))


@contextlib.contextmanager
def recording(
    device: torch.device, *, is_opaque: bool = False, scale: Tensor | None = None, states: StateScope | None = None
) -> Iterator[Recording]:
    """Collect the reports inside the block; numbers become tensors on ``device``."""
    current = Recording(device=device, is_opaque=is_opaque, scale=scale, states=states)
    token = CURRENT.set(current)
    try:
        yield current
    finally:
        CURRENT.reset(token)
