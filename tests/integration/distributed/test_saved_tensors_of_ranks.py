"""DDP and FSDP2 over models with stored saved tensors: as the mean of what each rank finds alone."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel

import gradrewrite as gr
from gradrewrite.passes import Observe, Recompute, Store

from ranks import outcomes_of, run_parts

WIDTH, ROWS = 48, 16  # of float64: 6 KiB
POLICY = [
    gr.on("saved:blocks.*", [Store("int8"), Observe("stored_error")]),
    gr.on("saved:/tanh", Recompute()),
]


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 2 * WIDTH), nn.Linear(2 * WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(nn.functional.gelu(self.up(self.norm(x))))


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks, self.head = nn.ModuleList(Block() for _ in range(2)), nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
        return self.head(x.tanh())


def made() -> Net:
    torch.manual_seed(0)
    return Net().double()


def batch(rank: int) -> Tensor:
    return torch.randn(ROWS, WIDTH, dtype=torch.float64, generator=torch.Generator().manual_seed(rank + 1))


def found(model: Any, run: Any, rank: int) -> dict[str, Any]:
    """Gradients and errors after two steps of the same."""
    for _ in range(2):
        model.zero_grad()
        run(batch(rank)).square().mean().backward()
    gradients = [p.grad.full_tensor() if isinstance(p.grad, DTensor) else p.grad for p in model.parameters()]
    edits = sorted({str(e.site) for graph in model.explain().graphs for e in graph.edits})
    return {"gradients": gradients, "errors": model.monitor.latest(), "edits": edits}


def whole_in_ddp(rank: int) -> Any:
    model = gr.transform(made(), POLICY)
    return found(model, DistributedDataParallel(model), rank)


def regions_in_ddp(rank: int) -> Any:
    model = gr.transform(made(), POLICY[:1], regions="blocks.*")
    return found(model, DistributedDataParallel(model), rank)


def regions_in_fsdp(rank: int) -> Any:
    model = gr.transform(made(), POLICY[:1], regions="blocks.*")
    for block in model.blocks:
        fully_shard(block)
    model = fully_shard(model)
    return found(model, model, rank)


PARTS = (whole_in_ddp, regions_in_ddp, regions_in_fsdp)

pytestmark = [pytest.mark.distributed, pytest.mark.slow]


@pytest.fixture(scope="module")
def of_two(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    return outcomes_of(__file__, tmp_path_factory.mktemp("two"), 2)


@pytest.mark.parametrize("part", [part.__name__ for part in PARTS])
def test_gradients_are_the_mean_of_those_of_each_rank(of_two: list[dict[str, Any]], part: str) -> None:
    is_whole = part == "whole_in_ddp"
    alone = []
    for rank in range(2):
        options = {} if is_whole else {"regions": "blocks.*"}
        model = gr.transform(made(), POLICY if is_whole else POLICY[:1], **options)
        alone.append(found(model, model, rank))
    plain = made()
    sum(plain(batch(rank)).square().mean() / 2 for rank in range(2)).backward()
    wanted = [sum(pair) / 2 for pair in zip(*(one["gradients"] for one in alone), strict=True)]

    for rank, outcomes in enumerate(of_two):
        got = outcomes[part]
        assert isinstance(got, dict), got
        assert got["edits"] == alone[rank]["edits"]
        assert got["errors"] == pytest.approx(alone[rank]["errors"], rel=1e-6)
        torch.testing.assert_close(got["gradients"], wanted, rtol=1e-9, atol=1e-12)
    assert any(
        not torch.allclose(p.grad, g, rtol=1e-6, atol=0) for p, g in zip(plain.parameters(), wanted, strict=True)
    )


if __name__ == "__main__":
    run_parts(PARTS)
