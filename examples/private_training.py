"""Train privately on digits (DP-SGD), and compare privacy, accuracy and time with Opacus.

``ClipPerExample`` clips the gradient of each example inside the rewritten graph and adds the noise; Opacus's accountant
says how much privacy is left. Opacus's own ``PrivacyEngine`` trains with the same noise multiplier, bound, sampling
rate, steps and learning rate. ``python examples/private_training.py`` prints epsilon, accuracy over seeds and
processor time of both, and draws them; ``--eager`` compiles nothing. It needs ``scikit-learn`` and ``opacus``.
"""

from __future__ import annotations

import argparse
import importlib.util
import statistics
import sys
import time
import warnings
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import matplotlib.pyplot as plt
import torch
from sklearn.datasets import load_digits
from torch import Tensor, nn
from torch.nn import functional

import gradrewrite as gr
from gradrewrite.passes import ClipPerExample

TRAINED = 1500  # digits that are trained on; the rest is for tests
EXPECTED = 100  # examples in a batch, on average
NOISE, BOUND, RATE, DELTA = 1.1, 1.0, 0.5, 1e-4
STEPS, SEEDS, WARM_UP = 150, 1, 5


class Digits(nn.Module):
    """A network of three linear layers."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second, self.head = nn.Linear(64, 256), nn.Linear(256, 128), nn.Linear(128, 10)

    def forward(self, images: Tensor) -> Tensor:
        """Return the logits ``[rows, 10]`` of ``[rows, 64]`` images with values from 0 to 1."""
        logits: Tensor = self.head(torch.tanh(self.second(torch.tanh(self.first(images)))))
        return logits


class SummedLoss(nn.Module):
    """The sum of the losses of the examples, each with a weight of 0 or 1."""

    def __init__(self, network: Digits) -> None:
        super().__init__()
        self.network = network

    def forward(self, images: Tensor, labels: Tensor, weights: Tensor) -> Tensor:
        """Return a scalar; all inputs have the rows in dimension 0."""
        return (functional.cross_entropy(self.network(images), labels, reduction="none") * weights).sum()


@dataclass(frozen=True)
class Data:
    """Digits: images ``[rows, 64]`` from 0 to 1, and labels ``[rows]``."""

    images: Tensor
    labels: Tensor


def load() -> tuple[Data, Data]:
    """Return the digits for training and those for tests."""
    digits = load_digits()
    images, labels = torch.tensor(digits.data, dtype=torch.float32) / 16, torch.tensor(digits.target)
    order = torch.randperm(len(images), generator=torch.Generator().manual_seed(0))
    first, rest = order[:TRAINED], order[TRAINED:]
    return Data(images[first], labels[first]), Data(images[rest], labels[rest])


def poisson_batches(data: Data, steps: int, share: float, seed: int) -> Iterator[tuple[Tensor, Tensor, Tensor]]:
    """Yield images, labels and weights; each example is in each batch with the probability ``share``.

    The accountant's theorem is about such batches, whose size varies. A batch without examples still costs privacy and
    adds noise: it is one example with the weight 0, whose gradient is 0. All others have the weight 1.
    """
    generator = torch.Generator().manual_seed(seed)
    for _ in range(steps):
        rows = (torch.rand(len(data.images), generator=generator) < share).nonzero()[:, 0]
        if len(rows) > 0:
            yield data.images[rows], data.labels[rows], torch.ones(len(rows))
        else:
            yield data.images[:1], data.labels[:1], torch.zeros(1)


def make_private(network: Digits, *, noise: float = NOISE, compiled: bool = False) -> gr.RewrittenModule:
    """Return the summed loss, whose gradients are clipped sums with noise: nothing depends on the size of the batch."""
    clip = ClipPerExample(BOUND, noise_multiplier=noise, loss_reduction="sum")
    model = gr.transform(SummedLoss(network), gr.on("gradient:*", clip), dynamic=True)
    if compiled:
        model.compile()
    return model


@dataclass(frozen=True)
class Run:
    """The outcome of one training.

    Attributes:
        epsilon: The privacy that was spent, at ``DELTA``.
        accuracies: The share of the test digits that are read, by step, every tenth of the run.
        seconds: Processor time of a step, the median behind the first steps.
    """

    epsilon: float
    accuracies: tuple[float, ...]
    seconds: float


def start(seed: int) -> Digits:
    """Return the network of a seed."""
    torch.manual_seed(seed)
    return Digits()


def train_here(seed: int, steps: int = STEPS, *, compiled: bool = False) -> Run:
    """Train by ``ClipPerExample``; the accountant is told of each step."""
    from opacus.accountants import RDPAccountant

    trained, tested = load()
    share, accountant = EXPECTED / len(trained.images), RDPAccountant()
    network = start(seed)
    model = make_private(network, compiled=compiled)
    optimizer = torch.optim.SGD(network.parameters(), lr=RATE / EXPECTED)  # a sum over the expected size is the mean
    batches = poisson_batches(trained, steps, share, seed)

    def step() -> None:
        images, labels, weights = next(batches)
        optimizer.zero_grad()
        model(images, labels, weights).backward()
        optimizer.step()
        accountant.step(noise_multiplier=NOISE, sample_rate=share)

    return follow(step, steps, network, tested, lambda: accountant.get_epsilon(DELTA))


def train_by_opacus(seed: int, steps: int = STEPS) -> Run:
    """Train by Opacus's ``PrivacyEngine``, in its default mode."""
    from opacus import PrivacyEngine

    trained, tested = load()
    network = start(seed)
    data = torch.utils.data.TensorDataset(trained.images, trained.labels)
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="Secure RNG turned off")  # nor is the noise of ClipPerExample secure
        engine = PrivacyEngine(accountant="rdp")
        model, optimizer, loader = engine.make_private(
            module=network,
            optimizer=torch.optim.SGD(network.parameters(), lr=RATE),
            data_loader=torch.utils.data.DataLoader(data, batch_size=EXPECTED),
            noise_multiplier=NOISE,
            max_grad_norm=BOUND,
        )
    batches = (batch for _ in range(steps) for batch in loader)

    def step() -> None:
        images, labels = next(batches)
        optimizer.zero_grad()
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", message="Full backward hook is firing")  # Opacus's hooks, the first layer
            functional.cross_entropy(model(images), labels).backward()
        optimizer.step()

    return follow(step, steps, network, tested, lambda: engine.get_epsilon(DELTA))


