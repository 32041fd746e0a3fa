"""Weighed losses on several processes: behind the average the same as one process with the whole batch."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

import gradrewrite as gr
from gradrewrite.passes import AllReduce, ClipByNorm, Observe, PCGrad, UPGrad, WeighLosses

from models.several_losses import losses_of, make
from ranks import outcomes_of, run_parts

RANKS, STEPS = 2, 3
WEIGHTINGS = {"Vector": UPGrad(), "Early": PCGrad(seed=1)}  # by model


def batch(step: int, rank: int | None) -> Tensor:
    """Of each rank rows of another scale."""
    x = torch.randn(RANKS * 3, 6, generator=torch.Generator().manual_seed(step), dtype=torch.float64)
    x[3:] *= 2
    return x if rank is None else x.chunk(RANKS)[rank]


def total(output: Any) -> Tensor:
    return torch.stack(losses_of(output)).sum()


def train(name: str, rank: int | None, *before: Any) -> dict[str, list[Any]]:
    """Weights and gradients of each step."""
    weigh = gr.on("gradient:trunk.*", [ClipByNorm(0.5), WeighLosses(WEIGHTINGS[name])])
    model = gr.transform(make(name)[0], [*before, weigh])
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    found: dict[str, list[Any]] = {"weights": [], "gradients": []}
    for step in range(STEPS):
        optimizer.zero_grad()
        total(model(batch(step, rank))).backward()
        records = model.monitor.latest()
        found["weights"].append([v for key, v in records.items() if key.startswith("loss_weight_")])
        found["gradients"].append({n: p.grad.clone() for n, p in model.named_parameters() if p.grad is not None})
        optimizer.step()
    return found


def averaged(rank: int) -> Any:
    return {name: train(name, rank, gr.on("gradient:*", AllReduce(bucket_mb=1e-3))) for name in WEIGHTINGS}


def message(model: Any, rank: int) -> str:
    """What a step is refused with."""
    try:
        total(model(batch(0, rank))).backward()
    except gr.PolicyError as err:
        return str(err)
    return "not refused"


def refused(rank: int) -> Any:
    """Of each policy the message, with and without DistributedDataParallel."""
    reduce, weigh = gr.on("gradient:*", AllReduce()), WeighLosses(UPGrad())
    gradients, error = gr.on("gradient:trunk.*", weigh), gr.on("error:trunk", weigh)
    found = {
        "average behind": message(gr.transform(make("mlp")[0], [gradients, reduce]), rank),
        "average and error": message(gr.transform(make("mlp")[0], [reduce, error]), rank),
    }
    for name, policy in {"DDP": gradients, "DDP and error": error, "DDP, average": [reduce, gradients]}.items():
        found[name] = message(DistributedDataParallel(gr.transform(make("mlp")[0], policy)), rank)
    for name, policy in {"FSDP2": gradients, "FSDP2 and error": gr.on("error:trunk.0", weigh)}.items():
        model = gr.transform(make("mlp")[0], policy, regions="trunk.?")
        for block in [*model.trunk, model]:
            fully_shard(block)
        found[name] = message(model, rank)
    model = gr.transform(make("mlp")[0], gradients)
    found["FSDP2 without regions"] = message(fully_shard(model), rank)
    return found


def observed(rank: int) -> Any:
    """Under DistributedDataParallel each rank may look at the losses of its own examples."""
    model = gr.transform(make("mlp")[0], gr.on("gradient:trunk.0.weight", Observe("loss_norms")))
    total(DistributedDataParallel(model)(batch(0, rank))).backward()
    plain = make("mlp")[0]
    rows = [torch.autograd.grad(loss, plain.trunk[0].weight, retain_graph=True)[0] for loss in plain(batch(0, rank))]
    return model.monitor.latest(), [float(row.norm()) for row in rows]


class Detached(nn.Module):
    """Of a layer that is used twice, one gradient is there before the other one."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.one, self.two = nn.Linear(4, 4), nn.Linear(4, 1)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        h = self.one(x).tanh()
        return self.two(self.one(h.detach())).sum(), h.square().sum()


