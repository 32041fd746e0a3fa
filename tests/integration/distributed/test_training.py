"""Twenty optimizer steps on several ranks equal those of one process with the full batch."""

from __future__ import annotations

import contextlib
import itertools
import os
import tempfile
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, distributed, nn
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.checkpoint.state_dict_saver import save
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel
from torch.utils._python_dispatch import TorchDispatchMode

import gradrewrite as gr
from gradrewrite.passes import CheckFinite, ClipByGlobalNorm, ClipByValue, Observe

from models.small import Layers
from ranks import outcomes_of, run_parts

pytestmark = pytest.mark.sample(6)  # ranks that start and train take a minute

LARGE = 512
STEPS, BAD = 20, 7  # the last rank alone has a batch that is not finite in this step
POLICY = [
    gr.on("error:layers.1", CheckFinite("skip")),
    gr.on("step:*", [ClipByValue(0.05), ClipByGlobalNorm(0.02)]),
]


def make() -> Layers:
    torch.manual_seed(0)
    return Layers(3, 7).double()


def batch(step: int, rank: int) -> Tensor:
    return torch.randn(2, 7, generator=torch.Generator().manual_seed(100 * step + rank), dtype=torch.float64)


def loss_of(out: Tensor, step: int, rank: int) -> Tensor:
    is_bad = step == BAD and rank == distributed.get_world_size() - 1
    return (out * (float("nan") if is_bad else 1.0)).square().mean()


def full(tensor: Any) -> Tensor:
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


class Traffic(TorchDispatchMode):
    """Bytes that go into collectives."""

    size = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if "c10d" in str(func) and "wait" not in str(func):
            given = args[0] if isinstance(args[0], list | tuple) else [args[0]]
            self.size += sum(t.nbytes for t in given if isinstance(t, Tensor))
        return func(*args, **(kwargs or {}))


def train(rank: int, called: nn.Module, model: nn.Module, optimizer: Any, *, micro: int = 1) -> dict[str, Any]:
    """Train, and return all that must be equal, with the bytes of the last step."""
    traffic = Traffic()
    for step in range(STEPS):
        optimizer.zero_grad()
        for number in range(micro):
            waits = number < micro - 1
            held = called.no_sync() if waits else contextlib.nullcontext()
            part = batch(step, rank).chunk(micro)[number]
            with held:
                out = called(part)
                with traffic if step == STEPS - 1 else contextlib.nullcontext():
                    (loss_of(out, step, rank) / micro).backward()
        with traffic if step == STEPS - 1 else contextlib.nullcontext():
            optimizer.step()
    state = [{k: full(v) for k, v in optimizer.state[p].items()} for p in model.parameters()]
    found = {"parameters": {n: full(p.detach()) for n, p in model.named_parameters()}, "state": state}
    if hasattr(model, "monitor"):
        found["norms"] = model.monitor.history("total_norm@step:group:default")
        found["skipped"] = model.monitor.skipped
    return {**found, "bytes": traffic.size}


def optimizer_of(model: nn.Module, *, fused: bool) -> Any:
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01, fused=fused)
    return gr.guard(optimizer, model) if isinstance(model, gr.RewrittenModule) else optimizer


def in_ddp(rank: int) -> Any:
    model = gr.transform(make(), POLICY)
    return train(rank, DistributedDataParallel(model), model, optimizer_of(model, fused=False))


def in_ddp_without_us(rank: int) -> Any:
    model = make()
    return train(rank, DistributedDataParallel(model), model, optimizer_of(model, fused=False))["bytes"]


def accumulated(rank: int) -> Any:
    model = gr.transform(make(), POLICY)
    return train(rank, DistributedDataParallel(model), model, optimizer_of(model, fused=True), micro=2)


def in_fsdp(rank: int) -> Any:
    model = gr.transform(make(), POLICY)
    fully_shard(model, mesh=init_device_mesh("cpu", (distributed.get_world_size(),)))
    return train(rank, model, model, optimizer_of(model, fused=True))


def in_fsdp_without_us(rank: int) -> Any:
    model = make()
    fully_shard(model, mesh=init_device_mesh("cpu", (distributed.get_world_size(),)))
    return train(rank, model, model, optimizer_of(model, fused=True))["bytes"]


