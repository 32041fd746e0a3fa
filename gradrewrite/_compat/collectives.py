"""Functional collectives: operations that a graph can hold, begun at one node and waited for at another."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor, fx

from gradrewrite._compat.versions import needed_for

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup


def begin_sum(tensor: Tensor, group: ProcessGroup) -> Tensor:
    """Start the sum of a tensor over the processes of a group; the result is valid behind ``wait`` only."""
    _register()
    result: Tensor = torch.ops._c10d_functional.all_reduce(tensor, "sum", group.group_name)
    return result


def begin_max(tensor: Tensor, group: ProcessGroup) -> Tensor:
    """Start the maximum of a tensor over the processes of a group; see ``begin_sum``. NaN may be dropped."""
    _register()
    result: Tensor = torch.ops._c10d_functional.all_reduce(tensor, "max", group.group_name)
    return result


def wait(tensor: Tensor) -> Tensor:
    """Wait for a collective: on the CPU the host does, on a GPU the stream."""
    _register()
    result: Tensor = torch.ops._c10d_functional.wait_tensor(tensor)
    return result


def gather_rows(rows: Tensor, group: ProcessGroup) -> Tensor:
    """Stack the rows of all processes of a group, ``[M, N]`` of each, in the order of their ranks; waits for them."""
    _register()
    return wait(torch.ops._c10d_functional.all_gather_into_tensor(rows, group.size(), group.group_name))


def is_collective(node: fx.Node) -> bool:
    """Whether a node of a graph is a functional collective, or a wait for one."""
    return isinstance(node.target, torch._ops.OpOverload) and node.target.namespace == "_c10d_functional"


def _register() -> None:
    with needed_for("functional collectives can be nodes of a graph"):
        import torch.distributed._functional_collectives  # noqa: F401 - it registers the operators
