"""Checks of settings shared by several actions."""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable, Mapping
from dataclasses import MISSING, dataclass, fields, replace
from typing import Any, TypeAlias

import torch
from torch import Tensor

from gradrewrite._utils.formatting import describe_callable
from gradrewrite.errors import PolicyError
from gradrewrite.policy.current import current_recording
from gradrewrite.policy.numbers import python_number
from gradrewrite.policy.schedules import Schedule
from gradrewrite.sites import Pattern, Site

Bound: TypeAlias = float | Tensor | Schedule

# Statistics in the log line of a clip, by the names of their records.
LOGGED = {"max_abs": "max_abs", "mean_abs": "mean_abs"}


def store_python_numbers(action: Any) -> None:
    """Store the numbers among the settings of a frozen action, such as numpy's scalars, as Python numbers."""
    for field in fields(action):
        if field.init:
            object.__setattr__(action, field.name, python_number(getattr(action, field.name)))


def check_number(action: str, name: str, value: object) -> None:
    """A setting is a real number other than NaN, a real tensor with one element, or a schedule."""
    if isinstance(value, Schedule):
        value.at(0)
    elif isinstance(value, Tensor):
        if value.numel() != 1 or value.is_complex() or value.layout is not torch.strided:
            raise ValueError(
                f"{action}: {name} as a tensor has one real element, got shape {tuple(value.shape)}, {value.dtype}"
            )
    elif isinstance(value, bool) or not isinstance(value, int | float):
        raise TypeError(f"{action}: {name} is a number or a tensor with one element, or a gr.Schedule, got {value!r}")
    elif math.isnan(value):
        raise ValueError(f"{action}: {name} must not be NaN")


def check_positive(action: str, name: str, value: Any) -> None:
    """A bound that has to be > 0, infinity included; one that follows a schedule >= 0."""
    check_number(action, name, value)
    if isinstance(value, Schedule):
        value.at(0, least=0.0)
    elif not isinstance(value, Tensor) and not value > 0:
        raise ValueError(f"{action}: {name} must be > 0, got {value!r}")


def site_bounds(action: str, name: str, value: Any) -> SiteBounds | None:
    """Return bounds by site where a setting is a mapping or a function; None for another one.

    TypeError or ValueError if a mapping has something else than bounds > 0 by pattern.
    """
    if isinstance(value, Mapping):
        if not value:
            raise ValueError(f"{action}: {name} has no bound; give one by pattern, as {{'*': 1.0}}")
        for pattern, bound in value.items():
            Pattern.parse(pattern)
            check_positive(action, f"{name}[{pattern!r}]", bound)
        return SiteBounds(action, name, value)
    return SiteBounds(action, name, value) if inspect.isroutine(value) else None


@dataclass(frozen=True, slots=True)
class SiteBounds:
    """Bounds that follow from the site: by pattern, the first that matches, or by a function."""

    action: str
    name: str
    value: Mapping[str, Bound] | Callable[[Site], Bound]

    def at(self, site: Site) -> Bound:
        """Return the bound at a site; PolicyError without one."""
        if not isinstance(self.value, Mapping):
            return self.value(site)
        for text, bound in self.value.items():
            pattern = Pattern.parse(text)
            # A pattern without a kind is one of names: step, param, state and saved sites match no such rule.
            if pattern.matches(site if pattern.kind is not None else replace(site, kind="gradient")):
                return bound
        known = ", ".join(map(repr, self.value))
        raise PolicyError(
            f"{site}: {self.action} has no {self.name} there: its patterns are {known}. The pattern '*' matches all "
            "other sites; math.inf clips nothing"
        )

    def check(self) -> None:
        """Raise ValueError if a tensor among the bounds is negative now."""
        for pattern, bound in self.value.items() if isinstance(self.value, Mapping) else ():
            check_not_negative(self.action, f"{self.name}[{pattern!r}]", bound)


def check_not_negative(action: str, name: str, value: object) -> None:
    """A bound that is a tensor is not negative now; later it acts as ``max(bound, 0)``."""
    if isinstance(value, Tensor) and value.device.type != "meta" and bool(value < 0):
        raise ValueError(
            f"{action}: {name} must not be negative, and the tensor is {value.item():g}; write a bound > 0 into it"
        )


def check_norm(action: str, max_norm: object, norm_type: float) -> None:
    """Bounds and orders of a norm clip are > 0, infinity included."""
    check_positive(action, "max_norm", max_norm)
    if isinstance(norm_type, bool) or not isinstance(norm_type, int | float):
        raise TypeError(f"{action}: norm_type is a number, got {norm_type!r}")
    if not norm_type > 0:
        raise ValueError(f"{action}: norm_type must be > 0, got {norm_type!r}")


def check_examples(action: str, loss_reduction: str, batch_dim: int) -> None:
    """Refuse a reduction of the loss or a batch dimension that there is not."""
    if loss_reduction not in ("mean", "sum"):
        raise ValueError(f'{action}: loss_reduction is "mean" or "sum", got {loss_reduction!r}')
    if isinstance(batch_dim, bool) or not isinstance(batch_dim, int):
        raise TypeError(f"{action}: batch_dim is an integer, got {batch_dim!r}")
    if batch_dim < 0:
        raise ValueError(f"{action}: batch_dim must be >= 0, got {batch_dim}")


def short_repr(action: Any) -> str:
    """An action as the call that makes it, without the settings that have their default."""
    shown = []
    for field in fields(action):
        if not field.repr:
            continue
        value = getattr(action, field.name)
        if field.default is MISSING:
            text = describe_callable(value) if callable(value) else repr(value)
            shown.append(f"{field.name}={text}" if field.kw_only else text)
        elif isinstance(value, Tensor) or value != field.default:
            shown.append(f"{field.name}={value!r}")
    return f"{type(action).__name__}({', '.join(shown)})"


def now(value: float | Tensor | Schedule, device: torch.device, least: float = -math.inf) -> float | Tensor:
    """A setting as it is when the graph runs: of a schedule the tensor on a device that follows it.

    Outside of a rewrite, where an action is applied by hand, the value of a schedule at step 0. It may not return less
    than ``least``.
    """
    if not isinstance(value, Schedule):
        return value
    recording = current_recording()
    if recording is None or recording.states is None:
        return value.at(0, least)
    return recording.states.store.schedule(value, device, least)


def numbers_of(action: Any, *names: str) -> dict[str, float]:
    """Return the numbers among settings that may be tensors too."""
    found = ((name, getattr(action, name)) for name in names)
    return {name: value for name, value in found if isinstance(value, int | float)}


def scalar(value: float | Tensor, like: Tensor) -> float | Tensor:
    """A setting as an operand for a real ``like``: a number, inf where the dtype cannot hold it; or a 0-d tensor."""
    if not isinstance(value, Tensor):
        return math.copysign(math.inf, value) if abs(value) > torch.finfo(like.dtype).max else value
    value = value.detach().reshape(()).to(like.dtype)
    return value if value.device.type == "cpu" else value.to(like.device)


def bound_of(value: float | Tensor, like: Tensor) -> float | Tensor:
    """A bound as an operand for a real ``like``, as ``scalar``: of a tensor ``max(bound, 0)``, and NaN stays NaN."""
    operand = scalar(value, like)
    if not isinstance(operand, Tensor):
        return operand
    if operand.device != like.device:  # a kernel takes it as a number; a copy would wait for the device
        operand = operand + torch.zeros((), dtype=like.dtype, device=like.device)
    return torch.where(operand < 0, 0.0, operand)
