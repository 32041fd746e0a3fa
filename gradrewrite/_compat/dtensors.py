"""DTensors: telling them from plain tensors, and the tensor that this process holds of one."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Any, TypeGuard

from torch import Tensor

if TYPE_CHECKING:
    from torch.distributed.tensor import DTensor


def is_dtensor(value: Any) -> TypeGuard[DTensor]:
    """Return whether a value is a DTensor, without importing DTensors."""
    tensors = sys.modules.get("torch.distributed.tensor")
    return tensors is not None and isinstance(value, tensors.DTensor)


def local_of(tensor: DTensor) -> Tensor:
    """Return this process's part of a DTensor, without an autograd node."""
    return tensor._local_tensor


def laid_out_as(whole: Tensor, like: DTensor) -> DTensor:
    """Return a global tensor that every process has, as a DTensor in the layout of another; nothing is sent."""
    from torch.distributed.tensor import DTensor, Replicate

    mesh = like.device_mesh
    replicated = DTensor.from_local(whole, mesh, [Replicate()] * mesh.ndim, run_check=False)
    return replicated.redistribute(mesh, [Replicate() if p.is_partial() else p for p in like.placements])
