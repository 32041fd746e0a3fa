"""Triton's interpreter for kernels of Inductor: a math library, faster reductions, runs on twins."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
import torch
import triton.language as tl
from torch._inductor.runtime.triton_heuristics import CachingAutotuner
from torch.utils._pytree import tree_map
from triton.runtime.interpreter import TensorHandle

from gpu.twins import plain, twin

_FLOATS = (
    "acos acosh asin asinh atan atan2 atanh ceil copysign cos cosh erf erfc erfinv exp exp2 expm1 floor fmod hypot "
    "lgamma log log10 log1p log2 nextafter pow rsqrt sin sinh sqrt tan tanh trunc"
).split()
_ROUNDINGS = ("nearbyint", "rint")  # both to even
_TESTS = {"finitef": "isfinite", "isfinited": "isfinite", "isinf": "isinf", "isnan": "isnan", "signbit": "signbit"}
_COMBINED_BY = {
    "maximum": np.maximum,
    "minimum": np.minimum,
    "_any_combine": np.bitwise_or,
    "_prod_accumulate": np.multiply,
}


def libdevice() -> dict[str, Callable[..., Any]]:
    """CUDA's math functions, which the interpreter lacks (its own return None), by torch on the CPU."""
    found = {name: _calling(getattr(torch, name), returns_bool=False) for name in _FLOATS}
    found |= {name: _calling(torch.round, returns_bool=False) for name in _ROUNDINGS}
    return found | {name: _calling(getattr(torch, test), returns_bool=True) for name, test in _TESTS.items()}


def _calling(function: Callable[..., Any], *, returns_bool: bool) -> Callable[..., Any]:
    def run(*args: Any) -> Any:
        with plain():
            out = function(*(torch.from_numpy(np.ascontiguousarray(arg.handle.data)) for arg in args)).numpy()
        scalar = tl.int32 if returns_bool else args[0].type.scalar
        type_ = tl.block_type(scalar, args[0].shape) if args[0].type.is_block() else scalar
        return tl.tensor(TensorHandle(out.astype(np.int32) if returns_bool else out, scalar), type_)

    return run


def reduction(general: Callable[..., Any]) -> Callable[..., Any]:
    """Inductor's own reductions by numpy; the interpreter's general way takes each element by itself."""

    def reduce(self: Any, input: Any) -> Any:
        ufunc = _COMBINED_BY.get(self.combine_fn.fn.__name__)
        if ufunc is None or len(input) != 1:
            return general(self, input)
        values = ufunc.reduce(input[0].handle.data, axis=self.axis, keepdims=self.keep_dims)
        return self.to_tensor(values, input[0].dtype)

    return reduce


def interpret(tuner: CachingAutotuner, args: Sequence[Any], kwargs: Mapping[str, Any]) -> None:
    """Run a kernel on twins, in the configuration with the fewest programs, each of which is slow."""
    with plain(), np.errstate(all="ignore"):
        reals = tree_map(twin, tuple(args))
        grids = [(*tuner._interpret_args_grid(reals, config), config) for config in tuner.configs]
        reals, grid, chosen = min(grids, key=lambda entry: math.prod(entry[1]))
        tuner.fn[grid](*reals, **kwargs, **chosen.kwargs)
