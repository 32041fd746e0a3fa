"""Mean, standard deviation, skewness and kurtosis of a tensor, and of a whole from its parts."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from gradrewrite._compat import fake_tensors
from gradrewrite.numerics.stages import reduce_all

MOMENTS = ("mean", "std", "skewness", "kurtosis")


def moments_of(x: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Mean, standard deviation, skewness and kurtosis of a real tensor, 0-d, at least in float32.

    With ``d = x - mean``: ``std = sqrt(mean d^2)`` (over all elements, without Bessel's correction), ``skewness =
    mean d^3 / std^3``, ``kurtosis = mean d^4 / std^4`` (3 of a normal distribution). Powers are of ``d`` over its
    largest size, so that none overflows or vanishes. NaN if an element is not finite; the last two are NaN where all
    elements are equal, all four of an empty tensor.
    """
    wide = x.to(torch.promote_types(x.dtype, torch.float32))
    if fake_tensors.statically_known_true(wide.numel() == 0):
        empty = wide.new_full((), math.nan)
        return empty, empty, empty, empty
    mean = reduce_all(torch.mean, wide)
    distance = wide - mean
    size = distance.abs()
    if not fake_tensors.statically_known_true(wide.numel() != 0):  # ``amax`` of none is an error
        size = torch.cat([size.reshape(-1), size.new_zeros(1)])
    largest = reduce_all(torch.amax, size)
    share = distance / torch.where(largest > 0, largest, 1.0)
    square = share * share
    second = reduce_all(torch.mean, square)
    third, fourth = reduce_all(torch.mean, square * share), reduce_all(torch.mean, square * square)
    return mean, largest * second.sqrt(), third / second**1.5, fourth / (second * second)


def to_raw(figures: Tensor) -> Tensor:
    """Return the means of x, x^2, x^3 and x^4, float64, from the first of ``MOMENTS``: their weighted sums add up."""
    mean, *others = figures.to(torch.float64).unbind()
    raw = [mean]
    if others:
        std, second = others[0], others[0] * others[0]
        raw.append(second + mean * mean)
    if len(others) > 1:
        third, fourth = (f * std**n for n, f in enumerate(others[1:], 3))
        # Of equal elements these are 0 * NaN.
        third, fourth = (torch.where(std == 0, 0.0, central) for central in (third, fourth))
        raw.append(third + 3 * mean * second + mean**3)
        raw.append(fourth + 4 * mean * third + 6 * mean**2 * second + mean**4)
    return torch.stack(raw)


def from_raw(raw: Tensor) -> Tensor:
    """Return the first of ``MOMENTS`` from the means of powers, float64.

    The relative error of ``std`` is about 1e-16 (mean / std)^2, that of the kurtosis 1e-16 (mean / std)^4; a variance
    below 1e-15 mean^2 counts as 0.
    """
    mean, *others = raw.to(torch.float64).unbind()
    found = [mean]
    if others:
        second = others[0] - mean * mean
        second = torch.where(second < 1e-15 * others[0], 0.0, second)
        found.append(second.sqrt())
    if len(others) > 1:
        third = others[1] - 3 * mean * others[0] + 2 * mean**3
        fourth = others[2] - 4 * mean * others[1] + 6 * mean**2 * others[0] - 3 * mean**4
        spread = torch.where(second == 0, math.nan, second)
        found += [third / spread**1.5, fourth / (spread * spread)]
    return torch.stack(found)
