"""Statistics of tensors in host memory by a compiled function, ``native_statistics.cpp``: each tensor is read once."""

from __future__ import annotations

import ctypes
import functools
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from gradrewrite._compat import cpp_library
from gradrewrite.errors import RewriteWarning
from gradrewrite.numerics.statistics import STATISTICS

_SOURCE = Path(__file__).with_suffix(".cpp")
_NUMBERS = {name: n for n, name in enumerate(name for name, one in STATISTICS.items() if one.is_native)}
_TYPES = {torch.float32: 0, torch.float64: 1, torch.bfloat16: 2, torch.float16: 3}
_COPY = -1  # in place of the number of statistics: the elements themselves


@functools.cache
def compiled_function() -> Callable[..., None] | None:
    """Return the compiled function; None, with a warning if it fails to build, without a working C++ compiler.

    It is built at the first call, in about a second, and kept in torch's cache folder.
    """
    try:
        library = cpp_library.build_cpp(_SOURCE)
        if library is None:
            return None
        function = ctypes.CDLL(str(library)).gradrewrite_figures
    except (RuntimeError, OSError) as err:
        text = f"statistics on the CPU will be slow, for their compiled function could not be built: {err}"
        warnings.warn(text, RewriteWarning, stacklevel=2)
        return None
    address, number = ctypes.c_void_p, ctypes.c_int64
    function.argtypes = [address, address, address, number, address]
    function.restype = None
    run: Callable[..., None] = function
    return run


@dataclass(frozen=True, slots=True)
class _Call:
    given: Any  # the first argument of the compiled function
    alive: tuple[Any, ...]  # the arrays that it points to
    array: Any  # type of an array with a number for each tensor
    names: tuple[tuple[str, ...], ...]  # the statistics of each tensor
    copied: tuple[int, ...]  # positions of those without any, which are copied
    count: int  # of figures, without what is copied
    dtype: torch.dtype  # of the figures


def names_of(statistics: str) -> tuple[tuple[str, ...], ...]:
    """Return the statistics of each tensor: ``norm,zeros; ; max`` are those of three tensors; the second has none."""
    return tuple(tuple(names.split(",")) if names else () for names in statistics.split("; "))


@functools.lru_cache(maxsize=4096)
def _call(statistics: str, checks: tuple[int, ...], dtypes: tuple[torch.dtype, ...]) -> _Call | None:
    """See ``_Call``; None if a type or a statistic is not known."""
    names = names_of(statistics)
    if any(dtype not in _TYPES for dtype in dtypes) or any(name not in _NUMBERS for own in names for name in own):
        return None
    lists: list[int] = []
    known: dict[tuple[str, ...], int] = {}
    for own in names:
        if own not in known:
            known[own] = len(lists)
            lists += [len(own) if own else _COPY, *(_NUMBERS[name] for name in own)]
    is_wide, number = torch.float64 in dtypes, len(dtypes)
    arrays = [_array(n) for n in ([_TYPES[d] for d in dtypes], [known[own] for own in names], lists, checks)]
    addresses = list(map(ctypes.addressof, arrays))
    return _Call(
        given=_array([number, *addresses[:3], len(checks), addresses[3], int(is_wide)]),
        alive=tuple(arrays),
        array=ctypes.c_int64 * number,
        names=names,
        copied=tuple(n for n, own in enumerate(names) if not own),
        count=sum(map(len, names)) + bool(checks),
        dtype=torch.float64 if is_wide else torch.float32,
    )


def _array(numbers: Sequence[int]) -> Any:
    return (ctypes.c_int64 * len(numbers))(*numbers)


# Called by map: a loop in Python costs as much as measuring a small tensor.
_dtype_of: Callable[[Tensor], torch.dtype] = Tensor.dtype.__get__  # type: ignore[attr-defined]
_address_of, _size_of, _is_contiguous, _is_negated = Tensor.data_ptr, Tensor.numel, Tensor.is_contiguous, Tensor.is_neg


def figures_of(xs: Sequence[Tensor], statistics: str, checks: Sequence[int] = ()) -> Tensor | None:
    """Statistics of tensors in host memory, then one figure more where something is checked.

    A tensor without statistics (see ``names_of``) is figures itself. ``checks`` are positions of figures; the last
    figure is then 1 if one of them is > 0, else 0. Returns ``[N]``, float64 if a tensor is, else float32; None where
    the compiled function is missing, or does not know a statistic or the type of a tensor (complex, whole numbers).
    """
    function = compiled_function()
    call = _call(statistics, tuple(checks), tuple(map(_dtype_of, xs)))
    if function is None or call is None:
        return None
    if not all(map(_is_contiguous, xs)) or any(map(_is_negated, xs)):
        xs = [_dense(x) if own else x.resolve_neg().contiguous() for x, own in zip(xs, call.names, strict=True)]
    sizes = list(map(_size_of, xs))
    result = xs[0].new_empty(call.count + sum(sizes[n] for n in call.copied), dtype=call.dtype)
    addresses = call.array(*map(_address_of, xs))
    function(call.given, addresses, call.array(*sizes), torch.get_num_threads(), result.data_ptr())
    return result


def _dense(tensor: Tensor) -> Tensor:
    """The same elements, contiguous, in any order; not copied if they are dense already."""
    order = sorted(range(tensor.dim()), key=lambda d: (tensor.stride(d), tensor.shape[d]), reverse=True)
    return tensor.resolve_neg().permute(order).contiguous()
