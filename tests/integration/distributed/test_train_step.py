"""``train_step`` with ``AllReduce`` on ranks: equal to one process with the whole batch."""

from __future__ import annotations

import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import gradrewrite as gr
from gradrewrite.passes import AllReduce, CheckFinite, ClipByGlobalNorm

from ranks import outcomes_of, run_parts

pytestmark = pytest.mark.sample(6)  # ranks that start and train take a minute

WIDTH, ROWS, STEPS, RANKS, BAD = 8, 4, 8, 2, 5


class Net(nn.Module):
    """Two layers and a loss."""

    def __init__(self) -> None:
        super().__init__()
        self.one, self.two = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, 1)

    def forward(self, x: Tensor) -> Tensor:
        loss: Tensor = self.two(self.one(x).tanh()).square().mean()
        return loss


CLIP = gr.on("gradient:*", ClipByGlobalNorm(0.05))
POLICIES: Mapping[str, list[Any]] = {
    "average": [gr.on("gradient:*", AllReduce()), CLIP],
    "skip": [gr.on("gradient:*", AllReduce()), gr.on("gradient:*", CheckFinite("skip")), CLIP],
    "skip alone": [gr.on("gradient:*", [CheckFinite("skip"), AllReduce()]), CLIP],
}


def batch(step: int, *, has_bad: bool) -> Tensor:
    x = torch.randn(RANKS * ROWS, WIDTH, generator=torch.Generator().manual_seed(step)).double()
    if has_bad and step == BAD:
        x[0, 0] = torch.inf  # a row of rank 0
    return x


def train(name: str, rank: int | None) -> dict[str, Any]:
    """Train on the rows of one rank; without ranks on all, in two phases."""
    torch.manual_seed(0)
    policy = [rule for rule in POLICIES[name] if rank is not None or "AllReduce" not in repr(rule)]
    if rank is None and name == "skip alone":
        policy = [gr.on("gradient:*", CheckFinite("skip")), CLIP]
    model = gr.transform(Net().double(), policy)
    optimizer = gr.guard(torch.optim.AdamW(model.parameters(), lr=0.01), model)
    step = None if rank is None else gr.train_step(model, optimizer, compile=False)
    norms = []
    for number in range(STEPS):
        x = batch(number, has_bad=name.startswith("skip"))
        if step is not None:
            step(x.chunk(RANKS)[rank])
        else:
            model(x).backward()
            optimizer.step()
            optimizer.zero_grad()
        norms.append(model.monitor.latest()["total_norm@group:default"])
    return {
        "parameters": [p.detach().clone() for p in model.parameters()],
        "norms": norms,
        "skipped": model.monitor.skipped,
    }


def trained(rank: int) -> Any:
    return {name: train(name, rank) for name in POLICIES}


@pytest.fixture(scope="module")
def outcomes() -> list[dict[str, Any]]:
    with tempfile.TemporaryDirectory() as folder:
        return outcomes_of(__file__, Path(folder), RANKS)


@pytest.mark.parametrize("name", POLICIES)
def test_ranks_train_as_one_process_does(outcomes: list[dict[str, Any]], name: str) -> None:
    wanted = train(name, None)
    assert wanted["skipped"] == name.startswith("skip")
    for own in outcomes:
        got = own["trained"]
        assert isinstance(got, dict), got
        torch.testing.assert_close(got[name]["parameters"], wanted["parameters"], rtol=1e-12, atol=1e-12)
        torch.testing.assert_close(got[name]["norms"], wanted["norms"], rtol=1e-12, atol=1e-12, equal_nan=True)
        assert got[name]["skipped"] == wanted["skipped"]


if __name__ == "__main__":
    run_parts([trained])
