"""Skipped updates on two ranks: buffers of both are those from before the forward."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel

import gradrewrite as gr
from gradrewrite.passes import CheckFinite

from models.buffers import WIDTH, All
from ranks import outcomes_of, run_parts

pytestmark = pytest.mark.sample(6)  # ranks that start and train take a minute

BAD = (2, 3, 5)  # steps with a NaN, on rank 1 alone


def state(model: nn.Module, optimizer: torch.optim.Optimizer) -> list[Tensor]:
    tensors = [*model.state_dict().values()]
    tensors += [t for kept in optimizer.state_dict()["state"].values() for t in kept.values() if isinstance(t, Tensor)]
    return [(t.to_local() if isinstance(t, DTensor) else t).clone() for t in tensors]


def train(rank: int, way: str, *, fused: bool) -> list[bool]:
    """Whether each step has changed something."""
    torch.manual_seed(0)
    model = gr.transform(All(), gr.on("step:*", CheckFinite("skip")))
    called: Any = DistributedDataParallel(model, broadcast_buffers=fused) if way == "ddp" else model
    if way == "fsdp":
        fully_shard(model, mesh=init_device_mesh("cpu", (2,)))
    optimizer = gr.guard(torch.optim.AdamW(model.parameters(), lr=0.01, fused=fused), model)
    changed = []
    for step in range(7):
        x = torch.randn(8, WIDTH, generator=torch.Generator().manual_seed(10 * step + rank))
        if step in BAD and rank == 1:
            x[0] = math.nan
        before = state(model, optimizer)
        optimizer.zero_grad()
        called(x).backward()
        optimizer.step()
        after = state(model, optimizer)
        changed.append(
            len(before) != len(after) or any(not torch.equal(a, b) for a, b in zip(before, after, strict=True))
        )
    return changed


def ddp(rank: int) -> Any:
    return train(rank, "ddp", fused=False)


def ddp_fused(rank: int) -> Any:
    return train(rank, "ddp", fused=True)


def fsdp(rank: int) -> Any:
    return train(rank, "fsdp", fused=False)


def fsdp_fused(rank: int) -> Any:
    return train(rank, "fsdp", fused=True)


PARTS = [ddp, ddp_fused, fsdp, fsdp_fused]


@pytest.fixture(scope="module")
def of_two(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    return outcomes_of(__file__, tmp_path_factory.mktemp("two"), 2)


@pytest.mark.parametrize("part", [part.__name__ for part in PARTS])
def test_a_step_that_one_rank_skips_changes_nothing_on_both(part: str, of_two: list[dict[str, Any]]) -> None:
    first, second = (rank[part] for rank in of_two)
    assert first == [step not in BAD for step in range(7)]
    if part == "ddp_fused":  # DistributedDataParallel gives it the buffers of the first before each forward
        second = [changed and step not in BAD for step, changed in enumerate(second)]
    assert second == first


if __name__ == "__main__":
    run_parts(PARTS)
