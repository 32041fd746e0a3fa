"""The interface between the monitor and the guards of optimizers."""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from typing import Protocol

from torch import Tensor


class Guard(Protocol):
    """What watches an optimizer (``gr.guard``)."""

    def begin(self) -> None:
        """A backward begins."""
        ...

    def note(self, bad: Tensor, parameters: Sequence[weakref.ref[Tensor]]) -> None:
        """Take the verdict of one graph: 0-d float32 on its device, 1 if a check that skips failed."""
        ...

    @property
    def is_alive(self) -> bool:
        """Whether its optimizer is still there."""
        ...

    @property
    def skipped(self) -> int:
        """How many updates were skipped."""
        ...


class Guards:
    """The guards of one monitor."""

    def __init__(self) -> None:
        """Begin with none."""
        self._all: list[Guard] = []
        self._num_groups = 0

    def __bool__(self) -> bool:
        """Whether there is one."""
        return bool(self._all)

    def add(self, guard: Guard, num_groups: int) -> int:
        """Take one more; returns the number of its first group of parameters."""
        self._all.append(guard)
        self._num_groups += num_groups
        return self._num_groups - num_groups

    @property
    def alive(self) -> list[Guard]:
        """Those whose optimizer is still there."""
        return [guard for guard in self._all if guard.is_alive]

    @property
    def skipped(self) -> int:
        """How many updates all have skipped; waits for the device."""
        return sum(guard.skipped for guard in self._all)
