"""Held elements, and functions at parameters, under DistributedDataParallel and FSDP2, against one process."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

import gradrewrite as gr
from gradrewrite.passes import DecayWeights, Hold

from ranks import outcomes_of, run_parts

RANKS, WIDTH, STEPS = 2, 4, 4


def is_small(gradient: Tensor, value: Tensor) -> Tensor:
    return gradient.abs() < 0.05


def half_way(value: Tensor, before: Tensor) -> Tensor:
    return 0.5 * (value + before).clamp(-0.6, 0.6)


POLICY = [
    gr.on("step:*", DecayWeights(0.1)),
    gr.on("step:*", Hold(is_small)),
    gr.on("param:0.weight", half_way),
    gr.on("state:*.exp_avg", lambda moment: 0.5 * moment),
]
REFUSED = {
    "hold": gr.on("step:0.weight", Hold(lambda g, v: g.abs() < g.abs().mean())),
    "function": gr.on("param:0.weight", lambda value: value / value.norm()),
}


def made() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(WIDTH, 5), nn.Tanh(), nn.Linear(5, 3)).double()


def batch(step: int, rank: int | None) -> Tensor:
    x = torch.randn(RANKS * 3, WIDTH, generator=torch.Generator().manual_seed(step), dtype=torch.float64)
    return x if rank is None else x.chunk(RANKS)[rank]


def train(run: Any, model: Any, rank: int | None) -> dict[str, Any]:
    optimizer = gr.guard(torch.optim.AdamW(model.parameters(), lr=0.1), model)
    for step in range(STEPS):
        optimizer.zero_grad()
        run(batch(step, rank)).square().mean().backward()
        optimizer.step()
    return {name: p.detach() for name, p in model.named_parameters()}


def in_data_parallel(rank: int) -> Any:
    model = gr.transform(made(), POLICY)
    return train(DistributedDataParallel(model), model, rank)


def in_shards(rank: int) -> Any:
    model = gr.transform(made(), POLICY, regions=["0", "2"])
    for block in (model[0], model[2], model):
        fully_shard(block)
    return {name: p.full_tensor() for name, p in train(model, model, rank).items()}


def refused(rank: int) -> Any:
    found = {}
    for name, policy in REFUSED.items():
        model = gr.transform(made(), policy, regions=["0", "2"])
        for block in (model[0], model[2], model):
            fully_shard(block)
        try:
            train(model, model, rank)
        except gr.PolicyError as err:
            found[name] = str(err)
    return found


PARTS = [in_data_parallel, in_shards, refused]

pytestmark = [pytest.mark.distributed, pytest.mark.slow]


@pytest.fixture(scope="module")
def outcomes(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    path: Path = tmp_path_factory.mktemp("ranks")
    return outcomes_of(__file__, path, RANKS)


@pytest.mark.parametrize("part", ["in_data_parallel", "in_shards"])
def test_equals_one_process(outcomes: list[dict[str, Any]], part: str) -> None:
    model = gr.transform(made(), POLICY)
    expected = train(model, model, None)
    for found in outcomes:
        assert not isinstance(found[part], str), found[part]
        for key, p in found[part].items():
            torch.testing.assert_close(p, expected[key], rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize("name", REFUSED)
def test_what_needs_the_whole_parameter_is_refused(outcomes: list[dict[str, Any]], name: str) -> None:
    for found in outcomes:
        assert ":0.weight: " in found["refused"][name], found["refused"]
        assert "2 ranks" in found["refused"][name], found["refused"]


if __name__ == "__main__":
    run_parts(PARTS)
