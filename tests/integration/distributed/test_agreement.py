"""A step that one rank skips is skipped by all ranks."""

from __future__ import annotations

import math
import os
import tempfile
from typing import Any

import pytest
import torch
from torch import Tensor, distributed, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

import gradrewrite as gr
from gradrewrite.passes import CheckFinite, ClipByGlobalNorm, Observe

from helpers import gradients_of
from ranks import outcomes_of, run_parts

SKIP = gr.on("error:0", CheckFinite("skip"))
STEPS = 4
BAD = (1, 2)  # rank and step of the batch that is not finite


def make() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 4)).double()


def batch(rank: int, step: int) -> Tensor:
    return torch.randn(3, 4, generator=torch.Generator().manual_seed(10 * step + rank), dtype=torch.float64)


def loss_of(out: Tensor, rank: int, step: int) -> Tensor:
    return (out * (float("inf") if (rank, step) == BAD else 1.0)).square().mean()


class Count:
    """Counts all-reduces of the block, and their bytes."""

    def __enter__(self) -> Count:
        self.sizes: list[int] = []
        self.inner = distributed.all_reduce

        def counting(tensor: Tensor, *args: Any, **kwargs: Any) -> Any:
            self.sizes.append(tensor.nbytes)
            return self.inner(tensor, *args, **kwargs)

        distributed.all_reduce = counting
        return self

    def __exit__(self, *_: object) -> None:
        distributed.all_reduce = self.inner


def train(rank: int, policy: Any, *, ddp: bool, fused: bool, group: Any = None, own: Any = None) -> dict[str, Any]:
    """Four steps of the same parameters: plain ranks take the mean of all gradients by hand."""
    model = gr.transform(make(), policy)
    called = DistributedDataParallel(model) if ddp else model
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1, fused=fused)
    gr.guard(optimizer, model, process_group=group)
    counts = []
    for step in range(STEPS):
        optimizer.zero_grad()
        loss_of(called(batch(rank, step)), rank, step).backward()
        with Count() as count:
            optimizer.step()
        counts.append(count.sizes)
    state = [float(s["step"]) for s in optimizer.state.values()]
    skipped = model.monitor.history("skipped@optimizer:0")
    return {
        "parameters": {n: p.detach().clone() for n, p in model.named_parameters()},
        "skipped": (model.monitor.skipped, skipped),
        "counts": counts,
        "steps": state,
    }


def in_ddp(rank: int) -> Any:
    return train(rank, SKIP, ddp=True, fused=False)


def in_ddp_fused(rank: int) -> Any:
    return train(rank, [SKIP, gr.on("step:*", ClipByGlobalNorm(0.01))], ddp=True, fused=True)


def in_a_group(rank: int) -> Any:
    return train(rank, SKIP, ddp=False, fused=True, group=distributed.group.WORLD)


def alone(rank: int) -> Any:
    return train(rank, SKIP, ddp=False, fused=True)


def nothing_checked(rank: int) -> Any:
    """Rank 0 alone has a check."""
    return train(rank, SKIP if rank == BAD[0] else gr.on("error:0", Observe("norm")), ddp=True, fused=False)


def raising(rank: int) -> Any:
    model = gr.transform(make(), gr.on("error:0", CheckFinite("raise")))
    out = model(batch(rank, BAD[1]))
    loss_of(out, rank, BAD[1]).backward()


def too_many(rank: int) -> Any:
    model = gr.transform(make(), SKIP)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    gr.guard(optimizer, model, max_consecutive_skips=2, process_group=distributed.group.WORLD)
    for _ in range(2):
        optimizer.zero_grad()
        loss_of(model(batch(rank, BAD[1])), rank, BAD[1]).backward()
        optimizer.step()


def scaled(rank: int) -> Any:
    """A GradScaler finds an infinity on rank 1 alone, for gradients that are not averaged."""
    model = gr.transform(make().float(), gr.on("error:0", Observe("norm")))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, fused=True)
    gr.guard(optimizer, model, process_group=distributed.group.WORLD)
    scaler = torch.amp.GradScaler("cpu", init_scale=8.0)
    moved = []
    for step in range(STEPS):
        optimizer.zero_grad()
        before = gradients_of(model), [p.detach().clone() for p in model.parameters()]
        scaler.scale(loss_of(model(batch(rank, step).float()), rank, step)).backward()
        scaler.step(optimizer)
        scaler.update()
        moved.append(any(not torch.equal(a, b) for a, b in zip(model.parameters(), before[1], strict=True)))
    return moved, scaler.get_scale()


def whole(parameter: Any) -> Tensor:
    return parameter.detach().full_tensor()


