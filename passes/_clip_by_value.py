"""Clipping element by element."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import KW_ONLY, dataclass, replace
from typing import Any, ClassVar

import torch
from torch import Tensor

from gradrewrite.errors import UnsupportedGradientError
from gradrewrite.passes._settings import (
    LOGGED,
    Bound,
    SiteBounds,
    bound_of,
    check_not_negative,
    check_number,
    now,
    numbers_of,
    scalar,
    short_repr,
    site_bounds,
    store_python_numbers,
)
from gradrewrite.policy.insertions import BACKWARD, Insertion, ReplaceTensor
from gradrewrite.policy.recording import record_value_clip
from gradrewrite.policy.schedules import Schedule
from gradrewrite.sites import Kind, Site


@dataclass(frozen=True, slots=True, repr=False)
class ClipByValue:
    """Bound every element: ``min <= g <= max``, bounds inclusive.

    NaN passes; infinities become the bounds, so a later finite check does not see them; zero stays zero where
    the bounds allow it. Shape, dtype and device are kept. After PaddlePaddle's ``GradientClipByValue`` and
    ``ErrorClipByValue`` (2017).

    Attributes:
        max: Upper bound, in units of the gradient; a number (baked in), or a tensor with one element (read at
            every backward; change it in place), or a ``gr.Schedule``. A tensor that is NaN bounds nothing. A mapping
            has such bounds, > 0, by pattern of the site, of which the first that matches holds; a function returns the
            bound of a site.
        min: Lower bound; ``-max`` if None, and ``max`` is then not negative: a tensor acts as ``max(bound, 0)``.
        log: Report a log line at every backward in which an element changed, and record what the line says
            (``max_abs``, ``mean_abs``, ``clipped``), ``factor`` and ``share``. ``factor`` is the ratio of the L2 norms
            after and before: 1 where no element changed or the norm was 0, 0 where infinities were bounded, NaN where
            another element is NaN or stays infinite. ``share`` is that of the elements that changed, in [0, 1]; 0 for
            an empty tensor.

    Raises:
        ValueError: A bound is NaN, or min > max; of tensors at ``transform``. Later min > max gives max.
        TypeError: A bound is neither number nor tensor.
        PolicyError: (at the rewrite) No pattern of a mapping matches the site.
        UnsupportedGradientError: (a TypeError, at the rewrite) The gradient is complex or sparse.

    Example:
        >>> ClipByValue(10.0, log=True)
        ClipByValue(10.0, log=True)
    """

    max: Bound | Mapping[str, Bound] | Callable[[Site], Bound]
    _: KW_ONLY
    min: float | Tensor | Schedule | None = None
    log: bool = False

    kinds: ClassVar[frozenset[Kind]] = BACKWARD
    __repr__ = short_repr

    def __post_init__(self) -> None:
        store_python_numbers(self)
        if self._by_site is None:
            check_number("ClipByValue", "max", self.max)
        if self.min is not None:
            check_number("ClipByValue", "min", self.min)
        if not isinstance(self.max, Tensor) and not isinstance(self.min, Tensor):
            self.check_bounds()

    @property
    def _by_site(self) -> SiteBounds | None:
        return site_bounds("ClipByValue", "max", self.max)

    @property
    def _bound(self) -> Bound:
        assert isinstance(self.max, int | float | Tensor | Schedule)
        return self.max

    def with_bounds(self, change: Callable[[Any, float], Any]) -> ClipByValue:
        """Return the clip with other bounds."""
        low = None if self.min is None else change(self.min, -math.inf)
        return replace(self, max=change(self.max, math.inf), min=low)

    def check_bounds(self) -> None:
        """Raise ValueError if the bounds bound nothing now."""
        if self._by_site is not None:
            self._by_site.check()
            return
        if self.min is None:
            check_not_negative("ClipByValue", "max", self.max)
        high = _first(self._bound)
        low = -high if self.min is None else _first(self.min)
        if low > high:
            raise ValueError(f"ClipByValue: min must be <= max, got min={low!r}, max={high!r}")

    def at(self, site: Site) -> Insertion:
        """Return the insertion at a site, with its bound there."""
        by_site = self._by_site if site.kind in self.kinds else None
        clip = self if by_site is None else replace(self, max=by_site.at(site))
        effect = ReplaceTensor(clip.apply, statistics=LOGGED if self.log else {})
        numbers = numbers_of(clip, "max", "min")
        return Insertion(clip, effect, self.kinds, has_units=True, numbers=numbers, is_by_site=by_site is not None)

    def apply(self, tensor: Tensor) -> Tensor:
        """Clip; see the class."""
        if tensor.is_complex():
            raise UnsupportedGradientError(
                f"ClipByValue bounds real numbers and the gradient is {tensor.dtype}; use ClipByNorm"
            )
        limit = now(self._bound, tensor.device, least=0.0 if self.min is None else -math.inf)
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
