"""FSDP2 over groups of processes that are sequence parallel among themselves.

In processes of its own: where another mesh of these ranks was in use, torch fails to compile blocks that are given the
DTensors of other compiled blocks, without gradrewrite too ("Node tangents_2 was invalid, but is output").
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from integration.distributed.test_tensor_parallel import (
    SEQUENCE,
    STEPS,
    batch_of,
    full_loss,
    make,
    parallelized,
    parameters_and_moments,
)
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import Shard, distribute_tensor

import gradrewrite as gr
from gradrewrite.passes import CheckFinite, ClipByGlobalNorm, ClipByValue

from ranks import outcomes_of, run_parts

ERROR_BOUND, STEP_NORM = 1e-3, 1e-2


def optimizer_of(model: nn.Module) -> torch.optim.Optimizer:
    # With the default eps, small gradients would make the rounding of sums in another order visible.
    return torch.optim.AdamW(model.parameters(), lr=1e-2, eps=1e-4, foreach=False)


def with_fsdp(rank: int) -> Any:
    """Two groups of two processes: sequence parallel in each, and FSDP2 over both; the norm is that at step sites."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    policy = [
        gr.on("error:0.fc", ClipByValue(ERROR_BOUND)),
        gr.on("gradient:*", CheckFinite("skip")),
        gr.on("step:*", ClipByGlobalNorm(STEP_NORM)),
    ]
    model = gr.transform(parallelized(make(), SEQUENCE, mesh["tp"]), policy, regions=["0", "1"])
    for block in model.children():
        fully_shard(block, mesh=mesh["dp"])
    fully_shard(model, mesh=mesh["dp"])
    optimizer = gr.guard(optimizer_of(model), model)
    row, norms = mesh.get_local_rank("dp"), []
    for step in range(STEPS):
        x = batch_of(row, step)
        if step == 5 and row == 0:
            x[0, 0, 0] = torch.nan
        optimizer.zero_grad()
        full_loss(model(distribute_tensor(x, mesh["tp"], [Shard(1)]))).backward()
        optimizer.step()
        norms.append(model.monitor.latest()["total_norm@step:group:default"])
    return *parameters_and_moments(model, optimizer), norms, model.monitor.skipped


pytestmark = [pytest.mark.distributed, pytest.mark.slow, pytest.mark.sample(6)]


@pytest.fixture(scope="module")
def of_four(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    return outcomes_of(__file__, tmp_path_factory.mktemp("four"), 4)


def test_fsdp_and_tensor_parallel(of_four: list[dict[str, Any]]) -> None:
    model = gr.transform(make(), [gr.on("error:0.fc", ClipByValue(ERROR_BOUND))])
    optimizer = optimizer_of(model)
    norms: list[float] = []
    for step in range(STEPS):
        if step == 5:
            norms.append(float("nan"))
            continue
        parts: list[list[Tensor]] = []
        for row in range(2):
            optimizer.zero_grad()
            full_loss(model(batch_of(row, step))).backward()
            parts.append([p.grad.clone() for p in model.parameters() if p.grad is not None])
        for p, *grads in zip(model.parameters(), *parts, strict=True):
            p.grad = torch.stack(grads).mean(0)
        norm = torch.cat([p.grad.flatten() for p in model.parameters() if p.grad is not None]).norm()
        for p in model.parameters():
            if p.grad is not None:
                p.grad *= STEP_NORM / norm
        norms.append(float(norm))
        optimizer.step()
    assert all(norm > STEP_NORM for norm in norms if norm == norm)
    for outcomes in of_four:
        assert not isinstance(outcomes["with_fsdp"], str), outcomes["with_fsdp"]
        parameters, moments, found, skipped = outcomes["with_fsdp"]
        assert skipped == 1
        assert found == pytest.approx(norms, rel=1e-10, nan_ok=True)
        for name, p in model.named_parameters():
            torch.testing.assert_close(parameters[name], p.detach(), rtol=0, atol=1e-10)
            torch.testing.assert_close(moments[name], optimizer.state[p]["exp_avg"], rtol=0, atol=1e-10)


if __name__ == "__main__":
    run_parts([with_fsdp])
