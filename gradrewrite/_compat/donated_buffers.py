"""Donated buffers of compiled backwards, and retain_graph."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from gradrewrite._compat.aot_autograd import boxed
from gradrewrite._compat.autograd import keeps_graph


def preserve_donated(compiled: Callable[[list[Any]], Any], donated: Sequence[int]) -> Callable[[list[Any]], Any]:
    """Copy donated inputs before a backward that keeps its graph; any other backward may overwrite them."""
    if not donated:
        return compiled

    def run(args: list[Any]) -> Any:
        if keeps_graph():
            for position in donated:
                if isinstance(args[position], Tensor):
                    args[position] = _copied(args[position])
        return compiled(args)

    return boxed(run)


def _copied(tensor: Tensor) -> Tensor:
    """Copy a tensor with all of its storage.

    Workspaces of kernels show a part of it; see ``numerics.recurrent_layers``.
    """
    storage = tensor.untyped_storage()
    if storage.nbytes() == tensor.nbytes:
        return tensor.clone()
    place = storage.clone(), tensor.storage_offset(), tensor.size(), tensor.stride()
    return torch.empty(0, dtype=tensor.dtype, device=tensor.device).set_(*place)
