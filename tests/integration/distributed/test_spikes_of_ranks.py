"""Spikes on several ranks: one verdict and one window, without a collective of their own."""

from __future__ import annotations

import contextlib
import math
from typing import Any

import pytest
import torch
from torch import Tensor, distributed, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Shard, distribute_tensor
from torch.nn.parallel import DistributedDataParallel

import gradrewrite as gr
from gradrewrite.passes import AllReduce, CheckFinite, ClipByGlobalNorm, SkipSpikes

from models.spikes import Reference
from ranks import outcomes_of, run_parts

pytestmark = pytest.mark.sample(6)  # ranks that start and train take a minute

SIGMA, WINDOW, STEPS, MICRO = 2.0, 6, 16, 2
SPIKES = (7, 8, 12)  # steps with a large loss, on rank 1 alone
NORM, LOSS = (SkipSpikes(SIGMA, window=WINDOW, of=of) for of in ("total_norm", "loss"))
CHECK = CheckFinite("skip")


def make() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 4)).double()


def batch(rank: int, step: int, micro: int) -> Tensor:
    generator = torch.Generator().manual_seed(1000 * step + 10 * micro + rank)
    return 1 + 0.1 * torch.randn(3, 4, generator=generator, dtype=torch.float64)


def loss_of(model: Any, rank: int, step: int, micro: int) -> Tensor:
    return model(batch(rank, step, micro)).square().mean() * (1e3 if rank == 1 and step in SPIKES else 1 + step / 50)


class Count:
    """Counts all-reduces of the block, functional ones too."""

    def __enter__(self) -> Count:
        self.number = 0
        self.inner = distributed.all_reduce
        self.functional = torch.ops._c10d_functional.all_reduce

        def counting(tensor: Tensor, *args: Any, **kwargs: Any) -> Any:
            self.number += 1
            return self.inner(tensor, *args, **kwargs)

        distributed.all_reduce = counting
        self.profile = torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU])
        self.profile.__enter__()
        return self

    def __exit__(self, *_: object) -> None:
        self.profile.__exit__(None, None, None)
        distributed.all_reduce = self.inner
        names = [event.name for event in self.profile.events()]
        self.number += sum(name == "_c10d_functional::all_reduce" for name in names)


def train(rank: int, policy: Any, way: str, *, fused: bool = False, scaled: bool = False) -> dict[str, Any]:
    """Steps of two micro-batches; gradients are averaged over ranks in one of three ways."""
    model = gr.transform(make(), policy, **({"regions": ["0", "2"]} if way == "fsdp" else {}))
    called: Any = DistributedDataParallel(model) if way == "ddp" else model
    if way == "fsdp":
        for layer in (model[0], model[2], model):
            fully_shard(layer, mesh=init_device_mesh("cpu", (2,)))
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.02, fused=fused)
    gr.guard(optimizer, model)
    scaler = torch.amp.GradScaler("cpu", init_scale=64.0, growth_interval=10_000, enabled=scaled)
    counts, moved = [], []
    for step in range(STEPS):
        optimizer.zero_grad()
        for micro in range(MICRO):
            is_last = micro == MICRO - 1
            if way == "fsdp":
                called.set_requires_gradient_sync(is_last)
            with called.no_sync() if way == "ddp" and not is_last else contextlib.nullcontext():
                loss = loss_of(called, rank, step, micro)
                scaler.scale(loss / MICRO).backward()
            model.monitor.log("loss", loss)
        before = full(model)
        with Count() as count:
            scaler.step(optimizer)
        scaler.update()
        counts.append(count.number)
        after = full(model)
        moved.append(any(not torch.equal(a, b) for a, b in zip(before, after, strict=True)))
    state = gr.state_dict(model)["states"]
    names = [name for name in model.monitor.latest() if name.startswith(("loss@step", "total_norm", "spike"))]
    return {
        "parameters": full(model),
        "moved": moved,
        "counts": counts[1:],  # the first step compiles
        "skipped": model.monitor.skipped,
        "steps": {float(s["step"]) for s in optimizer.state.values()},
        "records": {name: model.monitor.history(name) for name in names},
        "state": state,
    }


def full(model: nn.Module) -> list[Tensor]:
    tensors = [p.detach() for p in model.parameters()]
    return [(t.full_tensor() if isinstance(t, DTensor) else t).clone() for t in tensors]


def ddp_checked(rank: int) -> Any:
    return train(rank, gr.on("step:*", CHECK), "ddp")


