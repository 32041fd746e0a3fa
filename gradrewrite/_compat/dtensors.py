"""DTensors: telling them from plain tensors, and the tensor that this process holds of one."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Any, TypeGuard

from torch import Tensor

if TYPE_CHECKING:
    from torch.distributed.tensor import DTensor


def is_dtensor(value: Any) -> TypeGuard[DTensor]:
    """Whether a value is a DTensor; does not import what makes them."""
    tensors = sys.modules.get("torch.distributed.tensor")
    return tensors is not None and isinstance(value, tensors.DTensor)


def local_of(tensor: DTensor) -> Tensor:
    """The part of a DTensor that this process holds, itself and without an autograd node."""
    return tensor._local_tensor
