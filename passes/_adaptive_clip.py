"""Clipping by the norm of the parameter: adaptive gradient clipping."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import KW_ONLY, dataclass, replace
from typing import Any, ClassVar

import torch
from torch import Tensor

from gradrewrite.numerics.statistics import largest_of, norms_of_units, share_of
from gradrewrite.passes._settings import (
    bound_of,
    check_not_negative,
    check_positive,
    now,
    short_repr,
    store_python_numbers,
)
from gradrewrite.policy.insertions import Insertion, ReplaceTensor
from gradrewrite.policy.recording import record
from gradrewrite.policy.schedules import Schedule
from gradrewrite.sites import Kind, Site


@dataclass(frozen=True, slots=True, repr=False)
class AdaptiveClip:
    """Scale each unit of a gradient to a norm of at most ``clipping * max(norm of the parameter's unit, eps)``.

    A unit is a row of dimension 0: the incoming weights of one output of a linear layer, the filter of one channel of a
    convolution. A parameter with one dimension (a bias, a gain) or none is one unit. Norms are L2 norms, as
    ``ClipByNorm`` computes them. Below and at its bound not a bit of a unit changes; where the norm of its gradient or
    of its parameter is not finite, it stays as it is; zero stays zero. Shape, dtype and device are kept. Records
    ``unit_ratio``, the largest ratio of a gradient's norm to the parameter's (at least ``eps``; NaN if one is), and
    ``unit_share``, the share of the units that were clipped (NaN and 0 where there is no unit). AGC of Brock, De, Smith
    and Simonyan, "High-performance large-scale image recognition without normalization", 2021,
    https://arxiv.org/abs/2102.06171; the paper leaves the last linear layer out, so name the others in the pattern.

    At gradient sites the gradient is that of one backward, at step sites what the optimizer uses. Gradients that are
    spread over ranks (FSDP2) are refused.

    Attributes:
        clipping: The largest ratio of the norms, > 0: a number, a tensor with one element (read at every backward
            or step; acts as ``max(bound, 0)``, and NaN clips nothing), or a ``gr.Schedule``. The paper has 0.01 for
            batches of 4096, and larger ones for smaller batches.
        eps: The least norm of a parameter, > 0, so that one of zeros can be trained.

    Raises:
        ValueError: ``clipping`` or ``eps`` is not > 0.
        TypeError: A setting is no number.
        UnsupportedGradientError: (at the rewrite) The gradient is sparse.

    Example:
        >>> AdaptiveClip(0.02)
        AdaptiveClip(clipping=0.02)
    """

    clipping: float | Tensor | Schedule = 0.01
    _: KW_ONLY
    eps: float = 1e-3

    kinds: ClassVar[frozenset[Kind]] = frozenset(("gradient", "step"))
    __repr__ = short_repr

    def __post_init__(self) -> None:
        store_python_numbers(self)
        check_positive("AdaptiveClip", "clipping", self.clipping)
        if isinstance(self.eps, Tensor | Schedule):
            raise TypeError(f"AdaptiveClip: eps is a number, got {self.eps!r}")
        check_positive("AdaptiveClip", "eps", self.eps)

    def check_bounds(self) -> None:
        """Raise ValueError if the bound is a tensor, and negative now."""
        check_not_negative("AdaptiveClip", "clipping", self.clipping)

    def with_bounds(self, change: Callable[[Any, float], Any]) -> AdaptiveClip:
        """Return the clip with another bound."""
        return replace(self, clipping=change(self.clipping, math.inf))

    def at(self, site: Site) -> Insertion:
        """Return the insertion at a site."""
        return Insertion(self, ReplaceTensor(self.apply, "value"), self.kinds, has_units=True)

    def apply(self, tensor: Tensor, value: Tensor, /) -> Tensor:
        """Clip; see the class."""
        norms, floors = norms_of_units(tensor), norms_of_units(value).clamp(min=self.eps)
        bounds = floors * bound_of(now(self.clipping, tensor.device, least=0.0), floors)
        acts = (norms > bounds) & (norms < torch.inf) & (floors < torch.inf)
        record("unit_ratio", largest_of(norms / floors))
        record("unit_share", share_of(acts))
        wide = tensor.to(torch.promote_types(tensor.dtype, norms.dtype))
        return torch.where(acts, (wide * (bounds / norms)).to(tensor.dtype), tensor)