def measured_before(rank: int) -> Any:
    """Losses are measured, then averaged, then weighed; of a loss that is computed early, too."""
    plain, x = Detached(), batch(0, rank)[:, :4].float()
    rows = [torch.autograd.grad(loss, plain.one.weight, retain_graph=True)[0] for loss in plain(x)]
    model = gr.transform(plain, gr.on("gradient:one.*", [Observe("loss_norms"), AllReduce(), WeighLosses(UPGrad())]))
    total(model(x)).backward()
    return model.monitor.latest(), [float(row.norm()) for row in rows]


def reduced(rank: int) -> Any:
    """Behind the average all ranks have one gradient: its norm here, and the norm of the whole."""
    policy = gr.on("gradient:trunk.*", [AllReduce(), WeighLosses(UPGrad()), Observe("norm")])
    model = gr.transform(make("mlp")[0], policy)
    total(model(batch(0, rank))).backward()
    return model.monitor.latest(), model.monitor.reduce()


PARTS = [averaged, refused, observed, measured_before, reduced]

pytestmark = [pytest.mark.distributed, pytest.mark.slow]


@pytest.fixture(scope="module")
def outcomes(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    path: Path = tmp_path_factory.mktemp("ranks")
    return outcomes_of(__file__, path, RANKS)


@pytest.mark.parametrize("name", WEIGHTINGS)
def test_weighed_averages_equal_one_process(outcomes: list[dict[str, Any]], name: str) -> None:
    expected = train(name, None)
    assert len({round(weights[0], 6) for weights in expected["weights"]}) > 1
    for found in outcomes:
        assert not isinstance(found["averaged"], str), found["averaged"]
        torch.testing.assert_close(found["averaged"][name], expected, rtol=1e-10, atol=1e-10)
    first, second = (found["averaged"][name] for found in outcomes)
    assert first["weights"] == second["weights"]


REFUSED = {
    "average behind": r"WeighLosses\(UPGrad\(\)\) comes before AllReduce\(\)",
    "average and error": r"error:trunk.5: WeighLosses\(UPGrad\(\)\) comes before AllReduce\(\)",
    "DDP": "gradient:trunk.0.weight under DistributedDataParallel with 2 processes: each process would weigh by",
    "DDP and error": "error:trunk.5 under DistributedDataParallel with 2 processes: each process would weigh by",
    "DDP, average": "DistributedDataParallel: gradients would be averaged twice",
    "FSDP2": r"needs the backward of all losses in one graph.* \(a graph break, or regions=, which FSDP2 needs\)",
    "FSDP2 and error": "error:trunk.0.*needs the backward of all losses in one graph",
    "FSDP2 without regions": r"WeighLosses\(UPGrad\(\)\)",
}


@pytest.mark.parametrize("name", REFUSED)
def test_refused(outcomes: list[dict[str, Any]], name: str) -> None:
    for found in outcomes:
        assert not isinstance(found["refused"], str), found["refused"]
        assert re.search(REFUSED[name], found["refused"][name]), found["refused"][name]


@pytest.mark.parametrize(("part", "site"), [("observed", "trunk.0.weight"), ("measured_before", "one.weight")])
def test_each_rank_observes_its_own_losses(outcomes: list[dict[str, Any]], part: str, site: str) -> None:
    for found in outcomes:
        assert not isinstance(found[part], str), found[part]
        records, norms = found[part]
        assert [records[f"loss_norm_{k}@gradient:{site}"] for k in range(len(norms))] == pytest.approx(norms)
    assert outcomes[0][part][1] != outcomes[1][part][1]


def test_the_norm_of_a_weighed_average_counts_once(outcomes: list[dict[str, Any]]) -> None:
    for found in outcomes:
        assert not isinstance(found["reduced"], str), found["reduced"]
        here, whole = found["reduced"]
        names = [name for name in here if name.startswith("norm@gradient:trunk.")]
        assert "norm@gradient:trunk.0.weight" in names
        assert [whole[name] for name in names] == pytest.approx([here[name] for name in names])


if __name__ == "__main__":
    run_parts(PARTS)
