"""Actions in some of the steps."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from gradrewrite.passes._settings import Bound, now
from gradrewrite.passes._simple import NanToNum, Scale, Zero
from gradrewrite.policy.actions import Bounded, describe, is_action, kinds_of, stands_for, takes_value
from gradrewrite.policy.numbers import python_number
from gradrewrite.policy.schedules import Schedule
from gradrewrite.sites import Kind, Site


class _DueSteps:
    """An action in steps that the number of the step chooses."""

    __slots__ = ()

    steps: int
    action: Any

    def __post_init__(self) -> None:
        name, number = type(self).__name__, python_number(self.steps)
        object.__setattr__(self, "steps", number)
        least = 1 if name == "Every" else 0
        if isinstance(number, bool) or not isinstance(number, int) or number < least:
            raise ValueError(f"{name}: steps is a whole number >= {least}, got {self.steps!r}")
        is_known = isinstance(self.action, Bounded | Scale | Zero | NanToNum) and not isinstance(self.action, type)
        if not (is_known or _is_function(self.action)):
            raise TypeError(
                f"{name} takes a clip by norm or value, Scale, Zero, NanToNum or a tensor function, got "
                f"{describe(self.action)}; measurements have an interval, Observe('norm', every=n)"
            )

    @property
    def kinds(self) -> frozenset[Kind]:
        """Those of the action."""
        return kinds_of(self.action)

    def check_bounds(self) -> None:
        """Raise ValueError if a bound is a tensor that cannot be one now."""
        if isinstance(self.action, Bounded):
            self.action.check_bounds()

    def stands_for(self, site: Site) -> Sequence[Any]:
        """Return the action with bounds that are infinite in other steps, or with a choice of its result."""
        return [self._in_due_steps(action) for action in stands_for(self.action, site)]

    def _in_due_steps(self, action: Any) -> Any:
        if not isinstance(action, Bounded):
            choice = Schedule(self._choice(1.0, 0.0))
            return (_ChosenOfTwo if takes_value(action) else _Chosen)(repr(self), choice, action)
        return action.with_bounds(self._bound)

    def _bound(self, bound: Bound, off: float) -> Schedule:
        if isinstance(bound, Tensor):
            raise TypeError(
                f"{self!r}: its bound may not be a tensor; fill that with {off} by hand, or give a gr.Schedule"
            )
        return Schedule(self._choice(bound, off))

    def _choice(self, on: float | Schedule, off: float) -> _Choice:
        return _Choice(type(self).__name__, self.steps, on, off)


@dataclass(frozen=True, slots=True)
class _Choice:
    """A number in due steps, and another one in the others."""

    name: str
    steps: int
    on: float | Schedule
    off: float

    def __call__(self, step: int) -> float:
        is_due = step % self.steps == 0 if self.name == "Every" else step >= self.steps
        if not is_due:
            return self.off
        return self.on.at(step) if isinstance(self.on, Schedule) else self.on

    def __repr__(self) -> str:
        return f"{self.name}({self.steps}, {self.on!r})"


@dataclass(frozen=True, slots=True)
class _Chosen:
    """The result of an action in due steps; else the tensor, bit for bit."""

    when: str  # as the call that makes it
    choice: Schedule
    action: Any

    @property
    def kinds(self) -> frozenset[Kind]:
        return kinds_of(self.action)

    @property
    def has_units(self) -> bool:
        return not is_action(self.action) or bool(self.action.has_units)

    def __repr__(self) -> str:
        return self.when

    def apply(self, tensor: Tensor) -> Tensor:
        return self._choose(tensor, self._run(tensor))

    def _run(self, *given: Tensor) -> Tensor:
        made: Tensor = (self.action.apply if is_action(self.action) else self.action)(*given)
        return made

    def _choose(self, tensor: Tensor, made: Tensor) -> Tensor:
        is_due = now(self.choice, tensor.device)
        return torch.where(is_due > 0, made, tensor) if isinstance(is_due, Tensor) else (made if is_due else tensor)


class _ChosenOfTwo(_Chosen):
    """The same of a function of two: a gradient and its parameter, activation or input."""

    __slots__ = ()

    def apply(self, tensor: Tensor, value: Tensor) -> Tensor:  # type: ignore[override]
        return self._choose(tensor, self._run(tensor, value))


@dataclass(frozen=True, slots=True, repr=False)
class Every(_DueSteps):
    """An action in steps 0, n, 2n, ..., where the number of the step is that of ``gr.Schedule``.

    In the other steps not a bit changes, and a clip records ``factor`` 1 and an infinite ``bound``. Nothing is compiled
    again and nothing waits: a clip has its bound from a tensor that the host fills once a step; of other actions the
    result is computed in every step and chosen on the device, so that what a tensor function sets (``gr.State``) and
    records, it does in every step.

    Attributes:
        steps: n, a whole number >= 1.
        action: ``ClipByNorm``, ``ClipByGlobalNorm``, ``ClipByValue`` or ``AdaptiveClip`` with bounds that are no
            tensors; ``Scale``, ``Zero``, ``NanToNum``; or a tensor function.

    Raises:
        ValueError: ``steps`` is no such number.
        TypeError: ``action`` is another one.
        PolicyError: (at the rewrite) A bound is a tensor.

    Example:
        >>> from gradrewrite.passes import ClipByNorm
        >>> Every(10, ClipByNorm(1.0))
        Every(10, ClipByNorm(1.0))
    """

    steps: int
    action: Any

    def __repr__(self) -> str:
        """As the call that makes it."""
        return f"Every({self.steps}, {self.action!r})"


@dataclass(frozen=True, slots=True, repr=False)
class After(_DueSteps):
    """An action from step n on; see ``Every``.

    Attributes:
        steps: n, a whole number >= 0.
        action: As of ``Every``.

    Raises:
        ValueError: ``steps`` is no such number.
        TypeError: As of ``Every``.

    Example:
        >>> from gradrewrite.passes import ClipByGlobalNorm
        >>> After(1000, ClipByGlobalNorm(1.0))
        After(1000, ClipByGlobalNorm(1.0))
    """

    steps: int
    action: Any

    def __repr__(self) -> str:
        """As the call that makes it."""
        return f"After({self.steps}, {self.action!r})"


def _is_function(action: Any) -> bool:
    return callable(action) and not is_action(action) and not isinstance(action, type)