def follow(step: Callable[[], None], steps: int, network: Digits, tested: Data, epsilon: Callable[[], float]) -> Run:
    """Take the steps, with time and accuracy."""
    times, accuracies = [], []
    for number in range(1, steps + 1):
        before = time.process_time()
        step()
        times.append(time.process_time() - before)
        if number % max(steps // 10, 1) == 0:
            accuracies.append(accuracy(network, tested))
    return Run(epsilon(), tuple(accuracies), statistics.median(times[WARM_UP:] or times))


def accuracy(network: Digits, tested: Data) -> float:
    """Return the share of the test digits that the network reads."""
    with torch.no_grad():
        return float((network.forward(tested.images).argmax(1) == tested.labels).double().mean())


def describe(name: str, runs: Sequence[Run]) -> str:
    """Return one line about the runs of all seeds."""
    last = [run.accuracies[-1] for run in runs]
    milliseconds = 1e3 * statistics.median(run.seconds for run in runs)
    return (
        f"{name:12} epsilon {runs[0].epsilon:.4f}, accuracy {statistics.mean(last):.3f} ({min(last):.3f} to "
        f"{max(last):.3f} over {len(last)} seeds), {milliseconds:.2f} ms a step"
    )


def draw(runs: dict[str, list[Run]], path: Path) -> str:
    """Draw accuracy over the run, and the time of a step."""
    figure, (left, right) = plt.subplots(1, 2, figsize=(8, 3), width_ratios=(2, 1), layout="constrained")
    for number, (name, own) in enumerate(runs.items()):
        for run in own:
            share = [100 * (n + 1) / len(run.accuracies) for n in range(len(run.accuracies))]
            left.plot(share, run.accuracies, color=f"C{number}", label=name if run is own[0] else None)
        right.bar(name, 1e3 * statistics.median(run.seconds for run in own), color=f"C{number}")
    left.set(xlabel="% of the steps", ylabel="accuracy on test digits")
    left.legend()
    right.set(ylabel="processor time of a step, ms")
    figure.savefig(path, dpi=90)
    plt.close(figure)
    return str(path)


def main(argv: Sequence[str] | None = None) -> None:
    """Train in both ways, print, draw."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--eager", action="store_true", help="compile nothing with Inductor")
    parser.add_argument("--steps", type=int, default=STEPS)
    parser.add_argument("--seeds", type=int, default=SEEDS)
    parser.add_argument("--out", type=Path, default=Path(), help="folder of the picture")
    options = parser.parse_args(argv)
    if importlib.util.find_spec("opacus") is None:
        sys.exit("private_training needs the accountant of Opacus, which is not installed: pip install opacus")
    torch.set_num_threads(1)
    runs: dict[str, list[Run]] = {"gradrewrite": [], "Opacus": []}
    for seed in range(options.seeds):
        runs["gradrewrite"].append(train_here(seed, options.steps, compiled=not options.eager))
        runs["Opacus"].append(train_by_opacus(seed, options.steps))
    for name, own in runs.items():
        print(describe(name, own))
    print(draw(runs, options.out / "private_training.png"))


if __name__ == "__main__":
    main()
