"""The code of docs/distributed.md runs on two processes."""

from __future__ import annotations

import re
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Shard, distribute_tensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, SequenceParallel, parallelize_module
from torch.nn.parallel import DistributedDataParallel

import gradrewrite as gr
from gradrewrite import passes

from helpers import ROOT
from ranks import outcomes_of, run_parts

BLOCKS = re.findall(r"```python\n(.*?)```", (ROOT / "docs" / "distributed.md").read_text(), re.DOTALL)
NAMES = (init_device_mesh, fully_shard, Shard, ColwiseParallel, RowwiseParallel, SequenceParallel, parallelize_module)


class Layers(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(4, 4) for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x).tanh()
        return x


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.ln, self.fc, self.out = nn.LayerNorm(4), nn.Linear(4, 8), nn.Linear(8, 4)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.out(torch.tanh(self.fc(self.ln(x))))


class Blocks(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList([Block()])

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
        return x


def names(rank: int, model: nn.Module) -> dict[str, Any]:
    return {
        **{name: getattr(passes, name) for name in passes.__all__},
        **{value.__name__: value for value in NAMES},
        **{"gr": gr, "torch": torch, "DistributedDataParallel": DistributedDataParallel},
        **{"rank": rank, "step": 100, "model": model},
    }


def run(rank: int, code: str, model: nn.Module | None = None, called: str = "model") -> dict[str, Any]:
    """Run a block, and a backward of what it made."""
    torch.manual_seed(0)
    known = names(rank, model or Layers())
    exec(code.replace('torch.distributed.init_process_group("gloo")', ""), known)
    torch.manual_seed(0 if "mesh" in known else rank)
    x = torch.randn(2, 4, 4)
    output = known[called](distribute_tensor(x, known["mesh"], [Shard(1)]) if "mesh" in known else x)
    (output.full_tensor() if isinstance(output, DTensor) else output).square().sum().backward()
    if "optimizer" in known:
        known["optimizer"].step()
    return known


def agreement(rank: int) -> float:
    known = run(rank, BLOCKS[0], called="ddp")
    return known["model"].monitor.latest()["total_norm@step:group:default"]


def reduction(rank: int) -> float:
    torch.manual_seed(rank)
    model = gr.transform(Layers(), gr.on("error:layers.*", passes.Observe("max_abs")))
    model(torch.randn(2, 4)).sum().backward()
    known = names(rank, model)
    exec(BLOCKS[1], known)
    return known["records"]["max_abs@error:layers.0"]


def all_reduce(rank: int) -> float:
    return run(rank, BLOCKS[2])["model"].monitor.latest()["total_norm@group:default"]


def tensor_parallel(rank: int) -> float:
    return run(rank, BLOCKS[3], Blocks())["model"].monitor.latest()["total_norm@group:default"]


def regions(rank: int) -> float:
    known = run(rank, f"policy = gr.on('step:*', ClipByGlobalNorm(1.0))\n{BLOCKS[4]}")
    return known["model"].monitor.latest()["total_norm@step:group:default"]


PARTS = [agreement, reduction, all_reduce, tensor_parallel, regions]


@pytest.fixture(scope="module")
def of_two(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    return outcomes_of(__file__, tmp_path_factory.mktemp("two"), 2)


@pytest.mark.parametrize("part", [part.__name__ for part in PARTS])
def test_block(of_two: list[dict[str, Any]], part: str) -> None:
    first, second = (outcomes[part] for outcomes in of_two)
    assert isinstance(first, float), first
    assert first == second > 0


@pytest.mark.pure
def test_every_block_runs() -> None:
    assert len(BLOCKS) == len(PARTS)


if __name__ == "__main__":
    run_parts(PARTS)
