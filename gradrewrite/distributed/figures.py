"""Figures of wholes from those of parts: a sum over the parts, and a maximum of extremes.

On a device the parts are of ranks, with known sizes; on the host they are of graphs, micro-batches and ranks, and their
sizes are summed too.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, TypeAlias

import torch
from torch import Tensor

from gradrewrite.distributed.shards import Spread

# Norms of float64 elements are squared in three ranges, or their squares would leave that of float64 (after Blue, "A
# portable Fortran program to find the Euclidean norm of a vector", 1978).
_LARGE, _SMALL, _UNIT = 2.0**500, 2.0**-500, 2.0**600


# A norm, a sum, a mean, or the largest or smallest of all.
Kind: TypeAlias = Literal["norm", "sum", "mean", "max", "min"]


@dataclass(frozen=True, slots=True)
class Combination:
    """The rule for a whole's figure from those of its parts."""

    kind: Kind
    order: float = 2.0  # order of the norm

    @property
    def is_extreme(self) -> bool:
        """Whether the largest or smallest number of all parts counts."""
        return self.kind in ("max", "min")

    @property
    def num_sums(self) -> int:
        """Number of summands on the host, the number of parts included."""
        return {"norm": 4, "sum": 2}.get(self.kind, 3)

    @property
    def neutral(self) -> float:
        """The figure of a part without elements."""
        return {"max": -math.inf, "min": math.inf}.get(self.kind, 0.0)


@dataclass(frozen=True, slots=True)
class Part:
    """A part of a tensor on this rank."""

    spread: Spread  # how the tensor is spread
    size: int  # number of elements of the part


def has_extreme(how: Combination) -> bool:
    """Return whether a figure needs the largest number of all ranks."""
    return how.is_extreme or (how.kind == "norm" and how.order != 2)


def needs_largest(how: Combination) -> bool:
    """Return whether the summand of a figure depends on the largest number of all ranks: powers would overflow."""
    return how.kind == "norm" and how.order not in (2, math.inf)


def encode_extreme(values: Tensor, parts: Sequence[Part], how: Combination) -> Tensor:
    """Return this rank's number for the largest of all ranks, ``[1]`` float64; ``[0]`` for a figure without extremes.

    Arguments are those of ``encode``. A minimum is sent with its sign turned. NaN does not count, for a maximum over
    ranks may drop it: the sum has it.
    """
    if not has_extreme(how):
        return values.new_zeros(0, dtype=torch.float64)
    wide = _there(values, parts, how)
    wide = -wide if how.kind == "min" else wide
    return torch.where(wide.isnan(), -math.inf, wide).amax().reshape(1)


def encode(values: Tensor, parts: Sequence[Part], how: Combination, largest: Tensor | None = None) -> Tensor:
    """Return this rank's summand ``[slots]``, float64, of the figures of its parts ``[parts]``, real.

    A sum or a mean takes one slot and an L2 norm three; an extreme one, for the count of NaN. ``largest``, 0-d, is that
    of all ranks where ``needs_largest``. The figure of an empty part does not matter.
    """
    wide = _there(values, parts, how)
    if how.kind in ("sum", "mean"):
        return wide.sum().reshape(1)
    if how.kind == "norm" and how.order == 2:
        return squares_of(wide).sum(1)
    if needs_largest(how):
        assert largest is not None
        return ((wide / _unit(largest)) ** how.order).sum().reshape(1)
    return wide.isnan().sum().to(torch.float64).reshape(1)


def decode(sums: Tensor, largest: Tensor | None, how: Combination) -> Tensor:
    """Return the figure of the whole, 0-d float64, from the sums over the ranks, ``[slots]``.

    ``largest``, ``[1]``, is the largest number of all ranks where ``has_extreme``.
    """
    if how.kind in ("sum", "mean"):
        return sums.reshape(())
    if how.kind == "norm" and how.order == 2:
        return root_of(sums)
    assert largest is not None
    largest = largest.reshape(())
    if needs_largest(how):
        return _unit(largest) * sums.reshape(()) ** (1.0 / how.order)
    return torch.where(sums.reshape(()) > 0, math.nan, -largest if how.kind == "min" else largest)


