"""Counts of elements by their power of two."""

from __future__ import annotations

import torch
from torch import Tensor

from gradrewrite._utils.exponent_counts import EXPONENTS, FIRST, NUMBER

_BITS = {torch.float32: (torch.int32, 23, 0xFF, 127), torch.float64: (torch.int64, 52, 0x7FF, 1023)}


def exponents_of(x: Tensor) -> tuple[Tensor, ...]:
    """Counts of the elements of a tensor, 0-d int64: 64 by ``floor(log2 |x|)``, then of 0, infinities and NaN.

    ``exponents_n`` is the count for the exponent ``n - 46``; the first one counts smaller elements too, the last one
    (2^17) larger ones. Complex elements count by modulus. All are 0 if the tensor is empty.
    """
    size = x.abs()
    size = size.to(torch.promote_types(size.dtype, torch.float32)).reshape(-1)
    integer, shift, mask, bias = _BITS[size.dtype]
    exponent = ((size.view(integer) >> shift) & mask).to(torch.int64) - bias
    place = (exponent - FIRST).clamp(0, NUMBER - 1)
    place = torch.where(size == 0, NUMBER, place)
    place = torch.where(size == torch.inf, NUMBER + 1, place)
    place = torch.where(size != size, NUMBER + 2, place)
    counts = torch.zeros(len(EXPONENTS), dtype=torch.int64, device=x.device)
    return counts.scatter_add(0, place, torch.ones_like(place)).unbind()
