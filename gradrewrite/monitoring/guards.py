"""The guards of optimizers at a recorder, and their seats."""

from __future__ import annotations

import itertools
import threading
import weakref
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Protocol

from torch import Tensor


class _SkipGuard(Protocol):
    """Watches an optimizer (``gr.guard``)."""

    def begin(self) -> None: ...  # a backward begins
    def note_backward(self) -> None: ...  # a rewritten backward runs, whether or not it records anything
    def count_backward(self, backward: int) -> None: ...  # the same, with the number of the backward
    def note_loss(self, loss: Tensor) -> None: ...  # a loss was logged, a copy with one element
    def follow(self) -> None: ...  # joins the recorders of the models' current monitors
    def is_cleared(self) -> bool: ...  # whether none of its gradients is left
    def leave(self) -> None: ...  # its optimizer is gone: its steps do not count any more

    # Notes a graph's verdict: 0-d float32, 1 if a check that skips failed.
    def note(self, bad: Tensor, parameters: Sequence[weakref.ref[Tensor]]) -> None: ...

    @property
    def is_alive(self) -> bool: ...  # whether its optimizer is still there
    @property
    def has_stepped(self) -> bool: ...  # whether its optimizer has made a step
    @property
    def has_step_sites(self) -> bool: ...  # whether it runs the actions at step sites
    @property
    def may_have_step_actions(self) -> bool: ...  # whether these may exist
    @property
    def makes_next_record(self) -> bool: ...  # whether a backward has run since its last step, and they may exist
    @property
    def num_skipped(self) -> Tensor | None: ...  # skipped updates, on its device; None if none was counted


@dataclass(frozen=True, slots=True)
class Seat:
    """The seat of a guard at a recorder: its numbers in records; that of a deleted guard goes to the next one."""

    number: int  # its number, in the names of its groups
    first_group: int  # number of the first param group of its optimizer
    num_groups: int  # how many there are


class Guards:
    """The guards at one recorder with their seats, in order."""

    def __init__(self, lock: threading.RLock, num_steps: Callable[[], int]) -> None:
        """Begin without guards.

        ``lock`` is held while they change; ``num_steps`` returns the number of steps so far.
        """
        self._lock, self._num_steps = lock, num_steps
        self._guards: list[_SkipGuard] = []
        self._seats: dict[int, Seat] = {}  # by identity of the guard
        self._left: list[Tensor] = []  # numbers of updates that guards which are gone have skipped, on their devices
        self.closed = -1  # number of the last step that belongs to guards which were removed; -1 if there is none

    def __iter__(self) -> Iterator[_SkipGuard]:
        return iter(self._guards)

    def __len__(self) -> int:
        return len(self._guards)

    @property
    def live(self) -> list[_SkipGuard]:
        """The guards of existing optimizers; those of deleted ones go."""
        with self._lock:
            if not self._guards:
                let_guards_follow()
            self._let_go()
            return list(self._guards)

    @property
    def num_skipped(self) -> list[Tensor]:
        """Numbers of skipped updates, one a guard, on their devices."""
        return [*self._left, *(count for guard in self._guards if (count := guard.num_skipped) is not None)]

    def is_cleared(self) -> bool:
        """Whether no guarded optimizer has gradients."""
        return all(guard.is_cleared() for guard in self._guards if guard.is_alive)

    def add(self, guard: _SkipGuard, num_groups: int) -> Seat:
        """Add a guard, told of every check that skips; return its seat."""
        with self._lock:
            self._let_go()
            self._guards.append(guard)
            _all.setdefault(id(guard), guard)
            self._seats[id(guard)] = seat = self._free_seat(num_groups)
            return seat

    def move_up(self, guard: _SkipGuard) -> Seat:
        """Give a guard the first free seat, its own or that of one that is gone, and return it."""
        with self._lock:
            self._let_go()
            old = self._seats.pop(id(guard))
            self._seats[id(guard)] = seat = self._free_seat(old.num_groups)
            return seat

    def remove(self, guard: _SkipGuard) -> None:
        """Remove a guard; later guards begin records of their own."""
        with self._lock:
            self._guards.remove(guard)
            del self._seats[id(guard)]
            self.closed = self._num_steps() - 1
            if guard.num_skipped is not None:
                self._left.append(guard.num_skipped)

    def _let_go(self) -> None:
        for guard in [guard for guard in self._guards if not guard.is_alive]:
            guard.leave()
            self.remove(guard)

    def _free_seat(self, num_groups: int) -> Seat:
        """Return the first number, and the first numbers of groups, that no guard has."""
        taken = sorted(self._seats.values(), key=lambda seat: seat.first_group)
        numbers = {seat.number for seat in taken}
        first = 0
        for seat in taken:
            if first + num_groups > seat.first_group:
                first = max(first, seat.first_group + seat.num_groups)
        return Seat(next(n for n in itertools.count() if n not in numbers), first, num_groups)


_all: weakref.WeakValueDictionary[int, _SkipGuard] = weakref.WeakValueDictionary()  # by identity, in order


def let_guards_follow() -> None:
    """Let all guards follow their models to new monitors, in order of creation."""
    for guard in list(_all.values()):
        guard.follow()
