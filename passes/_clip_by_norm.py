"""Clipping by the norm of one tensor, or of a group of tensors; ``statistics.norm_of`` says how norms are computed."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import KW_ONLY, dataclass, replace
from typing import Any, ClassVar

import torch
from torch import Tensor

from gradrewrite.numerics.scaling import scale_where
from gradrewrite.numerics.statistics import norm_of, norms_of, total_norm_of
from gradrewrite.passes._settings import (
    LOGGED,
    Bound,
    bound_of,
    check_norm,
    check_not_negative,
    now,
    numbers_of,
    scalar,
    short_repr,
    site_bounds,
    store_python_numbers,
)
from gradrewrite.policy.insertions import BACKWARD, Insertion, ReplaceTensor, ScaleGroup
from gradrewrite.policy.recording import record_norm_clip
from gradrewrite.policy.schedules import Schedule
from gradrewrite.sites import Kind, Site


@dataclass(frozen=True, slots=True, repr=False)
class ClipByNorm:
    """Scale one tensor to a norm of at most ``max_norm``: ``where(norm > max_norm, g * (max_norm / norm), g)``.

    Below and at the bound not a bit changes. A norm that is not finite leaves the tensor as it is; zero stays zero;
    ``max_norm=inf`` only measures. Shape, dtype and device are kept; complex tensors count by modulus. Records ``norm``
    (before clipping), ``bound`` and ``factor``: ``max_norm / norm`` where the clip acts, else 1. After Pascanu, Mikolov
    and Bengio, "On the difficulty of training recurrent neural networks", 2013, https://arxiv.org/abs/1211.5063.

    Attributes:
        max_norm: The bound, > 0, in units of the gradient; a number (baked in), a tensor with one element (read at
            every backward; acts as ``max(bound, 0)``, and NaN clips nothing), or a ``gr.Schedule``. A mapping has such
            bounds by pattern of the site, of which the first that matches holds; a function returns the bound of a
            site.
        norm_type: Order p of the norm, > 0; ``inf`` is the largest absolute value.
        log: Report a log line at every backward in which an element changed.

    Raises:
        ValueError: ``max_norm`` or ``norm_type`` is not > 0.
        TypeError: A setting is no number.
        PolicyError: (at the rewrite) No pattern of a mapping matches the site.
        UnsupportedGradientError: (at the rewrite) The gradient is sparse.

    Example:
        >>> ClipByNorm(1.0)
        ClipByNorm(1.0)
        >>> ClipByNorm({"layers.0": 0.5, "*": 1.0})
        ClipByNorm({'layers.0': 0.5, '*': 1.0})
    """

    max_norm: Bound | Mapping[str, Bound] | Callable[[Site], Bound]
    _: KW_ONLY
    norm_type: float = 2.0
    log: bool = False

    kinds: ClassVar[frozenset[Kind]] = BACKWARD
    __repr__ = short_repr

    def __post_init__(self) -> None:
        store_python_numbers(self)
        by_site = site_bounds("ClipByNorm", "max_norm", self.max_norm)
        check_norm("ClipByNorm", self.max_norm if by_site is None else 1.0, self.norm_type)

    def check_bounds(self) -> None:
        """Raise ValueError if a bound is a tensor, and negative now."""
        by_site = site_bounds("ClipByNorm", "max_norm", self.max_norm)
        if by_site is None:
            check_not_negative("ClipByNorm", "max_norm", self.max_norm)
        else:
            by_site.check()

    def with_bounds(self, change: Callable[[Any, float], Any]) -> ClipByNorm:
        """Return the clip with another bound."""
        return replace(self, max_norm=change(self.max_norm, math.inf))

    def at(self, site: Site) -> Insertion:
        """Return the insertion at a site, with its bound there."""
        by_site = site_bounds("ClipByNorm", "max_norm", self.max_norm) if site.kind in self.kinds else None
        clip = self if by_site is None else replace(self, max_norm=by_site.at(site))
        measured = {"norm": "norm"} if self.norm_type == 2 else {}
        measured |= LOGGED if self.log else {}
        effect = ReplaceTensor(clip.apply, statistics=measured)
        numbers = numbers_of(clip, "max_norm")
        return Insertion(clip, effect, self.kinds, has_units=True, numbers=numbers, is_by_site=by_site is not None)

    def apply(self, tensor: Tensor) -> Tensor:
        """Clip the tensor, and report a ``NormClip``."""
        assert isinstance(self.max_norm, float | int | Tensor | Schedule)  # that of a site
        norm, bound = norm_of(tensor, self.norm_type), now(self.max_norm, tensor.device, least=0.0)
        clipped = scale_down(tensor, norm, bound_of(bound, norm))
        record_norm_clip("norm", norm, bound, log=(tensor, clipped) if self.log else None)
        return clipped


class GroupNormClip(ABC):
    """A clip of a group by its total norm."""

    __slots__ = ()

    kinds: ClassVar[frozenset[Kind]] = frozenset(("gradient", "step"))

    @property
    @abstractmethod
    def norm_type(self) -> float:
        """Order of the norm."""

    @property
    @abstractmethod
    def group(self) -> Hashable:
        """Name of the group."""

    @property
    @abstractmethod
    def log(self) -> bool:
        """Whether it records the share of each member."""

    def at(self, site: Site) -> Insertion:
        """Return the insertion at a site."""
        effect = ScaleGroup(self.group, self.apply_group, self.norm_type, self.bound_and_total, self.log)
        return Insertion(self, effect, self.kinds, has_units=True)

    def apply_group(self, tensors: Sequence[Tensor]) -> Sequence[Tensor]:
        """Clip the tensor, and report a ``NormClip``."""
        bound, total = self.bound_and_total(norms_of(tensors, self.norm_type))
        factor, acts = bound / total, bound < total
        return [scale_where(tensor, factor, acts) for tensor in tensors]

    def bound_and_total(self, norms: Sequence[Tensor]) -> tuple[Tensor, Tensor]:
        """Return bound and total norm, both 1 if the clip is idle.

        See ``policy.insertions.ScaleGroup``.
        """
        total, flat = total_norm_of(norms, self.norm_type)
        bound, acts = bound_and_verdict(total, self.record_bound(total, flat))
        return torch.where(acts, bound, 1.0), torch.where(acts, total, 1.0)

    @abstractmethod
    def record_bound(self, total: Tensor, norms: Tensor) -> float | Tensor:
        """Return the bound of a total norm, and record both; ``norms`` are those of the members, ``[members]``."""


@dataclass(frozen=True, slots=True, repr=False)
class ClipByGlobalNorm(GroupNormClip):
    """Scale all gradients of a group by one factor, to a total norm of at most ``max_norm``.

    The total norm is the norm of all gradients of the group as one vector, after the actions of the single
    sites; a tied parameter counts once, a parameter without a gradient not at all. Otherwise as ``ClipByNorm``:
    exact below the bound, unchanged where the norm is not finite, ``max_norm=inf`` measures. Records
    ``total_norm@group:<group>`` (before clipping), and there ``bound`` and ``factor``: ``max_norm / total_norm`` where
    the clip acts, else 1. After Pascanu, Mikolov and Bengio (2013), https://arxiv.org/abs/1211.5063.

    Attributes:
        max_norm: The bound, > 0; a number, a tensor with one element (read at every backward; acts as
            ``max(bound, 0)``, and NaN clips nothing), or a ``gr.Schedule``.
        norm_type: Order p of the norm, > 0; ``inf`` is the largest absolute value.
        group: Gradients of one group are scaled together; one group has one bound, one norm type and one ``log``.
        log: Report one log line for the group at every backward in which the clip acted, and record ``norm_share`` at
            each member: its share of the total squared norm (of the sum of p-th powers for ``norm_type=p``; for ``inf``
            the largest have equal shares, the others 0). Shares add up to 1; all are 0 where the total norm is 0. Where
            it is not finite, the members whose norm is not finite have equal shares.

    Raises:
        ValueError: ``max_norm`` or ``norm_type`` is not > 0.
        TypeError: A setting is no number.
        PolicyError: (at the rewrite) One group has two bounds, norm types or values of ``log``.
        UnsupportedGradientError: (at the rewrite) A gradient of the group is sparse.

    Example:
        >>> ClipByGlobalNorm(1.0).group
        'default'
    """

    max_norm: float | Tensor | Schedule
    _: KW_ONLY
    norm_type: float = 2.0
    group: Hashable = "default"
    log: bool = False

    __repr__ = short_repr

    def __post_init__(self) -> None:
        store_python_numbers(self)
        check_norm("ClipByGlobalNorm", self.max_norm, self.norm_type)

    def check_bounds(self) -> None:
        """Raise ValueError if the bound is a tensor, and negative now."""
        check_not_negative("ClipByGlobalNorm", "max_norm", self.max_norm)

    def with_bounds(self, change: Callable[[Any, float], Any]) -> ClipByGlobalNorm:
        """Return the clip with another bound."""
        return replace(self, max_norm=change(self.max_norm, math.inf))

    def record_bound(self, total: Tensor, norms: Tensor) -> float | Tensor:
        """Record the clip; return its bound."""
        bound = now(self.max_norm, norms.device, least=0.0)
        record_norm_clip("total_norm", total, bound, shares=(norms, self.norm_type) if self.log else None)
        return bound_of(bound, total)


def scale_down(tensor: Tensor, norm: Tensor, max_norm: float | Tensor) -> Tensor:
    """Scale a tensor of this norm to a norm of at most ``max_norm``."""
    bound, acts = bound_and_verdict(norm, max_norm)
    return scale_where(tensor, bound / norm, acts)


def bound_and_verdict(norm: Tensor, max_norm: float | Tensor) -> tuple[Tensor, Tensor]:
    """The bound, a number or a 0-d tensor of the norm's dtype, as a 0-d tensor, and whether the clip acts."""
    if isinstance(max_norm, Tensor):
        bound = max_norm.to(norm.device)
    else:
        bound = norm.new_full((), float(scalar(max_norm, norm)))  # a number divided by a tensor would be rounded twice
    return bound, (norm > bound) & (norm < torch.inf)
