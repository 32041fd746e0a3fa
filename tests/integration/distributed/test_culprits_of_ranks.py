"""Culprits on two ranks: the rank, the micro-batch and the row, the same answer on both."""

from __future__ import annotations

import contextlib
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

import gradrewrite as gr
from gradrewrite.passes import AllReduce, CheckFinite, Observe, SkipSpikes

from models.coupled import Policy, policy_batch
from models.culprits import ROWS, Poison, task_of
from ranks import outcomes_of, run_parts

pytestmark = pytest.mark.sample(6)  # ranks that start and train take a minute

POISONS: tuple[Poison, ...] = ("scaled label", "repeated token", "finite outlier")
SPIKES = gr.on("step:*", SkipSpikes(6.0, window=8))
STEPS, MICRO = 7, 2


def train(poison: Poison, rank: int, wanted: tuple[int, int, int], way: str = "ddp", policy: Any = SPIKES) -> Any:
    """Train until one row of one micro-batch of one rank is poisoned; return what both ranks say, and the model."""
    torch.manual_seed(0)
    task = task_of(poison)
    model = gr.transform(task.make(), policy)
    called: Any = DistributedDataParallel(model) if way == "ddp" else model
    if way.startswith("fsdp"):
        fully_shard(model, mesh=init_device_mesh("cpu", (2,)), reshard_after_forward=way == "fsdp")
    optimizer = gr.guard(torch.optim.AdamW(model.parameters(), lr=1e-3), model)
    for step in range(STEPS):
        optimizer.zero_grad()
        for micro in range(MICRO):
            is_poisoned = step == STEPS - 1 and (rank, micro) == wanted[:2]
            seed = 100 * step + 10 * micro + rank
            batch = task.batch(seed, wanted[2] if is_poisoned else None)
            model.monitor.log_ids(torch.arange(ROWS) + 100 * seed)
            with called.no_sync() if way == "ddp" and micro < MICRO - 1 else contextlib.nullcontext():
                task.loss(called(*batch[: task.num_inputs]), batch).backward()
        optimizer.step()
    assert model.monitor.skipped == 1
    return model


def named(rank: int) -> Any:
    """8 runs: is the answer the right one?"""
    answers = []
    for number in range(8):
        wanted = number % 2, number // 2 % 2, (3 * number + 1) % ROWS
        model = train(POISONS[number % 3], rank, wanted)
        found = model.monitor.culprits()
        row = found.rows[0]
        seed = 100 * (STEPS - 1) + 10 * wanted[1] + wanted[0]
        answers.append((found.rank, found.micro_batch, row.index, row.id) == (*wanted, 100 * seed + wanted[2]))
    return answers


def equal(rank: int) -> Any:
    model = train("scaled label", rank, (1, 1, 5))
    return str(model.monitor.culprits())


def reduced(rank: int) -> Any:
    """Averages in the graph; a failed check on one rank."""
    policy = [SPIKES, gr.on("gradient:*", [Observe("norm"), AllReduce()])]
    model = train("scaled label", rank, (1, 0, 5), "plain", policy)
    found = model.monitor.culprits()
    return (found.rank, found.micro_batch, found.rows[0].index)


def later(rank: int) -> Any:
    policy = [SPIKES, gr.on("gradient:*", Observe("norm"))]
    model = train("scaled label", rank, (1, 0, 5), "ddp", policy)
    model(torch.ones(2, 5))
    found = model.monitor.culprits()
    return found.rank, found.micro_batch, found.rows, found.note


def unrecorded(rank: int) -> Any:
    model = train("scaled label", rank, (1, 0, 5))
    model(torch.ones(2, 5))
    found = model.monitor.culprits()
    return found.rank, found.micro_batch, found.rows, found.note


def sharded(rank: int) -> Any:
    policy = [SPIKES, gr.on("gradient:*", Observe("norm"))]
    model = train("scaled label", rank, (1, 0, 5), "fsdp", policy)
    before = [p.to_local().clone() for p in model.parameters()]
    found = model.monitor.culprits()
    is_same = all(torch.equal(p.to_local(), b) for p, b in zip(model.parameters(), before, strict=True))
    return found.rank, found.micro_batch, found.rows[0].index if found.rows else -1, is_same, found.note


