"""Strides of the tangents of a graph's outputs."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from gradrewrite._compat.versions import needed_for

with needed_for("AOTAutograd decides by one function in which strides it takes the tangent of an output"):
    from torch._functorch import config as functorch_config
    from torch._functorch._aot_autograd.schemas import MemoryFormatMeta

    _owner: Any = MemoryFormatMeta
    _plain = MemoryFormatMeta.from_tensor


@contextlib.contextmanager
def overlapping_tangents_contiguous() -> Iterator[None]:
    """Take the tangents of outputs with overlapping elements in memory of their own.

    Torch copies a tangent into the strides of its output. Where elements of that share memory, as in windows
    (``unfold``), the copy overwrites what belongs to others.
    """
    _owner.from_tensor = staticmethod(_of_tensor)
    try:
        yield
    finally:
        _owner.from_tensor = staticmethod(_plain)


def _of_tensor(tensor: Tensor, *given: bool) -> Any:
    if not may_overlap(tensor):
        return _plain(tensor, *given)
    with functorch_config.patch(guess_tangent_strides_as_outputs=False):
        return _plain(tensor, *given)


def may_overlap(tensor: Tensor) -> bool:
    """Whether elements of a tensor may share memory; False for symbolic sizes or strides."""
    if tensor.layout is not torch.strided or not all(isinstance(n, int) for n in (*tensor.shape, *tensor.stride())):
        return False
    reached = 0  # the largest offset of the dimensions so far
    for stride, size in sorted(zip(tensor.stride(), tensor.shape, strict=True)):
        if size > 1 and stride <= reached:
            return True
        reached += (size - 1) * stride
    return False
