"""``audit`` of models that FSDP2 shards, and on the ranks of DistributedDataParallel."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

import gradrewrite as gr

from ranks import outcomes_of, run_parts

RANKS = 2


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.blocks = nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 4))
        self.router, self.head = nn.Linear(4, 4), nn.Linear(4, 1)

    def forward(self, x: Tensor) -> Tensor:
        h = self.blocks(x) * self.router(x).round()
        return self.head(h).square().mean()


def of(model: nn.Module) -> dict[str, tuple[str, str]]:
    found = gr.audit(model, torch.ones(3, 4))
    return {row.name: (row.verdict, row.op) for row in found.rows}


def in_shards(rank: int) -> Any:
    model = Net()
    for block in [model.blocks[0], model.blocks[2], model]:
        fully_shard(block)
    return of(model)


def in_data_parallel(rank: int) -> Any:
    model = Net()
    parallel = DistributedDataParallel(model)
    found = of(model)
    parallel(torch.ones(3, 4)).backward()
    return found


PARTS = [in_shards, in_data_parallel]

pytestmark = [pytest.mark.distributed, pytest.mark.slow]


@pytest.fixture(scope="module")
def outcomes(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    path: Path = tmp_path_factory.mktemp("ranks")
    return outcomes_of(__file__, path, RANKS)


@pytest.mark.parametrize("part", ["in_shards", "in_data_parallel"])
def test_verdicts_are_those_of_one_process(outcomes: list[dict[str, Any]], part: str) -> None:
    expected = of(Net())

    assert expected["router.weight"] == ("no gradient", "round")
    assert expected["blocks.0.weight"] == ("trained", "")
    for found in outcomes:
        assert found[part] == expected


if __name__ == "__main__":
    run_parts(PARTS)
