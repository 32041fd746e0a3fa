"""Reductions in two stages, as kernels of a GPU take them.

The first stage reduces the innermost dimensions, as layer norms, softmaxes and their backwards do: Inductor fuses it
with what makes the tensor. The second stage reads little, and is launched together with those of other sites.
"""

from __future__ import annotations

import math
from collections.abc import Callable

from torch import Tensor

_ENOUGH = 64  # elements of the innermost dimensions
_LARGE = 4096  # elements of a tensor that one stage does not reduce well


def reduce_all(reduce: Callable[..., Tensor], x: Tensor) -> Tensor:
    """Reduce a tensor to one element.

    ``reduce`` is a function of a tensor and, if not all of them, its dimensions: ``torch.amax``, ``torch.sum``,
    ``torch.any`` or ``torch.mean`` (rows have equal lengths).
    """
    inner = _innermost(x)
    return reduce(reduce(x, inner)) if inner else reduce(x)


def _innermost(x: Tensor) -> tuple[int, ...]:
    """The dimensions of the first stage; none where one stage is enough, or a size is not known."""
    is_known = all(isinstance(n, int) for n in (*x.shape, *x.stride()))
    if x.device.type != "cuda" or not is_known or x.numel() < _LARGE:
        return ()
    chosen: list[int] = []
    for dim in sorted(range(x.dim()), key=lambda d: (x.stride(d), x.shape[d])):
        chosen.append(dim)
        if math.prod(x.shape[d] for d in chosen) >= _ENOUGH:
            break
    return tuple(sorted(chosen)) if len(chosen) < x.dim() else ()
