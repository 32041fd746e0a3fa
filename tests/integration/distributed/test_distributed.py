"""DistributedDataParallel and FSDP2: graphs stay whole; what would go wrong is refused."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, distributed, nn
from torch._dynamo.utils import counters
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

import gradrewrite as gr
from gradrewrite.passes import CheckFinite, ClipByGlobalNorm, ClipByNorm, ClipByValue

from helpers import gradient, gradients_of
from models.small import Layers
from ranks import join, outcomes_of, run_parts

MAX_NORM, BOUND = 0.05, 0.01
SINGLE = [
    gr.on("error:layers.2", ClipByValue(BOUND)),
    gr.on("gradient:*", [ClipByNorm(MAX_NORM), CheckFinite("raise")]),
]
GLOBAL = gr.on("gradient:*", ClipByGlobalNorm(0.1))
SKIP = gr.on("gradient:*", CheckFinite("skip"))
BUCKET = 0.0001  # megabytes: less than one layer, so that DDPOptimizer would split between all of them

Outcome = Any


def make() -> Layers:
    torch.manual_seed(0)
    return Layers(4, 8)


def batch(rank: int) -> Tensor:
    return torch.randn(6, 8, generator=torch.Generator().manual_seed(rank + 1)) * (rank + 1)


def wrapped(model: nn.Module) -> DistributedDataParallel:
    distributed._DEFAULT_FIRST_BUCKET_BYTES = 64  # type: ignore[attr-defined]
    return DistributedDataParallel(model, bucket_cap_mb=BUCKET)


def clip(g: Tensor) -> Tensor:
    norm = g.norm()
    return torch.where(norm > MAX_NORM, g * (MAX_NORM / norm), g)


def by_hooks(x: Tensor) -> dict[str, Tensor]:
    """The gradients of one process: eager autograd with hooks."""
    model = make()
    model.layers[2].register_forward_hook(
        lambda _, __, out: out.register_hook(lambda g: g.clamp(-BOUND, BOUND)) and None
    )
    for p in model.parameters():
        p.register_hook(clip)
    model(x).sum().backward()
    return gradients_of(model)  # type: ignore[return-value]


def single_sites(rank: int) -> Outcome:
    model = gr.transform(make(), SINGLE)
    ddp = wrapped(model)
    ddp(batch(rank)).sum().backward()
    return [g.is_whole for g in model.explain().graphs], gradients_of(model)


def failed_check(rank: int) -> Outcome:
    wrapped(gr.transform(make(), SINGLE))(batch(rank) * float("inf")).sum().backward()


def global_clip(rank: int) -> Outcome:
    wrapped(gr.transform(make(), GLOBAL))(batch(rank))


def global_clip_after_a_warm_up(rank: int) -> Outcome:
    model = gr.transform(make(), GLOBAL)
    model(batch(rank)).sum().backward()
    wrapped(model)(batch(rank))


def split_function(rank: int) -> Outcome:
    torch.compile(wrapped(make()), backend=gr.backend(SINGLE))(batch(rank))


def global_clip_in_a_function(rank: int) -> Outcome:
    with torch._dynamo.config.patch(optimize_ddp=False):
        out = torch.compile(wrapped(make()), backend=gr.backend(GLOBAL))(batch(rank))
    out.sum().backward()


def single_sites_of_shards(rank: int) -> Outcome:
    model = gr.transform(make(), SINGLE)
    fully_shard(model, mesh=distributed.device_mesh.init_device_mesh("cpu", (2,)))
    model(batch(rank)).sum().backward()
    return [g.is_whole for g in model.explain().graphs], {n: g.full_tensor() for n, g in gradients_of(model).items()}


def global_clip_of_shards(rank: int) -> Outcome:
    model = gr.transform(make(), GLOBAL)
    fully_shard(model, mesh=distributed.device_mesh.init_device_mesh("cpu", (2,)))
    model(batch(rank))


PARTS = [
    single_sites, failed_check, global_clip, global_clip_after_a_warm_up, split_function,
    global_clip_in_a_function, single_sites_of_shards, global_clip_of_shards,
]  # fmt: skip


@pytest.fixture(scope="module")
def of_two(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Outcome]]:
    return outcomes_of(__file__, tmp_path_factory.mktemp("two"), 2)


@pytest.fixture
def alone(tmp_path: Path) -> Iterator[None]:
    """A process group of one process."""
    join(tmp_path, 0, 1)
    yield
    distributed.destroy_process_group()


@pytest.mark.parametrize("part", ["single_sites", "single_sites_of_shards"])
def test_single_sites_act_in_each_process(of_two: list[dict[str, Outcome]], part: str) -> None:
    wanted = [by_hooks(batch(rank)) for rank in range(2)]
    assert not torch.allclose(wanted[0]["layers.0.weight"], wanted[1]["layers.0.weight"])

    for outcomes in of_two:
        wholes, gradients = outcomes[part]
        assert wholes == [True]
        for name, got in gradients.items():
            torch.testing.assert_close(got, (wanted[0][name] + wanted[1][name]) / 2)


@pytest.mark.parametrize(
    ("part", "texts"),
    [
        ("failed_check", ["NonFiniteError", "the input x was not finite already"]),
        (
            "global_clip",
            [
                "PolicyError",
                "DistributedDataParallel with 2 processes",
                'gr.on("step:*", ClipByGlobalNorm(0.1))',
                "gr.passes.AllReduce()",
            ],
        ),
        ("global_clip_after_a_warm_up", ["PolicyError", "DistributedDataParallel with 2 processes"]),
        ("split_function", ["GraphBreakError", "DDPOptimizer", "optimize_ddp = False"]),
        ("global_clip_in_a_function", ["PolicyError", "DistributedDataParallel with 2 processes"]),
        ("global_clip_of_shards", ["PolicyError", "FSDP2 (fully_shard) with 2 processes"]),
    ],
)
def test_what_is_refused(of_two: list[dict[str, Outcome]], part: str, texts: list[str]) -> None:
    for outcomes in of_two:
        assert all(text in outcomes[part] for text in texts), outcomes[part]


@pytest.mark.usefixtures("alone")
def test_one_process_is_as_none() -> None:
    x = batch(0)
    wanted = gradient(gr.transform(make(), [GLOBAL, SKIP]), x)
    model = gr.transform(make(), [GLOBAL, SKIP])
    optimizer = gr.guard(torch.optim.SGD(model.parameters(), lr=0.1), model)
    ddp = wrapped(model)
    ddp(x).sum().backward()

    assert torch.equal(model.layers[0].weight.grad, wanted)
    assert [g.is_whole for g in model.explain().graphs] == [True]
    optimizer.zero_grad()
    counters.clear()
    for called in (ddp, model):  # inside and outside of DDP: the same compiled code
        called(x).sum().backward()
        optimizer.zero_grad()
    assert not counters["frames"]
    assert torch._dynamo.config.optimize_ddp is True
    before = [p.detach().clone() for p in model.parameters()]
    ddp(x * float("inf")).sum().backward()
    optimizer.step()
    assert model.monitor.skipped == 1
    assert all(torch.equal(a, b) for a, b in zip(model.parameters(), before, strict=True))


@pytest.mark.usefixtures("alone")
def test_order_is_shown() -> None:
    with pytest.raises(TypeError, match=r"DistributedDataParallel\(gr\.transform\(model, policy\)\)"):
        gr.transform(wrapped(make()), [])


if __name__ == "__main__":
    run_parts(PARTS)