class Ops(torch.utils._python_dispatch.TorchDispatchMode):
    """Names of the operations of the block, in order."""

    def __init__(self) -> None:
        super().__init__()
        self.found: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.found.append(str(func))
        return func(*args, **(kwargs or {}))


def operations(rank: int) -> Any:
    """The operations of a step with a clip, whose figures are not exchanged."""
    model = gr.transform(make(), [SKIP, gr.on("step:*", ClipByGlobalNorm(0.01))])
    optimizer = gr.guard(
        torch.optim.AdamW(model.parameters(), fused=True), model, process_group=distributed.group.WORLD
    )
    for step in range(2):
        optimizer.zero_grad()
        model(batch(rank, step)).square().mean().backward()
        with Ops() as ops:
            optimizer.step()
    return ops.found


def micro_batches_of_shards(rank: int) -> Any:
    """Two backwards of one step, the first of which is bad on rank 1 and leaves no gradient at the shards."""
    model = gr.transform(make(), SKIP)
    fully_shard(model, mesh=init_device_mesh("cpu", (2,)))
    optimizer = gr.guard(torch.optim.SGD(model.parameters(), lr=0.1), model)
    before = [whole(p).clone() for p in model.parameters()]
    for is_last, step in ((False, BAD[1]), (True, 0)):
        model.set_requires_gradient_sync(is_last)
        loss_of(model(batch(rank, step)), rank, step).backward()
    optimizer.step()
    after = [whole(p) for p in model.parameters()]
    return model.monitor.skipped, all(torch.equal(a, b) for a, b in zip(after, before, strict=True))


def skipped_by_a_scaler(rank: int) -> Any:
    """A GradScaler does not call an optimizer that is not fused: ranks count nothing by themselves."""
    model = gr.transform(make().float(), SKIP)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    gr.guard(optimizer, model, process_group=distributed.group.WORLD, max_consecutive_skips=2)
    scaler = torch.amp.GradScaler("cpu", init_scale=8.0)
    for step in (0, BAD[1], BAD[1], 0):
        optimizer.zero_grad()
        scaler.scale(loss_of(model(batch(rank, step).float()), rank, step)).backward()
        scaler.unscale_(optimizer)
        if step != BAD[1]:  # as where all ranks have found an infinity
            scaler.step(optimizer)
        scaler.update()
    return model.monitor.skipped


def records(rank: int) -> Any:
    """Records of ranks, of which rank 1 alone has the errors."""
    policy = [gr.on("gradient:*", Observe("norm")), *([gr.on("error:0", Observe("max_abs"))] if rank else [])]
    model = gr.transform(make(), policy)
    called = DistributedDataParallel(model)
    with tempfile.TemporaryDirectory() as folder:
        model.monitor.to_jsonl(f"{folder}/run.jsonl")
        model.monitor.to_jsonl(f"{folder}/of_{{rank}}.jsonl")
        for step in range(2):
            called(batch(rank, step)).square().mean().backward()
        model.monitor.flush()
        names = sorted(os.listdir(folder))
    return names, model.monitor.latest(), {how: model.monitor.reduce(how) for how in ("mean", "max", "sum")}


def nan_in_records(rank: int) -> Any:
    model = gr.transform(make(), gr.on("error:0", Observe("norm")))
    loss_of(model(batch(rank, BAD[1])), rank, BAD[1]).backward()
    return model.monitor.reduce("max", distributed.group.WORLD), model.monitor.latest()


def outside_of_the_group(rank: int) -> Any:
    group = distributed.new_group([0])
    model = gr.transform(make(), SKIP)
    gr.guard(torch.optim.SGD(model.parameters(), lr=0.1), model, process_group=group)


def no_group(rank: int) -> Any:
    model = gr.transform(make(), SKIP)
    gr.guard(torch.optim.SGD(model.parameters(), lr=0.1), model, process_group="world")


