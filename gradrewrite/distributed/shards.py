"""DTensors over a device mesh: this rank's part, and the parts of the whole."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from gradrewrite._compat.dtensors import is_dtensor
from gradrewrite.distributed.layouts import Layout

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
    layout = None if whole is None else Layout.of(whole)
    return part if layout is None else layout.wrap(part)


def spread_of(tensor: Tensor) -> Spread | None:
    """Return how a tensor is spread, None for a plain one; ValueError for partial placements (``added_up`` first)."""
    if not is_dtensor(tensor):
        return None
    if any(placement.is_partial() for placement in tensor.placements):
        raise ValueError(f"a tensor with placements {tensor.placements} is to be reduced first")
    sizes = zip(tensor.device_mesh.shape, tensor.placements, strict=True)
    replicas = math.prod(size for size, placement in sizes if placement.is_replicate())
    return Spread(ranks_of(tensor.device_mesh), replicas, tensor.numel())
