"""Buffers that training forwards write, as they were before the forwards of an update."""

from __future__ import annotations

import weakref
from collections.abc import Iterator, Mapping
from typing import NamedTuple

import torch
from torch import Tensor, nn

from gradrewrite._compat import nn_modules, optimizers
from gradrewrite.monitoring.step_recorder import StepRecorder


class _Copied(NamedTuple):
    buffer: weakref.ref[Tensor]
    copy: Tensor


class _Seen(NamedTuple):
    """A buffer when a call began."""

    module: weakref.ref[nn.Module]
    name: str
    buffer: Tensor
    version: int


class WrittenBuffers:
    """The buffers of one policy's models that were written since the last update, for updates that are skipped.

    What compiled graphs write is known when they are compiled. What other code writes, outside of regions or behind a
    graph break, is learned from versions in a call in which all buffers are copied: a buffer that it writes in later
    calls alone is not restored the first time, and one that it gives to ``functional.batch_norm`` by hand has no
    version and is not restored at all.
    """

    def __init__(self, recorder: StepRecorder) -> None:
        self._recorder = recorder
        self._update = -1  # number of the update that the copies are for
        self._copied: dict[int, _Copied] = {}  # by identity of the buffer
        self._replaced: dict[tuple[int, str], tuple[_Seen, Tensor]] = {}  # by module and name: another tensor now
        self._by_others: set[tuple[int, str]] | None = None  # written by code outside of graphs; None before a call
        self.may_be_scaled = False  # whether a GradScaler may skip updates

    def note_scaling(self, is_scaled: bool) -> None:
        """Note that a GradScaler may be in use."""
        self.may_be_scaled |= is_scaled

    @property
    def num_copied(self) -> int:
        """Number of copies since the last update."""
        return len(self._copied)

    @property
    def bytes_copied(self) -> int:
        """Their size."""
        return sum(one.copy.nbytes for one in self._copied.values())

    def copy(self, buffers: Mapping[int, Tensor]) -> dict[int, Tensor]:
        """Copy buffers that are about to be written, unless this was done since the last update; return new copies."""
        self._begin()
        new = {at: buffer.detach().clone() for at, buffer in buffers.items() if not self._is_copied(buffer)}
        for at, made in new.items():
            self._copied[id(buffers[at])] = _Copied(weakref.ref(buffers[at]), made)
        return new

    def _is_copied(self, buffer: Tensor) -> bool:
        known = self._copied.get(id(buffer))
        return known is not None and known.buffer() is buffer

    def before_call(self, model: nn.Module, *, in_parts: bool) -> list[_Seen]:
        """Note the buffers of a model before a call; copy those written outside of graphs."""
        self._begin()
        seen = list(_buffers_of(model))
        if in_parts:
            own = self._by_others
            self.copy({n: s.buffer for n, s in enumerate(seen) if own is None or _key(s) in own})
            self._by_others = own or set()
        return seen

    def after_call(self, seen: list[_Seen]) -> None:
        """Note the written and the replaced buffers of a call."""
        for one in seen:
            module = one.module()
            now = None if module is None else module._buffers.get(one.name)
            if now is not None and now is not one.buffer:
                first, _ = self._replaced.get(_key(one), (one, now))
                self._replaced[_key(one)] = first, now
            elif self._by_others is not None and (
                one.buffer._version != one.version or nn_modules.updates_statistics(module)
            ):
                self._by_others.add(_key(one))

    def restore(self, skipped: Tensor | None = None) -> None:
        """Restore all buffers, or, with a 0-d number on a device, only if that is above 0."""
        found = [(b, one.copy) for one in self._copied.values() if (b := one.buffer()) is not None]
        with torch.no_grad():
            decision = None if skipped is None else _Decision(skipped)
            if decision is not None:
                for buffer, copy in found:
                    decision.select(copy, buffer)
            elif found:
                optimizers.foreach_copy([b for b, _ in found], [copy for _, copy in found])
            for one, now in self._replaced.values():
                self._put_back(one, now, decision)

    def restore_present(self, skipped: Tensor) -> None:
        """Restore the buffers that forwards since the last update have written, if there are copies."""
        if self._copied and self._update == self._recorder.update_key:
            self.restore(skipped)

    def _put_back(self, one: _Seen, now: Tensor, decision: _Decision | None) -> None:
        module = one.module()
        if module is None or module._buffers.get(one.name) is not now:
            return
        alike = (now.shape, now.dtype, now.device) == (one.buffer.shape, one.buffer.dtype, one.buffer.device)
        if decision is not None and alike:
            decision.select(one.buffer, now)
        elif decision is None or bool(decision.skipped > 0):
            module._buffers[one.name] = one.buffer

    def _begin(self) -> None:
        if self._update != self._recorder.update_key:
            self._update = self._recorder.update_key
            self._copied.clear()
            self._replaced.clear()


class _Decision:
    """Whether an update is skipped, a number with one element that is above 0, compared once on each device."""

    def __init__(self, skipped: Tensor) -> None:
        self.skipped = skipped
        self._known: dict[torch.device, Tensor] = {}

    def select(self, copy: Tensor, buffer: Tensor) -> None:
        """Write the copy into the buffer if the update is skipped."""
        device = buffer.device
        if device not in self._known:
            self._known[device] = self.skipped.to(device, non_blocking=True).reshape(()) > 0
        torch.where(self._known[device], copy, buffer, out=buffer)


def _buffers_of(model: nn.Module) -> Iterator[_Seen]:
    for module in model.modules():
        for name, buffer in module._buffers.items():
            if buffer is not None and not buffer.is_inference():
                yield _Seen(weakref.ref(module), name, buffer, buffer._version)


def _key(seen: _Seen) -> tuple[int, str]:
    return id(seen.module()), seen.name
