"""FSDP2 and DDP around regions: actions in the blocks, on each rank as in one process with that rank's batch."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, distributed, nn
from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel
from torch.utils.checkpoint import checkpoint

import gradrewrite as gr
from gradrewrite.backends.model_state import state_of
from gradrewrite.passes import CheckFinite, ClipByGlobalNorm, ClipByNorm, ClipByValue, Observe

from models.small import Block
from ranks import outcomes_of, run_parts

SIZE, STEPS = 8, 20
POLICY = [
    gr.on("error:blocks.*", [Observe("norm"), ClipByValue(1e-3)]),
    gr.on("error:blocks.?.fc", ClipByNorm(1e-2)),
    gr.on("gradient:blocks.*.weight", [Observe("norm"), CheckFinite("raise")]),
]

GUARDED = [
    gr.on("error:blocks.*", ClipByValue(1e-3)),
    gr.on("gradient:blocks.*", CheckFinite("skip")),
    gr.on("step:*", [ClipByGlobalNorm(0.02), Observe("norm")]),
]
BAD_STEP = 7


class Net(nn.Module):
    def __init__(self, *, is_checkpointed: bool = False) -> None:
        super().__init__()
        self.embed, self.head = nn.Linear(SIZE, SIZE), nn.Linear(SIZE, 1)
        self.blocks = nn.ModuleList(Block(SIZE, 17) for _ in range(3))
        self.is_checkpointed = is_checkpointed

    def forward(self, x: Tensor) -> Tensor:
        x = self.embed(x)
        for block in self.blocks:
            x = checkpoint(block, x, use_reentrant=False) if self.is_checkpointed else block(x)
        return self.head(x)


def made(*, is_checkpointed: bool = False) -> Net:
    torch.manual_seed(0)
    return Net(is_checkpointed=is_checkpointed).double()


def batch(rank: int) -> Tensor:
    return torch.randn(6, SIZE, dtype=torch.float64, generator=torch.Generator().manual_seed(rank + 1)) * (rank + 1)


def optimizer_of(model: nn.Module) -> torch.optim.Optimizer:
    # With the default eps, gradients near 1e-9 would make the rounding of sums in another order visible.
    return torch.optim.AdamW(model.parameters(), lr=0.01, eps=1e-4)


def shard(model: Any, **settings: Any) -> Any:
    for block in model.blocks:
        fully_shard(block, **settings)
    return fully_shard(model, **settings)


def train(model: Any, rank: int, steps: int = STEPS) -> torch.optim.Optimizer:
    optimizer = optimizer_of(model)
    for _ in range(steps):
        optimizer.zero_grad()
        model(batch(rank)).square().mean().backward()
        optimizer.step()
    return optimizer


def whole(tensor: Any) -> Tensor:
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def found_in(model: Any, optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    state = state_of(model)
    assert state is not None
    assert state.regions is not None
    return {
        "parameters": [whole(p).detach() for p in model.parameters()],
        "moments": [whole(optimizer.state[p][name]) for p in model.parameters() for name in ("exp_avg", "exp_avg_sq")],
        "records": model.monitor.latest(),
        "entries": len(state.regions._entries),
        "graphs": len(model.explain().graphs),
    }


def sharded_after(rank: int) -> Any:
    model = shard(gr.transform(made(), POLICY, regions="blocks.*"))
    return found_in(model, train(model, rank))


def sharded_before(rank: int) -> Any:
    model = gr.transform(shard(made(), reshard_after_forward=False), POLICY, regions="blocks.*")
    return found_in(model, train(model, rank))


def in_ddp(rank: int) -> Any:
    model = gr.transform(made(), POLICY, regions="blocks.*")
    return found_in(model, train(DistributedDataParallel(model), rank))


def checkpointed(rank: int) -> Any:
    model = shard(gr.transform(made(is_checkpointed=True), POLICY, regions="blocks.*"))
    return found_in(model, train(model, rank))


def offloaded(rank: int) -> Any:
    model = shard(gr.transform(made(), POLICY, regions="blocks.*"), offload_policy=CPUOffloadPolicy(pin_memory=False))
    return found_in(model, train(model, rank))


def guarded(rank: int) -> Any:
    """Norms of the optimizer's gradients, and one step that is skipped because of the last rank."""
    model = shard(gr.transform(made(), GUARDED, regions="blocks.*"))
    optimizer = gr.guard(optimizer_of(model), model)
    for step in range(STEPS):
        optimizer.zero_grad()
        is_bad = step == BAD_STEP and rank == distributed.get_world_size() - 1
        model(batch(rank) * (float("inf") if is_bad else 1.0)).square().mean().backward()
        optimizer.step()
    return {**found_in(model, optimizer), "skipped": model.monitor.skipped}


def compiled(rank: int) -> Any:
    model = gr.transform(made(), POLICY, regions="blocks.*")
    model.compile()
    model = shard(model)
    return found_in(model, train(model, rank))


def in_low_precision(rank: int) -> Any:
    """Gradient sites in the blocks have the dtype that is computed in; the empty policy changes nothing."""
    settings: dict[str, Any] = {"mp_policy": MixedPrecisionPolicy(torch.bfloat16, torch.float32)}
    model = shard(gr.transform(made(), POLICY, regions="blocks.*").float(), **settings)
    train(model, rank, 2)
    dtypes = {site.dtype for graph in model.explain().graphs for site in graph.sites if site.kind == "gradient"}
    empty = shard(gr.transform(made(), [], regions="blocks.*").float(), **settings)
    plain = shard(made().float(), **settings)
    for block in plain.blocks:
        block.compile(backend="aot_eager", fullgraph=True)
    for net in (empty, plain):
        train(net, rank, 3)
    pairs = zip(empty.parameters(), plain.parameters(), strict=True)
    return str(dtypes), all(torch.equal(a.to_local(), b.to_local()) for a, b in pairs)


