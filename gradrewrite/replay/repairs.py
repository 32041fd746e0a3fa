"""Repairs of arguments, to try an advice."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from gradrewrite.replay.reasons import Arguments


def widened(args: Arguments) -> Arguments:
    """Compute in float32 instead of float16."""
    return [a.float() if isinstance(a, Tensor) and a.dtype == torch.float16 else a for a in args]


def filled(args: Arguments) -> Arguments:
    """Replace infinities and NaN in tensors by 0."""
    return [torch.nan_to_num(a, 0.0, 0.0, 0.0) if isinstance(a, Tensor) and a.is_floating_point() else a for a in args]


def changed(number: int, change: Callable[[Tensor], Tensor]) -> Callable[[Arguments], Arguments]:
    """Return a repair that changes one tensor."""

    def repair(args: Arguments) -> Arguments:
        value = args[number] if number < len(args) else None
        if not isinstance(value, Tensor):
            return args
        return [*args[:number], change(value).to(value.dtype), *args[number + 1 :]]

    return repair


def least(x: Tensor) -> Tensor:
    """Bound a value from below by a small positive number with a finite inverse."""
    return x.clamp_min(max(1e-6, torch.finfo(x.dtype).tiny ** 0.5))


def not_zero(x: Tensor) -> Tensor:
    """Replace zeros by a small number."""
    return torch.where(x == 0, torch.finfo(x.dtype).eps, x) if x.is_floating_point() else x.clamp_min(1)


def bounded(x: Tensor) -> Tensor:
    """Bound the operand of an exponential."""
    limit = min(20.0, math.log(torch.finfo(x.dtype).max) / 2)
    return x.clamp(-limit, limit)


def inside(x: Tensor) -> Tensor:
    """Bound a value inside of -1 to 1."""
    eps = torch.finfo(x.dtype).eps
    return x.clamp(-1 + eps, 1 - eps)


def summed(args: Arguments) -> Arguments:
    """Take the sum instead of the mean, in a loss of classes or in its backward."""
    at = 3 if len(args) > 3 and isinstance(args[3], int) else 4
    return ["sum" if arg == "mean" else 2 if n == at else arg for n, arg in enumerate(args)]


def of_one(args: Arguments) -> Arguments:
    """Reduce a zero instead of nothing."""
    x = args[0]
    return [x.new_zeros([max(1, size) for size in x.shape]), *args[1:]] if isinstance(x, Tensor) else args


def regular(x: Tensor) -> Tensor:
    """Add a small diagonal to square matrices."""
    return x + 1e-3 * torch.eye(x.shape[-1], dtype=x.dtype, device=x.device)


def open_rows(args: Arguments) -> Arguments:
    """Replace rows of -inf by 0."""
    x, dim = args[0], args[1] if len(args) > 1 else -1
    dim = dim[0] if isinstance(dim, list | tuple) else dim
    return [torch.where(torch.isneginf(x).all(dim, keepdim=True), torch.zeros_like(x), x), *args[1:]]


def open_mask(args: Arguments) -> Arguments:
    """Let a query that sees no key see all."""

    def opened(x: Any) -> Any:
        if not isinstance(x, Tensor):
            return x
        if x.is_floating_point():
            return torch.where(torch.isneginf(x).all(-1, keepdim=True), torch.zeros_like(x), x)
        return x | x.logical_not().all(-1, keepdim=True)

    return [*args[:3], *map(opened, args[3:])]


def kink_moved(args: Arguments) -> Arguments:
    """Replace zeros in the divisor of a backward."""
    number = 1 if len(args) > 1 and isinstance(args[1], Tensor) else 0
    return changed(number, not_zero)(args)
