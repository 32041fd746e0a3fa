"""Figures of wholes from those of parts on several ranks, by one sum over the ranks; records, on the host."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor
from torch import distributed as dist

from gradrewrite.distributed.groups import this_rank
from gradrewrite.distributed.shards import Spread

# Norms of float64 elements are squared in three ranges, or their squares would leave that of float64 (after Blue, "A
# portable Fortran program to find the Euclidean norm of a vector", 1978).
_LARGE, _SMALL, _UNIT = 2.0**500, 2.0**-500, 2.0**600


@dataclass(frozen=True, slots=True)
class Combination:
    """The rule for a whole's figure from those of its parts."""

    kind: Literal["norm", "sum", "mean", "max", "min"]  # a norm, a sum, a mean, or the largest or smallest of all
    order: float = 2.0  # order of the norm

    @property
    def neutral(self) -> float:
        """The figure of a part without elements."""
        return {"max": -math.inf, "min": math.inf}.get(self.kind, 0.0)


@dataclass(frozen=True, slots=True)
class Part:
    """A part of a tensor on this rank."""

    spread: Spread  # how the tensor is spread
    size: int  # number of elements of the part


def encode(values: Tensor, parts: Sequence[Part], how: Combination, ranks: Sequence[int], rank: int) -> Tensor:
    """Return this rank's summand ``[slots]``, float64, of the figures of its parts ``[parts]``, real.

    A sum or a mean takes one slot and an L2 norm three. Anything else is no sum: each rank writes to a slot of its own.
    ``ranks`` are the global ranks that are summed over, ascending. The figure of an empty part does not matter.
    """
    # The norm and the counts of an empty part are 0.
    there = [n for n, part in enumerate(parts) if part.size or how.kind in ("norm", "sum")]
    slots = 1 if how.kind in ("sum", "mean") else len(ranks)
    if how.kind == "norm" and how.order == 2:
        slots = 3
    if not there:
        return _in_slot(values.new_full((), how.neutral, dtype=torch.float64), slots, ranks, rank)
    wide = values.to(torch.float64)
    if len(there) < len(parts):
        wide = torch.stack([wide[n] for n in there])
    weights = [_weight(parts[n], how) for n in there]
    if len(set(weights)) == 1:
        wide = wide * weights[0] if weights[0] != 1.0 else wide
    else:
        wide = torch.stack([value * weight for value, weight in zip(wide.unbind(), weights, strict=True)])
    if how.kind in ("sum", "mean"):
        return wide.sum().reshape(1)
    if how.kind == "norm" and how.order == 2:
        is_large, is_small = wide > _LARGE, wide < _SMALL
        scaled = torch.where(is_large, wide / _UNIT, torch.where(is_small, wide * _UNIT, wide))
        squares = scaled * scaled
        return torch.stack(
            [
                torch.where(is_large, squares, 0.0).sum(),
                torch.where(is_large | is_small, 0.0, squares).sum(),
                torch.where(is_small, squares, 0.0).sum(),
            ]
        )
    if how.kind == "norm" and not math.isinf(how.order):
        return _in_slot(_norm(wide, how.order), slots, ranks, rank)
    return _in_slot(wide.amin() if how.kind == "min" else wide.amax(), slots, ranks, rank)


def decode(sums: Tensor, how: Combination) -> Tensor:
    """Return the figure of the whole, 0-d float64, from the sums over the ranks, ``[slots]``."""
    if how.kind in ("sum", "mean"):
        return sums.reshape(())
    if how.kind == "norm" and how.order == 2:
        large, middle, small = sums.unbind()
        shift = 1.0 / _UNIT
        of_large = (large + middle * shift * shift).sqrt() * _UNIT
        of_middle = (middle + small * shift * shift).sqrt()
        # Written so that NaN takes the first way.
        return torch.where(large == 0, torch.where(middle == 0, small.sqrt() * shift, of_middle), of_large)
    if how.kind == "norm" and not math.isinf(how.order):
        return _norm(sums, how.order)
    return sums.amin() if how.kind == "min" else sums.amax()


def _weight(part: Part, how: Combination) -> float:
    replicas = part.spread.replicas
    if how.kind == "sum":
        return 1.0 / replicas
    if how.kind == "mean":
        return part.size / (part.spread.size * replicas)
    if how.kind == "norm" and not math.isinf(how.order):
        return math.pow(replicas, -1.0 / how.order)
    return 1.0


def _in_slot(value: Tensor, slots: int, ranks: Sequence[int], rank: int) -> Tensor:
    """A value in the number of this rank, zeros in all others; in the only one if there is one."""
    if slots != len(ranks) or slots == 1:
        return torch.cat([value.reshape(1), value.new_zeros(slots - 1)])
    own = list(ranks).index(rank)
    return torch.cat([value.new_zeros(own), value.reshape(1), value.new_zeros(slots - own - 1)])


def _norm(values: Tensor, order: float) -> Tensor:
    """The norm of non-negative numbers, without overflow."""
    largest = values.amax()
    unit = torch.where((largest > 0) & (largest < math.inf), largest, 1.0)
    return unit * ((values / unit) ** order).sum() ** (1.0 / order)


def combine_over_ranks(
    records: Mapping[str, float], how: Literal["mean", "max", "sum"], group: dist.ProcessGroup | None
) -> dict[str, float]:
    """Combine records over the ranks of a group that have them, in a collective call; NaN on one rank makes NaN."""
    if this_rank() is None:
        return dict(records)
    gathered: list[Any] = [None] * dist.get_world_size(group)
    dist.all_gather_object(gathered, dict(records), group=group)
    names = dict.fromkeys(name for own in gathered for name in own)
    return {name: _combine_values([own[name] for own in gathered if name in own], how) for name in names}


def _combine_values(values: list[float], how: str) -> float:
    if any(math.isnan(value) for value in values):
        return math.nan
    if how == "max":
        return max(values)
    total = sum(values)  # of infinities of both signs: NaN, as for tensors
    return total / len(values) if how == "mean" else total