def failed(rank: int) -> Any:
    torch.manual_seed(0)
    task = task_of("scaled label")
    model = gr.transform(task.make(), gr.on("gradient:*", CheckFinite("skip")))
    called = DistributedDataParallel(model)
    optimizer = gr.guard(torch.optim.SGD(model.parameters(), lr=0.1), model)
    for micro in range(2):
        x, y = task.batch(micro, None)
        if (rank, micro) == (1, 1):
            x[2, 1] = torch.nan
        with called.no_sync() if micro == 0 else contextlib.nullcontext():
            task.loss(called(x), (x, y)).backward()
    optimizer.step()
    found = model.monitor.culprits(1)
    return found.rank, found.micro_batch, found.rows[0].index, found.rows[0].share


def tokens(rank: int) -> Any:
    """An infinite ratio of one token of one rank."""
    torch.manual_seed(0)
    model = gr.transform(Policy(), gr.on("gradient:*", CheckFinite("skip")))
    called = DistributedDataParallel(model)
    optimizer = gr.guard(torch.optim.SGD(model.parameters(), lr=0.1), model)
    for micro in range(2):
        batch = policy_batch(10 * micro + rank)
        if (rank, micro) == (1, 0):
            batch["before"][2, 5], batch["mask"][2, 5] = -200.0, 1.0
        model.monitor.log_tokens(before=batch["before"])
        with called.no_sync() if micro == 0 else contextlib.nullcontext():
            called(**batch).backward()
    optimizer.step()
    found = model.monitor.culprits()
    return found.rank, found.micro_batch, [(t.row, t.position, dict(t.values)) for t in found.tokens]


PARTS = (named, equal, reduced, later, unrecorded, sharded, failed, tokens)


@pytest.fixture(scope="module")
def outcomes(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    return outcomes_of(__file__, Path(tmp_path_factory.mktemp("ranks")), 2)


def test_rank_micro_batch_and_row_are_named_in_eight_runs(outcomes: list[dict[str, Any]]) -> None:
    assert [one["named"] for one in outcomes] == [[True] * 8] * 2


def test_all_ranks_have_the_same_answer(outcomes: list[dict[str, Any]]) -> None:
    first, second = (one["equal"] for one in outcomes)
    assert first == second
    assert "rank 1, micro-batch 2" in first
    assert "row 5" in first


def test_averages_in_the_graph(outcomes: list[dict[str, Any]]) -> None:
    assert [one["reduced"] for one in outcomes] == [(1, 0, 5)] * 2


def test_failed_check_of_one_rank(outcomes: list[dict[str, Any]]) -> None:
    assert [one["failed"] for one in outcomes] == [(1, 1, 2, 1.0)] * 2


def test_token_of_one_rank(outcomes: list[dict[str, Any]]) -> None:
    assert [one["tokens"] for one in outcomes] == [(1, 0, [(2, 5, {"before": -200.0})])] * 2


def test_records_name_the_rank_later(outcomes: list[dict[str, Any]]) -> None:
    for one in outcomes:
        rank, micro_batch, rows, note = one["later"]
        assert (rank, micro_batch, rows) == (1, 0, ())
        assert "the step can be replayed until" in note


def test_without_records_the_rank_is_not_known(outcomes: list[dict[str, Any]]) -> None:
    for one in outcomes:
        rank, micro_batch, rows, note = one["unrecorded"]
        assert (rank, micro_batch, rows) == (None, None, ())
        assert "which rank it was is not known" in note


def test_resharded_parameters_are_gathered_again(outcomes: list[dict[str, Any]]) -> None:
    assert [one["sharded"] for one in outcomes] == [(1, 0, 5, True, "")] * 2


if __name__ == "__main__":
    run_parts(PARTS)
