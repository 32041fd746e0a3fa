"""Clipping element by element."""

from __future__ import annotations

import math
from dataclasses import KW_ONLY, dataclass
from typing import ClassVar

import torch
from torch import Tensor

from gradrewrite.errors import UnsupportedGradientError
from gradrewrite.passes._settings import (
    bound_of,
    check_not_negative,
    check_number,
    now,
    scalar,
    short_repr,
    store_python_numbers,
)
from gradrewrite.policy.actions import BACKWARD
from gradrewrite.policy.recording import record_value_clip
from gradrewrite.policy.schedules import Schedule
from gradrewrite.sites import Kind


@dataclass(frozen=True, slots=True, repr=False)
class ClipByValue:
    """Bound every element: ``min <= g <= max``, bounds inclusive.

    NaN passes; infinities become the bounds, so a later finite check does not see them; zero stays zero where
    the bounds allow it. Shape, dtype and device are kept. After PaddlePaddle's ``GradientClipByValue`` and
    ``ErrorClipByValue`` (2017).

    Attributes:
        max: Upper bound, in units of the gradient; a number (baked in), or a tensor with one element (read at
            every backward; change it in place), or a ``gr.Schedule``. A tensor that is NaN bounds nothing.
        min: Lower bound; ``-max`` if None, and ``max`` is then not negative: a tensor acts as ``max(bound, 0)``.
        log: Report a log line at every backward in which an element changed, and record what the line says
            (``max_abs``, ``mean_abs``, ``clipped``), ``factor`` and ``share``. ``factor`` is the ratio of the L2 norms
            after and before: 1 where no element changed or the norm was 0, 0 where infinities were bounded, NaN where
            another element is NaN or stays infinite. ``share`` is that of the elements that changed, in [0, 1]; 0 for
            an empty tensor.

    Raises:
        ValueError: A bound is NaN, or min > max; of tensors at ``transform``. Later min > max gives max.
        TypeError: A bound is neither number nor tensor.
        UnsupportedGradientError: (a TypeError, at the rewrite) The gradient is complex or sparse.

    Example:
        >>> ClipByValue(10.0, log=True)
        ClipByValue(10.0, log=True)
    """

    max: float | Tensor | Schedule
    _: KW_ONLY
    min: float | Tensor | Schedule | None = None
    log: bool = False

    kinds: ClassVar[frozenset[Kind]] = BACKWARD
    has_units: ClassVar[bool] = True
    __repr__ = short_repr

    def __post_init__(self) -> None:
        store_python_numbers(self)
        check_number("ClipByValue", "max", self.max)
        if self.min is not None:
            check_number("ClipByValue", "min", self.min)
        if not isinstance(self.max, Tensor) and not isinstance(self.min, Tensor):
            self.check_bounds()

    def check_bounds(self) -> None:
        """Raise ValueError if the bounds bound nothing now."""
        if self.min is None:
            check_not_negative("ClipByValue", "max", self.max)
        high = _first(self.max)
        low = -high if self.min is None else _first(self.min)
        if low > high:
            raise ValueError(f"ClipByValue: min must be <= max, got min={low!r}, max={high!r}")

    def apply(self, tensor: Tensor) -> Tensor:
        """Clip; see the class."""
        if tensor.is_complex():
            raise UnsupportedGradientError(
                f"ClipByValue bounds real numbers and the gradient is {tensor.dtype}; use ClipByNorm"
            )
        limit = now(self.max, tensor.device, least=0.0 if self.min is None else -math.inf)
        if self.min is None:
            high = bound_of(limit, tensor)
            low = -high
        else:
            high, low = scalar(limit, tensor), scalar(now(self.min, tensor.device), tensor)
        clipped = _at_most(_at_least(tensor, low), high)
        if self.log:
            record_value_clip(tensor, clipped, limit if self.min is None else None)
        return clipped


def _first(bound: float | Tensor | Schedule) -> float:
    if isinstance(bound, Schedule):
        return bound.at(0)
    return bound.item() if isinstance(bound, Tensor) else bound


def _at_least(tensor: Tensor, low: float | Tensor) -> Tensor:
    """Raise elements to a bound; a clamp would make all of them NaN where a tensor is NaN."""
    return torch.where(tensor < low, low, tensor) if isinstance(low, Tensor) else torch.clamp(tensor, min=low)


def _at_most(tensor: Tensor, high: float | Tensor) -> Tensor:
    """Lower elements to a bound; see ``_at_least``."""
    return torch.where(tensor > high, high, tensor) if isinstance(high, Tensor) else torch.clamp(tensor, max=high)
