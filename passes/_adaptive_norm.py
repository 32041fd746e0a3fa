"""Clipping by a global norm, with a bound from earlier steps' norms."""

from __future__ import annotations

import math
from abc import abstractmethod
from collections.abc import Hashable
from dataclasses import KW_ONLY, dataclass
from typing import ClassVar

import torch
from torch import Tensor

from gradrewrite.passes._clip_by_norm import GroupNormClip
from gradrewrite.passes._settings import check_number, short_repr, store_python_numbers
from gradrewrite.policy.recording import record_norm_clip
from gradrewrite.policy.state import State


class _ClipByFollowedNorm(GroupNormClip):
    """A clip of a group by its total L2 norm, with a bound from earlier norms."""

    __slots__ = ()

    norm_type: ClassVar[float] = 2.0
    log: ClassVar[bool] = False

    def record_bound(self, total: Tensor, norms: Tensor) -> Tensor:
        """Follow the total norm, and record the clip."""
        max_norm = self.follow(total)
        record_norm_clip("total_norm", total, max_norm, is_computed=True)
        return max_norm

    @abstractmethod
    def follow(self, total: Tensor) -> Tensor:
        """Return the bound for a total norm, and store the norm if it is finite."""


@dataclass(frozen=True, slots=True, repr=False)
class AutoClip(_ClipByFollowedNorm):
    """Scale all gradients of a group to a total norm of at most a percentile of the total norms so far.

    The bound is the ``percentile`` of the last ``history`` total norms, that of this step among them, interpolated
    linearly as ``numpy.percentile`` does. So nothing is clipped at the first step; an outlier is bounded by what was
    usual. Norms and records are those of ``ClipByGlobalNorm``, ``bound@group:<group>`` being the percentile. A total
    norm that is not finite is not remembered, and leaves all gradients as they are; so does one of 0, which is
    remembered. Norms are kept as float32. AutoClip of Seetharaman, Wichern, Pardo and Le Roux, "AutoClip: Adaptive
    gradient clipping for source separation networks", 2020, https://arxiv.org/abs/2007.14469, which keeps all norms.

    Its state is saved by ``gr.state_dict``: the norms, and how many there were.

    Attributes:
        percentile: In [0, 100]. 100 never clips, 0 scales to the least norm so far.
        history: Number of norms that are remembered, >= 1; they are sorted in every step.
        group: Gradients of one group are scaled together.

    Raises:
        ValueError: ``percentile`` or ``history`` is out of range.
        TypeError: A setting is no number.
        UnsupportedGradientError: (at the rewrite) A gradient of the group is sparse.
        PolicyError: (at the rewrite) A graph break or ``regions=`` splits the model, at gradient sites: each part would
            have a norm of its own.

    Example:
        >>> AutoClip(25.0)
        AutoClip(percentile=25.0)
    """

    percentile: float = 10.0
    _: KW_ONLY
    history: int = 10_000
    group: Hashable = "default"

    __repr__ = short_repr

    def __post_init__(self) -> None:
        store_python_numbers(self)
        if isinstance(self.percentile, bool) or not isinstance(self.percentile, int | float):
            raise TypeError(f"AutoClip: percentile is a number, got {self.percentile!r}")
        if not 0 <= self.percentile <= 100:
            raise ValueError(f"AutoClip: percentile is in [0, 100], got {self.percentile!r}")
        if isinstance(self.history, bool) or not isinstance(self.history, int):
            raise TypeError(f"AutoClip: history is a whole number, got {self.history!r}")
        if self.history < 1:
            raise ValueError(f"AutoClip: history must be >= 1, got {self.history!r}")

    def follow(self, total: Tensor) -> Tensor:
        """Return the percentile of the norms, with this one."""
        norms = State((self.history,), math.inf, name="AutoClip.norms")
        count = State((), 0, torch.int64, name="AutoClip.count")
        place = torch.arange(self.history, device=total.device) == count.value % self.history
        known = torch.where(place & (total < math.inf), total.to(norms.dtype), norms.value)
        number = count.value + (total < math.inf)
        norms.set(known)
        count.set(number)
        ordered = known.sort().values  # what is not there yet is infinite, and comes last
        last = number.clamp(1, self.history) - 1
        position = last.to(torch.float64) * (self.percentile / 100)
        low = position.floor()
        index = low.long()
        below, above = (ordered.gather(0, i.reshape(1)).reshape(()) for i in (index, torch.minimum(index + 1, last)))
        part = (position - low).to(ordered.dtype)
        # Infinity minus itself is NaN: before the first finite norm nothing is bounded.
        between = torch.where(above < math.inf, below + (above - below) * part, math.inf)
        # The percentile of norms that are all like this one is this one, without the rounding to float32.
        exact = total.to(ordered.dtype)
        return torch.where(between == exact, total, between.to(total.dtype))