def failed_check(rank: int) -> Any:
    """The texts of a failed check: the memory of parameters is released behind the backward, or kept."""
    texts = []
    for is_released in (True, False):
        model = shard(gr.transform(made(), gr.on("error:blocks.*", CheckFinite("raise")), regions="blocks.*"))
        model.set_reshard_after_backward(is_released)
        with torch.no_grad():
            model.blocks[1].out.weight.to_local().fill_(float("nan"))
        try:
            model(batch(rank)).sum().backward()
        except gr.NonFiniteError as err:
            texts.append(str(err))
    return texts


PARTS = (
    guarded,
    sharded_after,
    in_ddp,
    sharded_before,
    checkpointed,
    offloaded,
    compiled,
    in_low_precision,
    failed_check,
)

pytestmark = [pytest.mark.distributed, pytest.mark.slow]


def wanted(number: int, policy: Any, max_norm: float = float("inf"), skipped: int = -1) -> dict[str, Any]:
    """One process: the gradients of the batch of each rank, with the policy, averaged; then a clip by their norm."""
    plain = made()
    model, optimizer = gr.transform(plain, policy), optimizer_of(plain)
    records: list[dict[str, float]] = []
    norms = {}
    for step in range(STEPS):
        if step == skipped:
            continue
        grads: list[list[Tensor]] = []
        records.clear()
        for rank in range(number):
            plain.zero_grad()
            model(batch(rank)).square().mean().backward()
            grads.append([p.grad.clone() for p in plain.parameters() if p.grad is not None])
            records.append(model.monitor.latest())
        for parameter, *parts in zip(plain.parameters(), *grads, strict=True):
            parameter.grad = torch.stack(parts).mean(0)
        norms = {f"norm@step:{n}": float(p.grad.norm()) for n, p in plain.named_parameters() if p.grad is not None}
        total = torch.cat([p.grad.flatten() for p in plain.parameters() if p.grad is not None]).norm()
        for parameter in plain.parameters():
            if parameter.grad is not None and total > max_norm:
                parameter.grad *= max_norm / total
        norms["total_norm@step:group:default"] = float(total)
        optimizer.step()
    moments = [optimizer.state[p][name] for p in plain.parameters() for name in ("exp_avg", "exp_avg_sq")]
    return {
        "parameters": [p.detach() for p in plain.parameters()],
        "moments": moments,
        "records": records,
        "norms": norms,
    }


@pytest.fixture(scope="module")
def of_two(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    return outcomes_of(__file__, tmp_path_factory.mktemp("two"), 2)


@pytest.fixture(scope="module")
def of_four(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    return outcomes_of(__file__, tmp_path_factory.mktemp("four"), 4)


@pytest.fixture(scope="module")
def reference() -> dict[str, Any]:
    return wanted(2, POLICY)


@pytest.mark.parametrize("way", ["sharded_after", "in_ddp", "sharded_before", "checkpointed", "offloaded", "compiled"])
def test_training_is_that_of_one_process(of_two: list[dict[str, Any]], reference: dict[str, Any], way: str) -> None:
    for rank, outcome in enumerate(of_two):
        found = outcome[way]
        assert_same_state(found, reference)
        records = {key: value for key, value in reference["records"][rank].items() if key in found["records"]}
        assert found["records"] == pytest.approx(records, rel=1e-9)
        assert "norm@gradient:blocks.2.out.weight" in records
        assert (found["entries"], found["graphs"]) == (1, 3)


def assert_same_state(found: Any, reference: dict[str, Any]) -> None:
    assert not isinstance(found, str), found
    for name in ("parameters", "moments"):
        for a, b in zip(found[name], reference[name], strict=True):
            torch.testing.assert_close(a, b, rtol=1e-10, atol=1e-10)


@pytest.mark.parametrize("ranks", ["of_two", "of_four"])
def test_clipped_by_the_norm_of_all_with_one_step_skipped(request: pytest.FixtureRequest, ranks: str) -> None:
    outcomes = request.getfixturevalue(ranks)
    reference = wanted(len(outcomes), GUARDED[:1], 0.02, BAD_STEP)
    for outcome in outcomes:
        found = outcome["guarded"]
        assert_same_state(found, reference)
        total = found["records"]["total_norm@step:group:default"]
        assert total == pytest.approx(reference["norms"]["total_norm@step:group:default"], rel=1e-10, abs=1e-10)
        assert total > 0.02  # the clip acts
        assert found["skipped"] == 1


def test_low_precision(of_two: list[dict[str, Any]]) -> None:
    assert [outcome["in_low_precision"] for outcome in of_two] == [("{torch.bfloat16}", True)] * 2


def test_a_failed_check_names_the_block(of_two: list[dict[str, Any]]) -> None:
    for rank, outcome in enumerate(of_two):
        released, kept = outcome["failed_check"]
        assert f"rank {rank}" in released
        assert "error:blocks.2" in released  # of the sites that are checked the first
        assert "could not be replayed: the memory of parameters was released" in released
        assert "first non-finite: activation:blocks.1.out" in kept


if __name__ == "__main__":
    run_parts(PARTS, [guarded])