def ddp_norm(rank: int) -> Any:
    return train(rank, gr.on("step:*", [CHECK, ClipByGlobalNorm(0.5), NORM]), "ddp")


def ddp_norm_alone(rank: int) -> Any:
    return train(rank, gr.on("step:*", NORM), "ddp", fused=True)


def ddp_norm_scaled(rank: int) -> Any:
    return train(rank, gr.on("step:*", NORM), "ddp", fused=True, scaled=True)


def ddp_loss(rank: int) -> Any:
    return train(rank, gr.on("step:*", [CHECK, LOSS]), "ddp", fused=True)


def ddp_loss_alone(rank: int) -> Any:
    return train(rank, gr.on("step:*", LOSS), "ddp")


def fsdp_checked(rank: int) -> Any:
    return train(rank, gr.on("step:*", CHECK), "fsdp")


def fsdp_norm(rank: int) -> Any:
    return train(rank, gr.on("step:*", [CHECK, NORM]), "fsdp")


def fsdp_norm_clipped(rank: int) -> Any:
    return train(rank, gr.on("step:*", [ClipByGlobalNorm(0.5), NORM]), "fsdp", fused=True)


def fsdp_loss(rank: int) -> Any:
    return train(rank, gr.on("step:*", [CHECK, LOSS]), "fsdp", fused=True)


def reduced_norm(rank: int) -> Any:
    return train(rank, [gr.on("gradient:*", AllReduce()), gr.on("step:*", NORM)], "plain")


def reduced_loss(rank: int) -> Any:
    return train(rank, [gr.on("gradient:*", AllReduce()), gr.on("step:*", [CHECK, LOSS])], "plain")


def one_rank_logs(rank: int) -> Any:
    """The loss of the last stage of a pipeline is the loss of all; without any, all ranks raise."""
    model = gr.transform(make(), gr.on("step:*", LOSS))
    optimizer = gr.guard(torch.optim.SGD(model.parameters(), lr=0.1), model, process_group=distributed.group.WORLD)
    for p in model.parameters():
        p.grad = torch.ones_like(p)
    if rank == 1:
        model.monitor.log("loss", 3.0)
    optimizer.step()
    found, before = model.monitor.latest()["loss@step:group:default"], full(model)
    try:
        optimizer.step()
    except gr.PolicyError as err:
        return found, str(err), all(torch.equal(a, b) for a, b in zip(before, full(model), strict=True))
    return found, "", False


def sets_of_ranks(rank: int) -> Any:
    """A gradient that each rank has by itself is a spike on one of them, and all skip."""
    model = gr.transform(make(), gr.on("step:*", NORM))
    mesh = init_device_mesh("cpu", (2,))
    model[0].weight = nn.Parameter(distribute_tensor(torch.ones(4, 4, dtype=torch.float64), mesh, [Shard(0)]))
    optimizer = gr.guard(torch.optim.SGD(model.parameters(), lr=0.1), model)
    moved = []
    for step in range(6):
        for name, p in model.named_parameters():
            size = 1e3 if (step, rank, name) == (4, 1, "2.bias") else 1 + step % 2 / 10
            p.grad = torch.full_like(p, size)
        before = full(model)
        optimizer.step()
        moved.append(not torch.equal(before[1], full(model)[1]))
    return moved


def lacking(rank: int) -> Any:
    """Rank 0 has no gradients in some steps, and knows the norm of all: its window is that of the other rank."""
    model = gr.transform(make(), gr.on("step:*", NORM))
    for layer in (model[0], model[2], model):
        fully_shard(layer, mesh=init_device_mesh("cpu", (2,)))
    model[2].requires_grad_(False)
    optimizer = gr.guard(torch.optim.SGD(model.parameters(), lr=0.1), model)
    for step in range(8):
        for p in model[0].parameters():
            p.grad = None if rank == 0 and step % 2 else torch.full_like(p, 100.0 if step == 5 else 1 + step % 3 / 10)
        optimizer.step()
    return gr.state_dict(model)["states"], model.monitor.history("spike@step:group:default")


