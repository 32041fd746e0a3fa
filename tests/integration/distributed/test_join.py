"""Ranks with different numbers of batches, in the join context of DistributedDataParallel."""

from __future__ import annotations

from datetime import timedelta
from typing import Any

import pytest
import torch
from torch import Tensor, distributed, nn
from torch.nn.parallel import DistributedDataParallel

import gradrewrite as gr
from gradrewrite.passes import ClipByGlobalNorm

from ranks import outcomes_of, run_parts

pytestmark = [pytest.mark.distributed, pytest.mark.slow]
BOUND = 0.1


def parallel(model: nn.Module) -> DistributedDataParallel:
    """In a group of its own, whose ranks wait for each other for ten seconds."""
    return DistributedDataParallel(model, process_group=distributed.new_group(timeout=timedelta(seconds=10)))


def make() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 1)).double()


def batches(rank: int) -> list[Tensor]:
    """Two on rank 0, four on rank 1."""
    generator = torch.Generator().manual_seed(rank)
    return [torch.randn(3, 4, generator=generator, dtype=torch.float64) for _ in range(2 + 2 * rank)]


def guarded(group: Any = None) -> tuple[DistributedDataParallel, torch.optim.Optimizer]:
    model = gr.transform(make(), gr.on("step:*", ClipByGlobalNorm(BOUND)))
    optimizer = gr.guard(torch.optim.SGD(model.parameters(), lr=0.1), model, process_group=group)
    return parallel(model), optimizer


def train(model: nn.Module, optimizer: torch.optim.Optimizer, rank: int, clip: Any = None) -> None:
    for x in batches(rank):
        optimizer.zero_grad()
        model(x).square().sum().backward()
        if clip is not None:
            clip(model)
        optimizer.step()


def joined(rank: int) -> None:
    model, optimizer = guarded()
    with model.join():
        train(model, optimizer, rank)


def ended_early(rank: int) -> None:
    model, optimizer = guarded()
    with model.join(throw_on_early_termination=True):
        train(model, optimizer, rank)


def clip_by_hand(model: nn.Module) -> None:
    gradients = [p.grad for p in model.parameters() if p.grad is not None]
    total = torch.stack([g.norm() for g in gradients]).norm()
    for g in gradients:
        g.mul_((BOUND / total).clamp(max=1.0))


def alone(rank: int) -> tuple[list[Tensor], list[Tensor]]:
    """Parameters, and those of plain DistributedDataParallel with the same clip."""
    model, optimizer = guarded(distributed.new_group([rank], use_local_synchronization=True))
    with model.join():
        train(model, optimizer, rank)
    plain = parallel(make())
    with plain.join():
        train(plain, torch.optim.SGD(plain.parameters(), lr=0.1), rank, clip_by_hand)
    return [p.detach() for p in model.parameters()], [p.detach() for p in plain.parameters()]


def switched_off(rank: int) -> list[Tensor]:
    model, optimizer = guarded()
    with model.join(enable=False):
        train(model, optimizer, 0)
    return [p.detach() for p in model.parameters()]


@pytest.fixture(scope="module")
def of_two(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    return outcomes_of(__file__, tmp_path_factory.mktemp("two"), 2)


def test_a_guard_in_a_join_context_is_refused_at_once(of_two: list[dict[str, Any]]) -> None:
    for outcomes in of_two:
        assert outcomes["joined"].startswith("PolicyError: gr.guard: the DistributedDataParallel around the model has")
        for way in ("throw_on_early_termination=True", "process_group=", "join(enable=False)"):
            assert way in outcomes["joined"]


def test_all_ranks_may_end_with_the_first(of_two: list[dict[str, Any]]) -> None:
    for outcomes in of_two:
        assert outcomes["ended_early"].startswith("RuntimeError: ")
        assert "exhausted" in outcomes["ended_early"]


def test_each_rank_may_decide_alone(of_two: list[dict[str, Any]]) -> None:
    for outcomes in of_two:
        for got, wanted, other in zip(*outcomes["alone"], of_two[0]["alone"][0], strict=True):
            torch.testing.assert_close(got, wanted)
            assert torch.equal(got, other)


def test_without_the_context_the_guards_agree(of_two: list[dict[str, Any]]) -> None:
    for got, other in zip(of_two[0]["switched_off"], of_two[1]["switched_off"], strict=True):
        assert torch.equal(got, other)


if __name__ == "__main__":
    run_parts([joined, ended_early, alone, switched_off])
