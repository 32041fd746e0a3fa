"""Process groups by the ranks in them, and the number of this process."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor
from torch import distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from gradrewrite._compat.dtensors import is_dtensor
from gradrewrite.distributed.shards import ranks_of
from gradrewrite.errors import PolicyError


def this_rank() -> int | None:
    """Return the rank of this process; None where there is no process group, or only this process."""
    if not dist.is_available() or not dist.is_initialized() or dist.get_world_size() == 1:
        return None
    return dist.get_rank()


def check_group(group: Any) -> None:
    """Raise TypeError unless given a process group, ValueError outside of it."""
    if group is None:
        return
    is_outside = dist.is_available() and group == dist.GroupMember.NON_GROUP_MEMBER
    if not is_outside and not (dist.is_available() and isinstance(group, dist.ProcessGroup)):
        raise TypeError(f"process_group is a torch.distributed.ProcessGroup, got {type(group).__name__}")
    if is_outside or dist.get_rank(group) < 0:
        raise ValueError(f"process_group: rank {dist.get_rank()} is not in it; give a group that this process is in")


class RankGroups:
    """Process groups by their ranks, each looked up once.

    A group for ranks that torch has no group of yet is made by all of these ranks at once, which therefore ask for the
    same groups in the same order.
    """

    def __init__(self) -> None:
        self._groups: dict[tuple[int, ...], dist.ProcessGroup] = {}
        self._meshes: dict[int, tuple[object, tuple[int, ...]]] = {}  # by id; the mesh is held, so the id stays its own

    def note_mesh(self, mesh: DeviceMesh) -> None:
        """Use the group of a mesh for its ranks, if there is one."""
        if mesh.ndim == 1:
            self.ranks_of(mesh.get_group())

    def of_ranks(self, ranks: tuple[int, ...]) -> dist.ProcessGroup:
        """Return a group of these global ranks, in ascending order; this process is one of them."""
        if ranks not in self._groups:
            if len(ranks) == dist.get_world_size():
                group = dist.group.WORLD
            else:
                group = dist.new_group(list(ranks), use_local_synchronization=True)
            assert isinstance(group, dist.ProcessGroup)
            self._groups[ranks] = group
        return self._groups[ranks]

    def known(self, ranks: tuple[int, ...]) -> dist.ProcessGroup:
        """Return the group of these ranks if there is one, or that of all processes; no group is made."""
        group = self._groups.get(ranks, dist.group.WORLD)
        assert isinstance(group, dist.ProcessGroup)
        return group

    def ranks_of(self, group: dist.ProcessGroup) -> tuple[int, ...]:
        """Return the global ranks of a group, ascending, and use the group for them."""
        ranks = tuple(sorted(dist.get_process_group_ranks(group)))
        self._groups.setdefault(ranks, group)
        return ranks

    def of_tensors(self, tensors: Iterable[Tensor], further: dist.ProcessGroup | None) -> dist.ProcessGroup | None:
        """Return a group of all ranks of the meshes of these tensors, or a further group if it has all of these.

        Not of both where each has ranks that the other lacks: no two ranks would then name the same ones. None if there
        is neither, or only this process is in it. ValueError if no mesh has all ranks of the others.
        """
        meshes = {id(t.device_mesh): t.device_mesh for t in tensors if is_dtensor(t)}
        sets = []
        for number, mesh in meshes.items():
            if number not in self._meshes:
                self._meshes[number] = mesh, ranks_of(mesh)
                self.note_mesh(mesh)
            sets.append(frozenset(self._meshes[number][1]))
        ranks: frozenset[int] = frozenset().union(*sets)
        if sets and ranks not in sets:
            shown = ", ".join(str(sorted(found)) for found in sorted(set(sets), key=sorted))
            raise ValueError(
                f"gr.guard: the optimizer's parameters are on the ranks {shown}, of which none has all others, so the "
                "ranks that agree on skipped steps are not known; name them: "
                "gr.guard(optimizer, model, process_group=...)"
            )
        if further is not None and ranks.issubset(around := self.ranks_of(further)):
            ranks = ranks.union(around)
        return self.of_ranks(tuple(sorted(ranks))) if len(ranks) > 1 else None


def resolve_group(group: dist.ProcessGroup | None, what: str) -> dist.ProcessGroup:
    """Return a process group, the default one for None; PolicyError with the name of its user where there is none."""
    if not dist.is_available() or not dist.is_initialized():
        raise PolicyError(
            f"{what} needs a process group: call torch.distributed.init_process_group(...) in each process (torchrun "
            "sets its environment) before the model is called or traced",
            code="process-group",
        )
    found = dist.group.WORLD if group is None else group
    assert isinstance(found, dist.ProcessGroup)
    return found


def device_for(group: dist.ProcessGroup, preferred: torch.device) -> torch.device:
    """Return a device for reductions over a group: the preferred one, unless the group is NCCL's alone."""
    if preferred.type == "cpu" and dist.get_backend(group) == "nccl":
        return torch.device("cuda", torch.cuda.current_device())
    return preferred
