"""Statistics of a tensor, as nodes that the compiler fuses or as one opaque operation.

Traced nodes fuse with what makes the tensor and read it once; each costs compile time. The opaque operation compiles
at once and reads the tensor by itself. ``docs/design.md`` says which is used when, with the figures.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping

import torch
from torch import Tensor

from gradrewrite._compat import fake_tensors
from gradrewrite.ir.stages import reduce_all

Statistic = Callable[[Tensor], Tensor]


def norm_of(tensor: Tensor, order: float = 2.0) -> Tensor:
    """Norm ``(sum |x|^p)^(1/p)``, as 0-d float32 or float64.

    It does not overflow while it is representable; 0 if the tensor is empty, inf or NaN if an element is. Squares of
    narrower elements are summed in float64, which holds them all: one pass. Otherwise it is
    ``m * (sum (|x| / m)^p)^(1/p)`` with ``m = max |x|``: two passes.
    """
    size = size_of(tensor)
    if _is_empty(tensor):
        return size.new_zeros(())
    if order == 2 and size.dtype == torch.float32 and size.device.type != "mps":  # which has no float64
        wide = size.to(torch.float64)  # squares of float32 neither overflow nor vanish: one pass
        return reduce_all(torch.sum, wide * wide).sqrt().to(torch.float32)
    largest = reduce_all(torch.amax, _padded(size, 0.0))
    if math.isinf(order):
        return largest
    # Dividing by an infinite or a zero maximum would make NaN; by one it changes nothing.
    unit = torch.where((largest > 0) & (largest < math.inf), largest, 1.0)
    share = size / unit
    if order == 1:
        return unit * reduce_all(torch.sum, share)
    if order == 2:
        return unit * reduce_all(torch.sum, share * share).sqrt()
    return unit * reduce_all(torch.sum, share**order) ** (1.0 / order)


def size_of(x: Tensor) -> Tensor:
    """Absolute values, in at least float32."""
    size = x.abs()
    return size.to(torch.promote_types(size.dtype, torch.float32))


def _dtype(x: Tensor) -> torch.dtype:
    return torch.float64 if x.dtype in (torch.float64, torch.complex128) else torch.float32


def _is_empty(x: Tensor) -> bool:
    return fake_tensors.statically_known_true(x.numel() == 0)


def _may_be_empty(x: Tensor) -> bool:
    """Whether the size depends on data and may be 0: a reduction must then not assume that there is an element."""
    return not fake_tensors.statically_known_true(x.numel() != 0)


def _padded(x: Tensor, neutral: float) -> Tensor:
    """The tensor, flat and with one more element where it may be empty: ``amax`` of none is an error."""
    return torch.cat([x.reshape(-1), x.new_full((1,), neutral)]) if _may_be_empty(x) else x


def _number(x: Tensor) -> Tensor:
    """Number of elements, on the device: a size that depends on data is no number while a graph is traced."""
    return torch.ones_like(x, dtype=torch.float32).sum()


def _or_nan(reduce: Statistic) -> Statistic:
    """NaN for an empty tensor."""

    def reduce_or_nan(x: Tensor) -> Tensor:
        if _is_empty(x):
            return torch.full((), math.nan, device=x.device)
        return torch.where(_number(x) == 0, math.nan, reduce(x)) if _may_be_empty(x) else reduce(x)

    return reduce_or_nan


def _share(mask: Callable[[Tensor], Tensor]) -> Statistic:
    """Share of the elements for which the mask holds; 0 for an empty tensor."""

    def share(x: Tensor) -> Tensor:
        if _is_empty(x):
            return torch.zeros((), device=x.device)
        found = mask(x).to(torch.float32)
        return found.sum() / _number(x).clamp(min=1.0) if _may_be_empty(x) else reduce_all(torch.mean, found)

    return share


def _count(mask: Statistic) -> Statistic:
    """Number of elements for which the mask holds, as a float: integer sums do not fuse with those beside them."""
    return lambda x: reduce_all(torch.sum, mask(x).to(_dtype(x)))


largest_of = _or_nan(lambda size: reduce_all(torch.amax, _padded(size, 0.0)))  # of absolute values
mean_of = _or_nan(lambda size: reduce_all(torch.mean, size))

STATISTICS: Mapping[str, Statistic] = {
    "max_abs": lambda x: largest_of(size_of(x)),
    "mean_abs": lambda x: mean_of(size_of(x)),
    "norm": norm_of,
    "min": _or_nan(lambda x: reduce_all(torch.amin, _padded(x, math.inf))),
    "max": _or_nan(lambda x: reduce_all(torch.amax, _padded(x, -math.inf))),
    "nan": _count(torch.isnan),
    "inf": _count(torch.isinf),
    "nonfinite": _count(lambda x: torch.isfinite(x).logical_not()),
    "zeros": _share(lambda x: x == 0),
    "saturated_tanh": _share(lambda x: x.abs() >= 0.99),
    "saturated_sigmoid": _share(lambda x: (x <= 0.01) | (x >= 0.99)),
}
COUNTS = frozenset(("nan", "inf", "nonfinite"))
# What grows with the gradient: in units of the unscaled loss where there is a loss scale.
IN_UNITS = frozenset(("max_abs", "mean_abs", "norm", "min", "max"))
