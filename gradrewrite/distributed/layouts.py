"""Layouts: how a global tensor is spread over the processes of a mesh."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from gradrewrite._compat import dtensors

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh
    from torch.distributed.tensor import DTensor, Placement


@dataclass(frozen=True, slots=True)
class Layout:
    """The layout of a DTensor, without its elements."""

    mesh: DeviceMesh  # processes
    placements: tuple[Placement, ...]  # for each dimension of the mesh: sharded, replicated, or partial sums
    shape: torch.Size  # sizes of the global tensor; symbolic ones may be among them
    stride: tuple[int, ...]

    @classmethod
    def of(cls, tensor: Tensor) -> Layout | None:
        """Return the layout of a tensor; None if it is no DTensor."""
        if not dtensors.is_dtensor(tensor):
            return None
        return cls(tensor.device_mesh, tuple(tensor.placements), tensor.shape, tuple(tensor.stride()))

    @property
    def is_static(self) -> bool:
        """Whether no size is symbolic."""
        return all(isinstance(size, int) for size in (*self.shape, *self.stride))

    def wrap(self, local: Tensor) -> DTensor:
        """Return the global tensor of this process's part; nothing is sent."""
        from torch.distributed.tensor import DTensor

        return DTensor.from_local(
            local, self.mesh, self.placements, run_check=False, shape=self.shape, stride=self.stride
        )

    def unwrap(self, tensor: DTensor) -> Tensor:
        """Return this process's part of a global tensor; partial sums are the tensor divided by their number."""
        local = tensor.redistribute(self.mesh, without_partial(self.placements)).to_local()
        for dim, placement in enumerate(self.placements):
            if placement.is_partial("sum"):
                local = local / self.mesh.size(dim)
        return local


@dataclass(frozen=True, slots=True)
class InputLayouts:
    """The layouts of the inputs of a graph that are DTensors, by position; filled in while the graph is traced."""

    values: dict[int, Layout] = field(default_factory=dict)  # those of the inputs
    gradients: dict[int, Layout] = field(default_factory=dict)  # those of their gradients


def added_up(tensor: DTensor) -> DTensor:
    """Add partial sums up, so that each element is in one place: replicated where it was partial."""
    if not any(placement.is_partial() for placement in tensor.placements):
        return tensor
    return tensor.redistribute(tensor.device_mesh, without_partial(tensor.placements))


def without_partial(placements: Sequence[Placement]) -> list[Placement]:
    """Return placements with replicas in the place of partial sums."""
    from torch.distributed.tensor import Replicate

    return [Replicate() if placement.is_partial() else placement for placement in placements]


def full(tensor: Tensor) -> Tensor:
    """Return a global tensor whole, as a plain one; a plain tensor itself."""
    return tensor.full_tensor() if dtensors.is_dtensor(tensor) else tensor
