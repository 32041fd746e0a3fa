"""Uses, functions of several values, and constant weights of losses under DistributedDataParallel and FSDP2."""

from __future__ import annotations

import copy
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

import gradrewrite as gr
from gradrewrite.passes import Scale, WeighLosses

from ranks import outcomes_of, run_parts

RANKS, WIDTH = 2, 4


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.router, self.down = (nn.Linear(WIDTH, WIDTH) for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        h = self.up(x)
        y: Tensor = self.down(h.tanh()) * self.router(h).sigmoid()
        return y


class Net(nn.Module):
    def __init__(self, losses: int = 1) -> None:
        super().__init__()
        self.blocks, self.head, self.losses = nn.Sequential(Block(), Block()), nn.Linear(WIDTH, 1), losses

    def forward(self, x: Tensor) -> Any:
        h = self.blocks(x)
        parts = self.head(h).square().mean(), h.sin().mean()
        return parts if self.losses == 2 else parts[0] + parts[1]


def by_router(g: Tensor, *, router: Tensor, w: Tensor) -> Tensor:
    return g * (router.sigmoid() + w.mean())


def follow(errors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Linear, and by example, so that ranks and one process agree."""
    (name, e), (_, other) = errors.items()
    return {name: e + other.sum(-1, keepdim=True)}


POLICIES: dict[str, Any] = {
    "use": gr.on("error:*.up->*.router", Scale(0.25)),
    "reads": gr.on("error:*.up", by_router, reads={"router": "activation:{parent}.router", "w": "param:{name}.weight"}),
    "together": gr.together("error:blocks.1.[rd]*", follow),
}


def made(losses: int = 1) -> Net:
    torch.manual_seed(0)
    return Net(losses).double()


def batch(rank: int | None) -> Tensor:
    x = torch.randn(RANKS * 3, WIDTH, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    return x if rank is None else x.chunk(RANKS)[rank]


def of_one_process(name: str) -> dict[str, Tensor]:
    model = gr.transform(made(), POLICIES[name])
    model(batch(None)).backward()
    return {key: p.grad for key, p in model.named_parameters() if p.grad is not None}


def in_data_parallel(rank: int) -> Any:
    found = {}
    for name, policy in POLICIES.items():
        model = gr.transform(made(), policy)
        parallel = DistributedDataParallel(model)  # it averages as long as it is there
        parallel(batch(rank)).backward()
        found[name] = {key: p.grad for key, p in model.named_parameters()}
    return found


def in_shards(rank: int) -> Any:
    found = {}
    for name, policy in POLICIES.items():
        model = gr.transform(made(), policy, regions="blocks.?")
        for block in [*model.blocks, model]:
            fully_shard(block)
        model(batch(rank)).backward()
        found[name] = {key: p.grad.full_tensor() for key, p in model.named_parameters()}
    return found


def weighed(rank: int) -> Any:
    plain = made(2)
    model = gr.transform(copy.deepcopy(plain), gr.on("gradient:*", WeighLosses((0.5, 3.0), everywhere=True)))
    parallel = DistributedDataParallel(model)
    sum(parallel(batch(rank))).backward()
    a, b = plain(batch(None))
    (0.5 * a + 3.0 * b).backward()
    return [(p.grad, q.grad) for p, q in zip(model.parameters(), plain.parameters(), strict=True)]


def refused(rank: int) -> Any:
    model = gr.transform(made(), gr.together("gradient:*", lambda g: dict(g)))
    try:
        DistributedDataParallel(model)(batch(rank)).backward()
    except gr.PolicyError as err:
        return str(err)
    return ""


PARTS = [in_data_parallel, in_shards, weighed, refused]

pytestmark = [pytest.mark.distributed, pytest.mark.slow]


@pytest.fixture(scope="module")
def outcomes(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    path: Path = tmp_path_factory.mktemp("ranks")
    return outcomes_of(__file__, path, RANKS)


@pytest.mark.parametrize("part", ["in_data_parallel", "in_shards"])
@pytest.mark.parametrize("name", POLICIES)
def test_equals_one_process(outcomes: list[dict[str, Any]], name: str, part: str) -> None:
    expected = of_one_process(name)
    for found in outcomes:
        assert not isinstance(found[part], str), found[part]
        for key, g in found[part][name].items():
            torch.testing.assert_close(g, expected[key], rtol=1e-10, atol=1e-12)


def test_constant_weights(outcomes: list[dict[str, Any]]) -> None:
    for found in outcomes:
        assert not isinstance(found["weighed"], str), found["weighed"]
        for got, wanted in found["weighed"]:
            torch.testing.assert_close(got, wanted, rtol=1e-10, atol=1e-12)


def test_gradients_before_their_average_are_refused(outcomes: list[dict[str, Any]]) -> None:
    for found in outcomes:
        assert 'gr.on("step:*", joint(' in found["refused"]


if __name__ == "__main__":
    run_parts(PARTS)