@pytest.fixture(scope="module")
def of_two(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    return outcomes_of(__file__, tmp_path_factory.mktemp("two"), 2)


def by_hand(max_norm: float | None, *, averaged: bool, rank: int = 0) -> dict[str, Tensor]:
    """Parameters after the steps that are not skipped, by eager autograd in one process."""
    model = make()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    for step in range(STEPS):
        if step == BAD[1]:
            continue
        optimizer.zero_grad()
        for r in range(2) if averaged else [rank]:
            (model(batch(r, step)).square().mean() / (2 if averaged else 1)).backward()
        if max_norm is not None:
            norm = torch.cat([p.grad.flatten() for p in model.parameters()]).norm()
            for p in model.parameters():
                assert p.grad is not None
                p.grad.mul_(torch.where(norm > max_norm, max_norm / norm, 1.0))
        optimizer.step()
    return {n: p.detach() for n, p in model.named_parameters()}


@pytest.mark.parametrize(
    ("part", "max_norm", "averaged"),
    [
        ("in_ddp", None, True),
        ("in_ddp_fused", 0.01, True),
        ("in_a_group", None, False),
        ("nothing_checked", None, True),
    ],
)
def test_one_rank_skips_for_all(
    of_two: list[dict[str, Any]], part: str, max_norm: float | None, averaged: bool
) -> None:
    for rank, outcomes in enumerate(of_two):
        found = outcomes[part]
        assert found["skipped"] == (1, [0.0, 0.0, 1.0, 0.0])
        assert set(found["steps"]) == {STEPS - 1.0}
        wanted = by_hand(max_norm, averaged=averaged, rank=rank)
        for name, value in found["parameters"].items():
            torch.testing.assert_close(value, wanted[name], rtol=1e-10, atol=1e-10)
        # One collective of two numbers in every step, whatever was checked on this rank.
        assert found["counts"] == [[16]] * STEPS


def test_without_a_group_nothing_is_sent(of_two: list[dict[str, Any]]) -> None:
    assert [outcomes["alone"]["counts"] for outcomes in of_two] == [[[]] * STEPS] * 2
    assert [outcomes["alone"]["skipped"][0] for outcomes in of_two] == [0, 1]


def test_an_error_is_raised_where_it_is_and_names_its_rank(of_two: list[dict[str, Any]]) -> None:
    assert of_two[0]["raising"] is None
    assert of_two[1]["raising"].startswith("NonFiniteError: step 0 on rank 1: first non-finite: error:")


def test_too_many_skips_end_the_training_of_all(of_two: list[dict[str, Any]]) -> None:
    assert "2 updates in a row were skipped" in of_two[0]["too_many"]
    assert "another rank" in of_two[0]["too_many"]
    assert "2 updates in a row were skipped" in of_two[1]["too_many"]
    assert "on rank 1" in of_two[1]["too_many"]


def test_what_a_scaler_finds_on_one_rank_skips_on_all_and_scales_stay_equal(of_two: list[dict[str, Any]]) -> None:
    for outcomes in of_two:
        assert outcomes["scaled"] == ([True, True, False, True], 4.0)


def test_a_bad_micro_batch_of_shards_skips_the_step(of_two: list[dict[str, Any]]) -> None:
    assert [outcomes["micro_batches_of_shards"] for outcomes in of_two] == [(1, True)] * 2


def test_verdicts_are_exchanged_while_the_actions_run(of_two: list[dict[str, Any]]) -> None:
    for outcomes in of_two:
        found = outcomes["operations"]
        (exchange,) = (n for n, name in enumerate(found) if "allreduce" in name)
        measured = next(n for n, name in enumerate(found) if "measure" in name or "norm" in name)
        assert exchange < measured, found


def test_ranks_count_skips_together(of_two: list[dict[str, Any]]) -> None:
    assert [outcomes["skipped_by_a_scaler"] for outcomes in of_two] == [0, 0]


def test_records_are_combined_over_the_ranks_that_have_them(of_two: list[dict[str, Any]]) -> None:
    own = [outcomes["records"][1] for outcomes in of_two]
    for outcomes in of_two:
        found = outcomes["records"][2]
        for name in own[0]:
            a, b = own[0][name], own[1][name]
            assert found["mean"][name] == pytest.approx((a + b) / 2, abs=1e-15)
            assert found["sum"][name] == pytest.approx(a + b, abs=1e-15)
            assert found["max"][name] == max(a, b)
        assert {found[how]["max_abs@error:0"] for how in found} == {own[1]["max_abs@error:0"]}
        values, _ = outcomes["nan_in_records"]
        assert math.isnan(values["norm@error:0"])
    assert not math.isnan(of_two[0]["nan_in_records"][1]["norm@error:0"])


def test_each_rank_has_files_of_its_own(of_two: list[dict[str, Any]]) -> None:
    for rank, outcomes in enumerate(of_two):
        assert outcomes["records"][0] == [f"of_{rank}.jsonl", f"run.rank{rank}.jsonl"]


def test_groups_are_checked(of_two: list[dict[str, Any]]) -> None:
    assert "TypeError: process_group is a torch.distributed.ProcessGroup, got str" in of_two[0]["no_group"]
    assert of_two[0]["outside_of_the_group"] is None
    assert "ValueError" in of_two[1]["outside_of_the_group"]
    assert "rank 1 is not in it" in of_two[1]["outside_of_the_group"]


if __name__ == "__main__":
    run_parts([
        in_ddp, in_ddp_fused, in_a_group, alone, nothing_checked, raising, too_many, scaled, records,
        nan_in_records, no_group, outside_of_the_group, micro_batches_of_shards, skipped_by_a_scaler,
        operations,
    ])  # fmt: skip