def mixed_meshes(rank: int) -> Any:
    """Layers that are sharded over different meshes: over all ranks, and over two of them with replicas."""
    number = distributed.get_world_size()
    model = gr.transform(make(), POLICY, regions="layers.*")
    mesh = init_device_mesh("cpu", (number,))
    fully_shard(model.layers[0], mesh=mesh)
    fully_shard(model.layers[1], mesh=init_device_mesh("cpu", (number // 2, 2), mesh_dim_names=("copy", "shard")))
    fully_shard(model.layers[2], mesh=init_device_mesh("cpu", (1, number), mesh_dim_names=("copy", "shard")))
    fully_shard(model, mesh=mesh)
    return train(rank, model, model, optimizer_of(model, fused=True))


def compiled(rank: int) -> Any:
    model = gr.transform(make(), POLICY)
    fully_shard(model, mesh=init_device_mesh("cpu", (distributed.get_world_size(),)))
    model.compile()
    return train(rank, model, model, optimizer_of(model, fused=True))


def checkpoints(rank: int) -> Any:
    """A checkpoint of the rewritten sharded model in the plain one in DDP, and the other way."""
    number = distributed.get_world_size()
    folder = [tempfile.mkdtemp() if rank == 0 else None]
    distributed.broadcast_object_list(folder)
    assert folder[0] is not None
    found = {}
    for name in ("sharded", "ddp"):
        model = gr.transform(make(), POLICY)
        plain: nn.Module = make()
        if name == "sharded":
            fully_shard(model, mesh=init_device_mesh("cpu", (number,)))
            called = model
        else:
            called = DistributedDataParallel(model)
            fully_shard(plain, mesh=init_device_mesh("cpu", (number,)))
        optimizer = optimizer_of(model, fused=True)
        trained = train(rank, called, model, optimizer)
        parameters, state = get_state_dict(model, optimizer)
        path = os.path.join(folder[0], name)
        save({"model": parameters, "optimizer": state}, checkpoint_id=path)
        other = torch.optim.AdamW(plain.parameters(), lr=0.01, fused=True)
        given, given_state = get_state_dict(plain, other)
        load(loaded := {"model": given, "optimizer": given_state}, checkpoint_id=path)
        set_state_dict(plain, other, model_state_dict=loaded["model"], optim_state_dict=loaded["optimizer"])
        equal = [
            torch.equal(full(p.detach()), trained["parameters"][n])
            and torch.equal(full(other.state[p]["exp_avg"]), trained["state"][i]["exp_avg"])
            for i, (n, p) in enumerate(plain.named_parameters())
        ]
        # And back: the plain model's into a rewritten one.
        save({"model": get_state_dict(plain, other)[0]}, checkpoint_id=f"{path}_plain")
        again = gr.transform(make(), POLICY)
        if name == "ddp":
            fully_shard(again, mesh=init_device_mesh("cpu", (number,)))
        back = {"model": again.state_dict()}
        load(back, checkpoint_id=f"{path}_plain")
        again.load_state_dict(back["model"])
        equal += [torch.equal(full(p.detach()), trained["parameters"][n]) for n, p in again.named_parameters()]
        found[name] = equal
    return found


def by_hand(number: int) -> dict[str, Any]:
    """One process with the full batch: eager autograd."""
    model = make()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    norms = []
    for step in range(STEPS):
        if step == BAD:
            norms.append(float("nan"))
            continue
        optimizer.zero_grad()
        model(torch.cat([batch(step, rank) for rank in range(number)])).square().mean().backward()
        gradients = [p.grad for p in model.parameters() if p.grad is not None]
        for g in gradients:
            g.clamp_(-0.05, 0.05)
        norm = torch.cat([g.flatten() for g in gradients]).norm()
        norms.append(norm.item())
        for g in gradients:
            g.mul_(torch.where(norm > 0.02, 0.02 / norm, 1.0))
        optimizer.step()
    state = [dict(optimizer.state[p]) for p in model.parameters()]
    assert min(n for n in norms if n == n) > 0.02
    return {"parameters": {n: p.detach() for n, p in model.named_parameters()}, "state": state, "norms": norms}


def peak_of(run: Callable[[], Any]) -> int:
    """The most bytes that are allocated at one time beyond those before."""
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU], profile_memory=True) as found:
        run()
    events = [e for e in found.profiler.kineto_results.events() if e.name() == "[memory]"]
    return max(itertools.accumulate(e.nbytes() for e in sorted(events, key=lambda e: e.start_ns())))


def memory(rank: int) -> Any:
    """Bytes that one guarded step of a large layer takes, and those of a gradient that is gathered."""
    model = gr.transform(
        nn.Linear(LARGE, LARGE, bias=False),
        gr.on("step:*", [CheckFinite("skip"), Observe("norm", "max_abs"), ClipByGlobalNorm(1e-3, log=True)]),
    )
    fully_shard(model, mesh=init_device_mesh("cpu", (distributed.get_world_size(),)))
    optimizer = optimizer_of(model, fused=True)
    peak = 0
    for _ in range(2):  # the first step allocates the state
        optimizer.zero_grad()
        model(torch.ones(2, LARGE)).sum().backward()
        peak = peak_of(optimizer.step)
    return {"norm": model.monitor.latest()["total_norm@step:group:default"], "step": peak,
            "gathered": peak_of(lambda: full(model.weight.grad))}  # fmt: skip


OF_TWO = [in_ddp, in_ddp_without_us, accumulated, in_fsdp, in_fsdp_without_us, compiled, checkpoints, memory]
OF_FOUR = [in_ddp, in_fsdp, mixed_meshes]


@pytest.fixture(scope="module")
def of_two(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    return outcomes_of(__file__, tmp_path_factory.mktemp("two"), 2)


@pytest.fixture(scope="module")
def of_four(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    return outcomes_of(__file__, tmp_path_factory.mktemp("four"), 4)


def compare(found: list[dict[str, Any]], part: str) -> None:
    wanted = by_hand(len(found))
    for outcomes in found:
        got = outcomes[part]
        assert isinstance(got, dict), got
        assert got["skipped"] == 1
        for name in ("parameters", "state"):
            torch.testing.assert_close(got[name], wanted[name], rtol=1e-10, atol=1e-10, check_dtype=False)
        norms = torch.tensor(got["norms"], dtype=torch.float64)
        torch.testing.assert_close(
            norms, torch.tensor(wanted["norms"], dtype=torch.float64), rtol=1e-10, atol=1e-10, equal_nan=True
        )
        assert got["norms"][:BAD] == found[0][part]["norms"][:BAD]  # equal on all ranks, bit for bit


@pytest.mark.parametrize("part", ["in_ddp", "accumulated", "in_fsdp", "compiled"])
def test_two_ranks_equal_one_process(of_two: list[dict[str, Any]], part: str) -> None:
    compare(of_two, part)


@pytest.mark.parametrize("part", ["in_ddp", "in_fsdp", "mixed_meshes"])
def test_four_ranks_equal_one_process(of_four: list[dict[str, Any]], part: str) -> None:
    compare(of_four, part)


@pytest.mark.parametrize(("part", "plain"), [("in_ddp", "in_ddp_without_us"), ("in_fsdp", "in_fsdp_without_us")])
def test_little_more_is_sent_than_without_us(of_two: list[dict[str, Any]], part: str, plain: str) -> None:
    for outcomes in of_two:
        without = outcomes[plain]
        assert without > 700  # gradients of 168 float64 numbers, in parts under FSDP2
        assert without < outcomes[part]["bytes"] <= without + 1024


def test_no_gradient_is_gathered(of_two: list[dict[str, Any]]) -> None:
    for outcomes in of_two:
        found = outcomes["memory"]
        assert not isinstance(found, str), found
        assert found["norm"] == 2 * LARGE  # each of LARGE x LARGE elements is 2
        assert found["gathered"] >= 4 * LARGE**2
        assert found["step"] < 4 * LARGE  # one row of the gradient


def test_checkpoints_load_in_the_plain_model_and_back(of_two: list[dict[str, Any]]) -> None:
    for outcomes in of_two:
        assert outcomes["checkpoints"] == {"sharded": [True] * 12, "ddp": [True] * 12}


if __name__ == "__main__":
    import sys

    run_parts(OF_TWO if sys.argv[2] == "2" else OF_FOUR)