def squares_of(sizes: Tensor) -> Tensor:
    """Return the squares of numbers ``[N]``, float64, in three ranges, ``[3, N]``: sums of such do not overflow."""
    is_large, is_small = sizes > _LARGE, sizes < _SMALL
    scaled = torch.where(is_large, sizes / _UNIT, torch.where(is_small, sizes * _UNIT, sizes))
    squares = scaled * scaled
    return torch.stack(
        [
            torch.where(is_large, squares, 0.0),
            torch.where(is_large | is_small, 0.0, squares),
            torch.where(is_small, squares, 0.0),
        ]
    )


def root_of(squares: Tensor) -> Tensor:
    """Return the roots of sums of ``squares_of``, ``[3, ...]`` to ``[...]``."""
    large, middle, small = squares.unbind()
    shift = 1.0 / _UNIT
    of_large = (large + middle * shift * shift).sqrt() * _UNIT
    of_middle = (middle + small * shift * shift).sqrt()
    # Written so that NaN takes the first way.
    return torch.where(large == 0, torch.where(middle == 0, small.sqrt() * shift, of_middle), of_large)


def summand(value: float, size: float, how: Combination) -> list[float]:
    """Return the summands of a part of so many elements, NaN if unknown, on the host: 1 for the part, then its own."""
    if how.kind == "norm":
        return [1.0, *_squares(value)]
    if how.kind == "sum":
        return [1.0, value]
    if how.kind == "mean":
        return [1.0, size, value * size if size else 0.0]
    return [1.0, size, 1.0 if math.isnan(value) and size else 0.0]


def figure(sums: Sequence[float], largest: float | None, how: Combination, empty: float = math.nan) -> float:
    """Return the figure of the whole on the host, from the sums of ``summand``; ``empty`` is the mean of no elements.

    ``largest`` is the largest number of all parts, without NaN, for a minimum with its sign turned.
    """
    _, *own = sums
    if how.kind == "norm":
        large, middle, small = own
        if large:  # or NaN
            return math.sqrt(large + middle / _UNIT / _UNIT) * _UNIT
        return math.sqrt(middle + small / _UNIT / _UNIT) if middle else math.sqrt(small) / _UNIT
    if how.kind == "sum":
        return own[0]
    size, total = own
    if how.kind == "mean":
        return total / size if size else empty
    assert largest is not None
    is_number = total == 0 and size != 0  # NaN is the extreme of nothing
    return (-largest if how.kind == "min" else largest) if is_number else math.nan


def _squares(value: float) -> list[float]:
    if value > _LARGE:
        return [(value / _UNIT) ** 2, 0.0, 0.0]
    if value < _SMALL:
        return [0.0, 0.0, (value * _UNIT) ** 2]
    return [0.0, value * value, 0.0]  # NaN too


def _there(values: Tensor, parts: Sequence[Part], how: Combination) -> Tensor:
    """Weighted figures of non-empty parts, float64; else the neutral one."""
    # The norm and the counts of an empty part are 0.
    there = [n for n, part in enumerate(parts) if part.size or how.kind in ("norm", "sum")]
    if not there:
        return values.new_full((1,), how.neutral, dtype=torch.float64)
    wide = values.to(torch.float64)
    if len(there) < len(parts):
        wide = torch.stack([wide[n] for n in there])
    weights = [_weight(parts[n], how) for n in there]
    if len(set(weights)) == 1:
        return wide * weights[0] if weights[0] != 1.0 else wide
    return torch.stack([value * weight for value, weight in zip(wide.unbind(), weights, strict=True)])


def _weight(part: Part, how: Combination) -> float:
    replicas = part.spread.replicas
    if how.kind == "sum":
        return 1.0 / replicas
    if how.kind == "mean":
        return part.size / (part.spread.size * replicas)
    if how.kind == "norm" and not math.isinf(how.order):
        return math.pow(replicas, -1.0 / how.order)
    return 1.0


def _unit(largest: Tensor) -> Tensor:
    """The largest number; 1 for 0, infinity and NaN."""
    return torch.where((largest > 0) & (largest < math.inf), largest, 1.0)