@pytest.fixture(scope="module")
def of_two(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    return outcomes_of(__file__, tmp_path_factory.mktemp("two"), 2)


def by_hand(of: str, max_norm: float = math.inf) -> tuple[list[Tensor], list[bool], list[float]]:
    """Parameters after the steps, which of them moved them, and the figures: by eager autograd in one process."""
    model = make()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.02)
    reference, moved, figures = Reference(SIGMA, WINDOW), [], []
    for step in range(STEPS):
        optimizer.zero_grad()
        losses = [loss_of(model, rank, step, micro) for rank in range(2) for micro in range(MICRO)]
        torch.stack(losses).mean().backward()
        norm = torch.cat([p.grad.flatten() for p in model.parameters() if p.grad is not None]).norm()
        figure = norm.item() if of == "total_norm" else torch.stack(losses).mean().item()
        spike = reference.is_spike(figure)
        figures.append(figure)
        moved.append(not spike)
        for p in model.parameters():
            assert p.grad is not None
            p.grad.mul_(min(1.0, max_norm / float(norm)))
        if not spike:
            optimizer.step()
    return [p.detach() for p in model.parameters()], moved, figures


@pytest.mark.parametrize(
    ("part", "of", "max_norm"),
    [
        ("ddp_norm", "total_norm", 0.5),
        ("ddp_norm_alone", "total_norm", math.inf),
        ("ddp_norm_scaled", "total_norm", math.inf),
        ("ddp_loss", "loss", math.inf),
        ("ddp_loss_alone", "loss", math.inf),
        ("fsdp_norm", "total_norm", math.inf),
        ("fsdp_norm_clipped", "total_norm", 0.5),
        ("fsdp_loss", "loss", math.inf),
        ("reduced_norm", "total_norm", math.inf),
        ("reduced_loss", "loss", math.inf),
    ],
)
def test_ranks_skip_as_one_process_does(of_two: list[dict[str, Any]], part: str, of: str, max_norm: float) -> None:
    wanted, moved, figures = by_hand(of, max_norm)
    assert all(not moved[step] for step in SPIKES)
    assert sum(moved) > STEPS // 2
    for outcomes in of_two:
        found = outcomes[part]
        assert not isinstance(found, str), found
        assert found["moved"] == moved
        assert found["skipped"] == moved.count(False)
        assert found["steps"] == {float(sum(moved))}
        assert found["records"][f"{of}@step:group:default"] == pytest.approx(figures, rel=1e-9)
        assert found["records"]["spike@step:group:default"] == [float(not made) for made in moved]
        for value, other in zip(found["parameters"], wanted, strict=True):
            torch.testing.assert_close(value, other, rtol=1e-9, atol=1e-9)
    first, second = (outcomes[part]["state"] for outcomes in of_two)
    assert all(torch.equal(first[key], second[key]) for key in first)


@pytest.mark.parametrize(
    ("part", "checked"),
    [
        ("ddp_norm", "ddp_checked"),
        ("ddp_norm_alone", "ddp_checked"),
        ("ddp_loss", "ddp_checked"),
        ("fsdp_norm", "fsdp_checked"),
        ("fsdp_norm_clipped", "fsdp_checked"),
        ("fsdp_loss", "fsdp_checked"),
        ("reduced_loss", "ddp_checked"),
    ],
)
def test_no_collective_is_added(of_two: list[dict[str, Any]], part: str, checked: str) -> None:
    for outcomes in of_two:
        assert outcomes[checked]["counts"] == [1] * (STEPS - 1)
        assert outcomes[part]["counts"] == outcomes[checked]["counts"]


def test_one_rank_may_have_the_loss_of_all(of_two: list[dict[str, Any]]) -> None:
    for outcomes in of_two:
        loss, text, is_same = outcomes["one_rank_logs"]
        assert (loss, is_same) == (3.0, True)
        assert "none was logged since the last step" in text


def test_norms_of_different_ranks_are_voted_on(of_two: list[dict[str, Any]]) -> None:
    assert [outcomes["sets_of_ranks"] for outcomes in of_two] == [[True] * 4 + [False, True]] * 2


def test_a_rank_without_gradients_remembers_the_norm_of_all(of_two: list[dict[str, Any]]) -> None:
    (first, spikes), (second, others) = (outcomes["lacking"] for outcomes in of_two)
    assert spikes == others == [0.0] * 5 + [1.0, 0.0, 0.0]
    assert all(torch.equal(first[key], second[key]) for key in first)
    assert int(first["step:group:default/SkipSpikes.count"]) == 7


if __name__ == "__main__":
    run_parts([
        ddp_checked, ddp_norm, ddp_norm_alone, ddp_norm_scaled, ddp_loss, ddp_loss_alone, fsdp_checked, fsdp_norm,
        fsdp_norm_clipped, fsdp_loss, reduced_norm, reduced_loss, one_rank_logs, sets_of_ranks, lacking,
    ])  # fmt: skip
