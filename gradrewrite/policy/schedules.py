"""Schedules: settings of actions as functions of the step."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from gradrewrite.errors import PolicyError
from gradrewrite.policy.current import current_recording
from gradrewrite.policy.numbers import python_number


@dataclass(frozen=True, slots=True)
class Schedule:
    """A setting as a function of the step, in place of a number or tensor.

    A tensor function that closes over it reads it as ``schedule.value``. The function runs on the host, once for each
    step, and the graph reads what it returned from a tensor on the device: nothing is compiled again and nothing waits.
    The step is the number of ``step`` calls of a guarded optimizer before, skipped ones too (of several optimizers that
    of the one with most), or of backwards where no optimizer has a guard; it is 0 at first, and part of
    ``gr.state_dict(model)``. It never goes back: where an optimizer is guarded, unguarded or deleted (a new phase of
    training), those that have a guard then go on from the step that was reached, each by its own ``step`` calls from
    there.

    Attributes:
        fn: ``fn(step) -> number``. Infinity bounds nothing; where a bound has to be > 0, 0 scales to 0 and a negative
            number is an error.

    Raises:
        TypeError: ``fn`` cannot be called.
        PolicyError: (from the backward or the step) ``fn`` returned no number, NaN, or one that is too small.

    Example:
        >>> from gradrewrite.passes import ClipByNorm
        >>> ClipByNorm(Schedule.linear(10.0, 1.0, steps=1000))
        ClipByNorm(Schedule.linear(10.0, 1.0, steps=1000))
    """

    fn: Callable[[int], float]

    def __post_init__(self) -> None:
        """Refuse values other than functions."""
        if not callable(self.fn):
            raise TypeError(f"gr.Schedule takes a function of the step, got {self.fn!r}; a number needs no schedule")

    @classmethod
    def constant(cls, value: float) -> Schedule:
        """One value at every step."""
        return cls(_Between("constant", value, value, 1))

    @classmethod
    def linear(cls, start: float, end: float, *, steps: int) -> Schedule:
        """From ``start`` at step 0 in a straight line to ``end`` at ``steps``, and ``end`` from there on."""
        return cls(_Between("linear", start, end, steps))

    @classmethod
    def cosine(cls, start: float, end: float, *, steps: int) -> Schedule:
        """From ``start`` to ``end`` along half a period of a cosine, ``end + (start - end) (1 + cos(pi t)) / 2``."""
        return cls(_Between("cosine", start, end, steps))

    def at(self, step: int, least: float = -math.inf) -> float:
        """Evaluate the function; PolicyError if it returns no number of at least ``least``."""
        number = python_number(self.fn(step))
        if isinstance(number, bool) or not isinstance(number, int | float) or math.isnan(number) or number < least:
            wanted = "a number" if least == -math.inf else f"a number >= {least:g}"
            raise PolicyError(f"{self!r} returned {number!r} at step {step}, and {wanted} is wanted", code="schedule")
        return float(number)

    @property
    def value(self) -> Tensor:
        """The value at the step at hand, for a tensor function.

        0-d, float64 (float32 on MPS), on the device of the gradient. In a function that is called by hand that of step
        0, on the CPU.
        """
        recording = current_recording()
        if recording is None or recording.states is None:
            return torch.tensor(self.at(0), dtype=torch.float64)
        return recording.states.store.schedule(self, recording.device, -math.inf)

    def __repr__(self) -> str:
        """As the call that makes it."""
        return f"Schedule.{self.fn!r}" if isinstance(self.fn, _Between) else f"Schedule({self.fn!r})"


@dataclass(frozen=True, slots=True)
class _Between:
    kind: str
    start: float
    end: float
    steps: int

    def __post_init__(self) -> None:
        for name in ("start", "end", "steps"):
            object.__setattr__(self, name, python_number(getattr(self, name)))
        for number in (self.start, self.end):
            if isinstance(number, bool) or not isinstance(number, int | float) or math.isnan(number):
                raise TypeError(f"gr.Schedule.{self.kind} takes numbers, got {number!r}")
        if isinstance(self.steps, bool) or not isinstance(self.steps, int) or self.steps < 1:
            raise ValueError(f"gr.Schedule.{self.kind}: steps is a whole number >= 1, got {self.steps!r}")

    def __call__(self, step: int) -> float:
        if step >= self.steps or self.kind == "constant":
            return self.end
        t = step / self.steps
        if self.kind == "linear":
            return self.start + (self.end - self.start) * t
        return self.end + (self.start - self.end) * (1 + math.cos(math.pi * t)) / 2

    def __repr__(self) -> str:
        if self.kind == "constant":
            return f"constant({self.end!r})"
        return f"{self.kind}({self.start!r}, {self.end!r}, steps={self.steps!r})"
