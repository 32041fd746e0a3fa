"""DTensors over a device mesh: this rank's part, and the parts of the whole."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from gradrewrite._compat.dtensors import is_dtensor

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh


@dataclass(frozen=True, slots=True)
class Spread:
    """The layout of a tensor over ranks."""

    ranks: tuple[int, ...]  # global ranks of its mesh, ascending
    replicas: int  # how many ranks hold each element
    size: int  # number of elements of the whole tensor


def ranks_of(mesh: DeviceMesh) -> tuple[int, ...]:
    """Return the global ranks of a mesh, ascending."""
    return tuple(sorted(int(rank) for rank in mesh.mesh.flatten().tolist()))


def local_of(tensor: Tensor) -> Tensor:
    """Return the part of a DTensor that this rank holds, without padding and with the same memory; else the tensor."""
    if not is_dtensor(tensor):
        return tensor
    with torch.no_grad():
        return tensor.to_local()


def like_of(part: Tensor, whole: Tensor | None) -> Tensor:
    """Return a tensor as the part of a DTensor that is spread like another one; as it is beside a plain one."""
    if whole is None or not is_dtensor(whole):
        return part
    from torch.distributed.tensor import DTensor

    return DTensor.from_local(
        part, whole.device_mesh, whole.placements, run_check=False, shape=whole.shape, stride=whole.stride()
    )


def spread_of(tensor: Tensor) -> Spread | None:
    """Return how a tensor is spread, None for a plain one; ValueError for partial placements (``reduced`` first)."""
    if not is_dtensor(tensor):
        return None
    if any(placement.is_partial() for placement in tensor.placements):
        raise ValueError(f"a tensor with placements {tensor.placements} is to be reduced first")
    sizes = zip(tensor.device_mesh.shape, tensor.placements, strict=True)
    replicas = math.prod(size for size, placement in sizes if placement.is_replicate())
    return Spread(ranks_of(tensor.device_mesh), replicas, tensor.numel())


def reduced(tensor: Tensor) -> Tensor:
    """Return a DTensor with its partial placements reduced to replicas; any other tensor as it is."""
    if not is_dtensor(tensor) or not any(placement.is_partial() for placement in tensor.placements):
        return tensor
    from torch.distributed.tensor import Replicate

    placements = [Replicate() if placement.is_partial() else placement for placement in tensor.placements]
    return tensor.redistribute(placements=placements)
