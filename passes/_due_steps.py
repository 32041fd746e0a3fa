"""Actions in some of the steps."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Protocol, runtime_checkable

import torch
from torch import Tensor

from gradrewrite.passes._settings import Bound, now
from gradrewrite.passes._simple import NanToNum, Scale, Zero
from gradrewrite.policy.actions import Bounded, describe, insertion_at, is_action, kinds_of
from gradrewrite.policy.insertions import OF_OPS, Action, Insertion, ReplaceTensor
from gradrewrite.policy.numbers import python_number
from gradrewrite.policy.schedules import Schedule
from gradrewrite.sites import Kind, Site


@runtime_checkable
class HasBounds(Bounded, Protocol):
    """An action that is idle at infinite bounds."""

    def with_bounds(self, change: Callable[[Any, float], Any]) -> Action:
        """Return the action with other bounds, each from the bound and the infinity that bounds nothing."""


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
        is_known = isinstance(self.action, HasBounds | Scale | Zero | NanToNum) and not isinstance(self.action, type)
        if not (is_known or _is_function(self.action)):
            raise TypeError(
                f"{name} takes a clip by norm or value, Scale, Zero, NanToNum or a tensor function, got "
                f"{describe(self.action)}; measurements have an interval, Observe('norm', every=n)"
            )

    @property
    def kinds(self) -> frozenset[Kind]:
        """Those of the action; the backward of an op is the same in all steps."""
        return kinds_of(self.action) - OF_OPS

    def check_bounds(self) -> None:
        """Raise ValueError if a bound is a tensor that cannot be one now."""
        if isinstance(self.action, HasBounds):
            self.action.check_bounds()

    def at(self, site: Site) -> Insertion:
        """Return the insertion at a site, as it is in these steps."""
        found = insertion_at(self.action, replace(site, kind="error") if site.kind in OF_OPS else site)
        if site.kind not in self.kinds:
            return replace(found, action=self, kinds=self.kinds)
        made = insertion_at(self._in_due_steps(found.action), site)
        return replace(made, is_by_site=found.is_by_site, kinds=self.kinds)

    def _in_due_steps(self, action: Any) -> Any:
        if not isinstance(action, HasBounds):
            choice = Schedule(self._choice(1.0, 0.0))
            return _Chosen(repr(self), choice, action)
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

    def __repr__(self) -> str:
        return self.when

    def at(self, site: Site) -> Insertion:
        found = insertion_at(self.action, replace(site, kind="error") if site.kind in OF_OPS else site)
        assert isinstance(found.effect, ReplaceTensor)
        effect = ReplaceTensor(partial(self._choose, found.effect.run), found.effect.reads)
        return Insertion(self, effect, found.kinds, has_units=found.has_units)

    def _choose(self, run: Callable[..., Tensor], tensor: Tensor, *values: Tensor) -> Tensor:
        made, is_due = run(tensor, *values), now(self.choice, tensor.device)
        return torch.where(is_due > 0, made, tensor) if isinstance(is_due, Tensor) else made if is_due else tensor


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
