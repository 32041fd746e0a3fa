"""Private training of the example program: clipped sums and epsilon are those of Opacus."""

from __future__ import annotations

import copy
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from torch import Tensor
from torch.nn import functional

from gradrewrite.examples import private_training
from gradrewrite.examples.private_training import Data, Digits, Run

NO_OPACUS = "opacus is not installed"
ROWS = 12


def batch(dtype: torch.dtype = torch.float64) -> tuple[Tensor, Tensor, Tensor]:
    trained, _ = private_training.load()
    return trained.images[:ROWS].to(dtype), trained.labels[:ROWS], torch.ones(ROWS, dtype=dtype)


def clipped_here(network: Digits, *inputs: Tensor, noise: float = 0.0) -> dict[str, Tensor]:
    network = copy.deepcopy(network)
    private_training.make_private(network, noise=noise)(*inputs).backward()
    return {name: p.grad for name, p in network.named_parameters()}


def clipped_by_hand(network: Digits, images: Tensor, labels: Tensor, weights: Tensor) -> dict[str, Tensor]:
    """One backward for each example."""
    parameters = dict(network.named_parameters())
    sums = {name: torch.zeros_like(p) for name, p in parameters.items()}
    factors = []
    for image, label, weight in zip(images.split(1), labels.split(1), weights, strict=True):
        loss = weight * functional.cross_entropy(network(image), label)
        gradients = torch.autograd.grad(loss, list(parameters.values()))
        norm = torch.stack([g.square().sum() for g in gradients]).sum().sqrt()
        factors.append(min(1.0, float(private_training.BOUND / norm)))
        for total, gradient in zip(sums.values(), gradients, strict=True):
            total += factors[-1] * gradient
    assert min(factors) < 1
    return sums


@pytest.mark.long
def test_the_clipped_sum_is_that_of_a_loop() -> None:
    network = private_training.start(0).double()
    wanted = clipped_by_hand(network, *batch())
    torch.testing.assert_close(clipped_here(network, *batch()), wanted, rtol=1e-10, atol=1e-13)


@pytest.mark.long
def test_an_empty_batch_is_noise_alone() -> None:
    trained, _ = private_training.load()
    ((images, labels, weights),) = private_training.poisson_batches(trained, 1, 0.0, seed=0)
    assert weights.tolist() == [0.0]
    network = private_training.start(0)
    for gradient in clipped_here(network, images, labels, weights).values():
        assert not gradient.any()
    noise = torch.cat([g.flatten() for g in clipped_here(network, images, labels, weights, noise=3.0).values()])
    assert float(noise.std()) == pytest.approx(3.0 * private_training.BOUND, rel=0.05)


@pytest.mark.long
def test_the_clipped_sum_is_that_of_opacus() -> None:
    pytest.importorskip("opacus", reason=NO_OPACUS)
    from opacus import GradSampleModule
    from opacus.optimizers import DPOptimizer

    network = private_training.start(0).double()
    images, labels, weights = batch()
    wanted = clipped_here(network, images, labels, weights)
    model = GradSampleModule(network, loss_reduction="sum")
    optimizer = DPOptimizer(
        torch.optim.SGD(network.parameters()),
        noise_multiplier=0.0,
        max_grad_norm=private_training.BOUND,
        expected_batch_size=None,
        loss_reduction="sum",
    )
    functional.cross_entropy(model(images.requires_grad_()), labels, reduction="sum").backward()
    optimizer.pre_step()
    found = {name: p.grad for name, p in network.named_parameters()}
    torch.testing.assert_close(found, wanted, rtol=3e-6, atol=1e-7)  # Opacus adds 1e-6 to each norm


@pytest.mark.slow
def test_epsilon_is_that_of_opacus() -> None:
    pytest.importorskip("opacus", reason=NO_OPACUS)
    here, there = private_training.train_here(0, 20), private_training.train_by_opacus(0, 20)
    assert here.epsilon == there.epsilon > 0
    assert len(here.accuracies) == len(there.accuracies) == 10


@pytest.mark.pure
def test_each_example_is_drawn_with_the_same_probability() -> None:
    data = Data(torch.arange(400.0)[:, None], torch.arange(400))
    batches = list(private_training.poisson_batches(data, 200, 0.1, seed=0))
    counts = torch.zeros(400)
    for images, labels, weights in batches:
        assert images.flatten().tolist() == labels.tolist()
        assert weights.tolist() == [1.0] * len(labels)
        counts[labels] += 1
    assert len({len(labels) for _, labels, _ in batches}) > 10
    assert float(counts.mean()) == pytest.approx(20, rel=0.05)  # 0.1 of 200; 5 % is more than 10 deviations
    assert float(counts.std()) == pytest.approx((200 * 0.1 * 0.9) ** 0.5, rel=0.2)  # of a binomial distribution


@pytest.mark.pure
def test_line_and_picture(tmp_path: Path) -> None:
    runs = [Run(1.5, (0.5, 0.9), 0.002), Run(1.5, (0.4, 0.8), 0.004)]
    wanted = "epsilon 1.5000, accuracy 0.850 (0.800 to 0.900 over 2 seeds), 3.00 ms a step"
    assert private_training.describe("gradrewrite", runs) == f"gradrewrite  {wanted}"
    assert Path(private_training.draw({"one": runs, "two": runs}, tmp_path / "x.png")).stat().st_size > 0


@pytest.mark.slow
def test_without_opacus_the_program_says_how_to_install_it(tmp_path: Path) -> None:
    hidden = (
        "import sys; sys.modules['opacus'] = None; from gradrewrite.examples.private_training import main; main([])"
    )
    done = subprocess.run([sys.executable, "-c", hidden], cwd=tmp_path, capture_output=True, text=True)
    assert done.returncode == 1
    assert "pip install opacus" in done.stderr
