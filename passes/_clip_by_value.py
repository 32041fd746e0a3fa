"""Clipping element by element."""

from __future__ import annotations

import math
from dataclasses import KW_ONLY, dataclass
from typing import ClassVar

import torch
from torch import Tensor

from gradrewrite.errors import UnsupportedGradientError
from gradrewrite.passes._settings import check_number, now, scalar, short_repr
from gradrewrite.policy.actions import BACKWARD
from gradrewrite.policy.recording import record_clip, record_limit
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
            every backward; change it in place), or a ``gr.Schedule``.
        min: Lower bound; ``-max`` if None.
        log: Report a log line at every backward in which an element changed, and record what the line says
            (``max_abs``, ``mean_abs``, ``clipped``), ``factor`` and ``share``. ``factor`` is the ratio of the L2 norms
            after and before: 1 where no element changed or the norm was 0, 0 where infinities were bounded, NaN where
            another element is NaN or stays infinite. ``share`` is that of the elements that changed, in [0, 1]; 0 for
            an empty tensor.

    Raises:
        ValueError: A bound is NaN, or min > max. Tensors are not looked into: min > max gives max.
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
        """Refuse bounds that bound nothing."""
        check_number("ClipByValue", "max", self.max)
        if self.min is not None:
            check_number("ClipByValue", "min", self.min)
        high = self.max.at(0) if isinstance(self.max, Schedule) else self.max
        low = -high if self.min is None else self.min.at(0) if isinstance(self.min, Schedule) else self.min
        if not isinstance(low, Tensor) and not isinstance(high, Tensor) and not low <= high:
            raise ValueError(f"ClipByValue: min must be <= max, got min={low!r}, max={high!r}")

    def apply(self, tensor: Tensor) -> Tensor:
        """Clip; see the class."""
        if tensor.is_complex():
            raise UnsupportedGradientError(
                f"ClipByValue bounds real numbers and the gradient is {tensor.dtype}; use ClipByNorm"
            )
        limit = now(self.max, tensor.device, least=0.0 if self.min is None else -math.inf)
        high = scalar(limit, tensor)
        low = -high if self.min is None else scalar(now(self.min, tensor.device), tensor)
        # A tensor and a number cannot be given to one clamp, so each bound has its own.
        clipped = torch.clamp(torch.clamp(tensor, min=low), max=high)
        if self.log:
            if self.min is None:
                record_limit(limit, tensor.device)
            record_clip(tensor, clipped, strength=True)
        return clipped