@dataclass(frozen=True, slots=True, repr=False)
class ZClip(_ClipByFollowedNorm):
    """Scale all gradients of a group where their total norm is an outlier: more than ``z`` deviations above the mean.

    With the mean ``m`` and the standard deviation ``s`` of the total norms ``n``, and ``score = (n - m) / (s + 1e-6)``,
    a score above ``z`` scales the gradients to a norm of ``m + z^2 / score * s``: the further out, the closer to the
    mean. Mean and variance are first those of ``warmup`` steps, in which nothing is clipped, and then exponential means
    with the norm after clipping ``c``: ``m <- alpha m + (1 - alpha) c``, then
    ``s^2 <- alpha s^2 + (1 - alpha) (c - m)^2``. Norms and records are those of ``ClipByGlobalNorm``;
    ``bound@group:<group>`` is infinite where nothing is clipped. A total norm that is not finite enters neither of them
    and leaves all gradients as they are. ZClip of Kumar, Owen, Chowdhury and Güra, "ZClip: Adaptive spike mitigation
    for LLM pre-training", 2025, https://arxiv.org/abs/2504.02507, with its reciprocal clipping, which is the default.

    Its state is saved by ``gr.state_dict``: mean, variance and the number of norms, as float64 where the device has it.

    Attributes:
        z: Largest score, > 0.
        alpha: Weight of the past, in [0, 1).
        warmup: Number of finite norms before the first clip, >= 1.
        group: Gradients of one group are scaled together.

    Raises:
        ValueError: A setting is out of range.
        TypeError: A setting is no number.
        UnsupportedGradientError: (at the rewrite) A gradient of the group is sparse.
        PolicyError: (at the rewrite) A graph break or ``regions=`` splits the model, at gradient sites: each part would
            have a norm of its own.

    Example:
        >>> ZClip(3.0)
        ZClip(z=3.0)
    """

    z: float = 2.5
    _: KW_ONLY
    alpha: float = 0.97
    warmup: int = 25
    group: Hashable = "default"

    __repr__ = short_repr

    def __post_init__(self) -> None:
        store_python_numbers(self)
        for name in ("z", "alpha", "warmup"):
            if isinstance(getattr(self, name), Tensor):
                raise TypeError(f"ZClip: {name} is a number, got a tensor")
            check_number("ZClip", name, getattr(self, name))
        if not 0 < self.z < math.inf:
            raise ValueError(f"ZClip: z must be > 0 and finite, got {self.z!r}")
        if not 0 <= self.alpha < 1:
            raise ValueError(f"ZClip: alpha is in [0, 1), got {self.alpha!r}")
        if not isinstance(self.warmup, int) or self.warmup < 1:
            raise ValueError(f"ZClip: warmup is a whole number >= 1, got {self.warmup!r}")

    def follow(self, total: Tensor) -> Tensor:
        """Return the bound for a total norm, and let mean and variance follow."""
        wide = torch.float32 if total.device.type == "mps" else torch.float64
        mean, variance = State((), 0.0, wide, name="ZClip.mean"), State((), 0.0, wide, name="ZClip.variance")
        count = State((), 0, torch.int64, name="ZClip.count")
        m, v, n, norm = mean.value, variance.value, count.value, total.to(wide)
        deviation = v.sqrt()
        score = (norm - m) / (deviation + 1e-6)
        is_known, is_finite = n >= self.warmup, total < math.inf
        is_outlier = is_known & is_finite & (score > self.z)
        bound = torch.where(is_outlier, m + self.z * self.z / score * deviation, math.inf).to(total.dtype)
        clipped = torch.minimum(norm, bound.to(wide))
        # In the warmup: mean and variance of n + 1 numbers from those of n (Welford, 1962).
        number = (n + 1).to(wide)
        warm_mean = m + (norm - m) / number
        warm_variance = (v * (number - 1) + (norm - m) * (norm - warm_mean)) / number
        new_mean = torch.where(is_known, self.alpha * m + (1 - self.alpha) * clipped, warm_mean)
        new_variance = torch.where(
            is_known, self.alpha * v + (1 - self.alpha) * (clipped - new_mean).square(), warm_variance
        )
        mean.set(torch.where(is_finite, new_mean, m))
        variance.set(torch.where(is_finite, new_variance, v))
        count.set(n + is_finite)
        return bound
