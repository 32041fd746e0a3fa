"""Clips and factors of examples on several processes: each has its own examples; the average equals one with all."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

import gradrewrite as gr
from gradrewrite.passes import AllReduce, CheckFinite, ClipByGlobalNorm, ClipPerExample, WeighExamples

from ranks import outcomes_of, run_parts

RANKS, ROWS, WIDTH, STEPS, MAX_NORM = 2, 4, 5, 4, 0.05


def make() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh(), nn.Linear(WIDTH, 1)).double()


def batch(step: int, rank: int | None) -> Tensor:
    x = torch.randn(RANKS * ROWS, WIDTH, generator=torch.Generator().manual_seed(step), dtype=torch.float64)
    return x if rank is None else x.chunk(RANKS)[rank]


def clip(noise_multiplier: float, seed: int = 3) -> ClipPerExample:
    torch.manual_seed(seed)
    return ClipPerExample(MAX_NORM, noise_multiplier=noise_multiplier)


def weigh(seed: int = 3) -> WeighExamples:
    torch.manual_seed(seed)
    return WeighExamples(lambda n: 1 / (n + 0.01), per_parameter=True, noise_multiplier=0.1)


def train(model: Any, run: Any, rank: int | None) -> list[Any]:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5, momentum=0.9)
    for step in range(STEPS):
        optimizer.zero_grad()
        run(batch(step, rank)).square().mean().backward()
        optimizer.step()
    return [p.detach().clone() for p in model.parameters()]


def one_process(noise_multiplier: float) -> list[Tensor]:
    return one_process_with(clip(noise_multiplier))


def one_process_with(action: Any) -> list[Tensor]:
    model = gr.transform(make(), gr.on("gradient:*", action))
    return train(model, model, None)


def by_ddp(rank: int) -> Any:
    found = {}
    for noise in (0.0, 1.5):
        policy = gr.on("gradient:*", clip(noise, seed=3 + rank))  # the noise of the first rank counts
        model = gr.transform(make(), policy)
        found[noise] = train(model, DistributedDataParallel(model), rank)
    return found


def weighted(rank: int) -> Any:
    of_ddp = gr.transform(make(), gr.on("gradient:*", weigh(seed=3 + rank)))
    reduced = gr.transform(make(), [gr.on("gradient:*", AllReduce()), gr.on("gradient:*", weigh())])
    return [train(of_ddp, DistributedDataParallel(of_ddp), rank), train(reduced, reduced, rank)]


def by_fsdp(rank: int) -> Any:
    found = {}
    for noise in (0.0, 1.5):
        model = gr.transform(make(), gr.on("gradient:*", clip(noise, seed=3 + rank)))
        fully_shard(model)
        found[noise] = [p.full_tensor() for p in train(model, model, rank)]
    return found


def by_all_reduce(rank: int) -> Any:
    found = {}
    for noise in (0.0, 1.5):
        reduce_first = [gr.on("gradient:*", [CheckFinite("record"), AllReduce()]), gr.on("gradient:*", clip(noise))]
        reduce_last = [gr.on("gradient:*", clip(noise)), gr.on("gradient:*", AllReduce(bucket_mb=1e-4))]
        for name, policy in {"first": reduce_first, "last": reduce_last}.items():
            model = gr.transform(make(), policy)
            found[f"{name} {noise}"] = train(model, model, rank)
    return found


def clipped_again(rank: int) -> Any:
    """A global clip behind the average acts on the averaged sum of the clipped examples."""
    policy = [
        gr.on("gradient:*", AllReduce()),
        gr.on("gradient:*", clip(0.0)),
        gr.on("gradient:*", ClipByGlobalNorm(1e-3)),
    ]
    model = gr.transform(make(), policy)
    model(batch(0, rank)).square().mean().backward()
    return model.monitor.latest()["total_norm@group:default"], [p.grad.clone() for p in model.parameters()]


def refused(rank: int) -> Any:
    """What acts on whole gradients is refused before the average, and what is advised for regions works."""
    errors = []
    for policy, options in (
        (gr.on("gradient:*", ClipByGlobalNorm(1.0)), {}),
        (gr.on("gradient:*", ClipPerExample(1.0)), {"regions": "?"}),
    ):
        run = DistributedDataParallel(gr.transform(make(), policy, **options))
        try:
            run(batch(0, rank)).sum().backward()
        except gr.PolicyError as err:
            errors.append(str(err))
    return errors


PARTS = [by_ddp, weighted, by_fsdp, by_all_reduce, clipped_again, refused]


@pytest.fixture(scope="module")
def outcomes(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    path: Path = tmp_path_factory.mktemp("ranks")
    return outcomes_of(__file__, path, RANKS)


pytestmark = [pytest.mark.distributed, pytest.mark.slow]


@pytest.mark.parametrize("way", ["by_ddp", "by_fsdp"])
@pytest.mark.parametrize("noise", [0.0, 1.5])
def test_what_averages_beside_the_graph_equals_one_process(
    outcomes: list[dict[str, Any]], noise: float, way: str
) -> None:
    expected = one_process(noise)
    for found in outcomes:
        assert not isinstance(found[way], str), found[way]
        torch.testing.assert_close(found[way][noise], expected, rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize("order", ["first", "last"])
@pytest.mark.parametrize("noise", [0.0, 1.5])
def test_all_reduce_equals_one_process_wherever_it_stands(
    outcomes: list[dict[str, Any]], noise: float, order: str
) -> None:
    expected = one_process(noise)
    for found in outcomes:
        assert not isinstance(found["by_all_reduce"], str), found["by_all_reduce"]
        torch.testing.assert_close(found["by_all_reduce"][f"{order} {noise}"], expected, rtol=1e-10, atol=1e-12)


def test_factors_of_each_parameter_equal_one_process(outcomes: list[dict[str, Any]]) -> None:
    expected = one_process_with(weigh())
    for found in outcomes:
        assert not isinstance(found["weighted"], str), found["weighted"]
        for parameters in found["weighted"]:
            torch.testing.assert_close(parameters, expected, rtol=1e-10, atol=1e-12)


def test_clip_behind_the_average(outcomes: list[dict[str, Any]]) -> None:
    model = gr.transform(make(), [gr.on("gradient:*", clip(0.0)), gr.on("gradient:*", ClipByGlobalNorm(1e-3))])
    model(batch(0, None)).square().mean().backward()
    for found in outcomes:
        norm, gradients = found["clipped_again"]
        assert norm == pytest.approx(model.monitor.latest()["total_norm@group:default"], rel=1e-6)
        torch.testing.assert_close(gradients, [p.grad for p in model.parameters()], rtol=1e-10, atol=1e-14)


def test_what_stays_refused_says_what_works(outcomes: list[dict[str, Any]]) -> None:
    for found in outcomes:
        of_global, of_regions = found["refused"]
        assert 'gr.on("step:*", ClipByGlobalNorm(1.0))' in of_global
        assert "step" not in of_regions
        assert "without regions" in of_regions


if __name__ == "__main__":
    run_parts(PARTS)
