"""Compute the mean of the squared gradients of single examples, and compare with other ways to do it.

A user of Theano asked how: "backpropagate the gradient until the last step, and square the components of the last
operation, which should be a sum over the batch index". ``Keep("second_moment")`` rewrites the backward graph so.
``python examples/mean_squared_gradients.py`` prints how far it is from ``torch.func.vmap(grad)`` in float64, time and
memory of a step by batch size beside a Python loop, ``vmap(grad)`` and Opacus (where it is installed), and draws both.
``--eager`` compiles nothing. It needs ``scikit-learn``.
"""

from __future__ import annotations

import argparse
import importlib.util
import random
import statistics
import time
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import accumulate
from pathlib import Path

import matplotlib.pyplot as plt
import torch
from sklearn.datasets import load_digits
from torch import Tensor, nn
from torch.nn import functional
from torch.profiler import ProfilerActivity, profile

import gradrewrite as gr
from gradrewrite.passes import Keep

SIZES = (16, 64)
ROUNDS = 7
HAS_OPACUS = importlib.util.find_spec("opacus") is not None


class Digits(nn.Module):
    """Two convolutions and two linear layers, 139,000 parameters."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Conv2d(1, 16, 3, padding=1), nn.Conv2d(16, 32, 3, padding=1)
        self.hidden, self.head = nn.Linear(512, 256), nn.Linear(256, 10)

    def forward(self, images: Tensor, labels: Tensor) -> Tensor:
        """Return the mean loss of ``[rows, 1, 8, 8]`` images with values from 0 to 1."""
        maps = functional.max_pool2d(torch.relu(self.second(torch.relu(self.first(images)))), 2)
        return functional.cross_entropy(self.head(torch.relu(self.hidden(maps.flatten(1)))), labels)


Moments = Mapping[str, Tensor]
Way = Callable[[Tensor, Tensor], Moments]


def plain_gradient(network: nn.Module, *, compiled: bool) -> Way:
    """Return a function that computes the gradient of the batch alone: what a step costs without the second moments."""
    model: Callable[[Tensor, Tensor], Tensor] = torch.compile(network) if compiled else network

    def gradients(images: Tensor, labels: Tensor) -> Moments:
        network.zero_grad()
        model(images, labels).backward()
        return {name: p.grad for name, p in network.named_parameters() if p.grad is not None}

    return gradients


def by_rewriting(network: nn.Module, *, compiled: bool) -> Way:
    """Return a function that reads the second moments out of the rewritten backward graph."""
    model = gr.transform(network, gr.on("gradient:*", Keep("second_moment")))
    if compiled:
        model.compile()

    def moments(images: Tensor, labels: Tensor) -> Moments:
        model.zero_grad()
        model(images, labels).backward()
        return {site.name: tensor for site, tensor in model.monitor.kept("second_moment").items()}

    return moments


def by_loop(network: nn.Module, *, compiled: bool) -> Way:
    """Return a function that calls the network with one example after the other, never compiled."""

    def moments(images: Tensor, labels: Tensor) -> Moments:
        sums = {name: torch.zeros_like(p, requires_grad=False) for name, p in network.named_parameters()}
        for image, label in zip(images.split(1), labels.split(1), strict=True):
            gradients = torch.autograd.grad(network(image, label), list(network.parameters()))
            for total, gradient in zip(sums.values(), gradients, strict=True):
                total.addcmul_(gradient, gradient, value=1 / len(images))
        return sums

    return moments


def by_vmap(network: nn.Module, *, compiled: bool) -> Way:
    """Return a function that squares what ``torch.func.vmap(grad)`` gives, all gradients of all examples."""
    parameters = {name: p.detach() for name, p in network.named_parameters()}

    def loss(parameters: dict[str, Tensor], image: Tensor, label: Tensor) -> Tensor:
        result: Tensor = torch.func.functional_call(network, parameters, (image[None], label[None]))
        return result

    terms = torch.func.vmap(torch.func.grad(loss), (None, 0, 0))

    def moments(images: Tensor, labels: Tensor) -> Moments:
        return {name: term.square().mean(0) for name, term in terms(parameters, images, labels).items()}

    return torch.compile(moments) if compiled else moments


def by_opacus(network: nn.Module, *, compiled: bool) -> Way:
    """Return a function that squares the ``grad_sample`` of Opacus, which is never compiled."""
    from opacus import GradSampleModule

    model = GradSampleModule(network, loss_reduction="mean")

    def moments(images: Tensor, labels: Tensor) -> Moments:
        model.zero_grad()
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", message="Full backward hook is firing")  # Opacus's hooks, the first layer
            model(images, labels).backward()
        terms: dict[str, Tensor] = {name: vars(p)["grad_sample"] for name, p in network.named_parameters()}
        model.zero_grad()
        return {name: term.square().mean(0) for name, term in terms.items()}

    return moments


WAYS = {
    "plain gradient": plain_gradient,
    "gradrewrite": by_rewriting,
    "Python loop": by_loop,
    "vmap(grad)": by_vmap,
    **({"Opacus": by_opacus} if HAS_OPACUS else {}),
}


def start(dtype: torch.dtype = torch.float32) -> Digits:
    """Return the network, the same each time."""
    torch.manual_seed(0)
    return Digits().to(dtype)


def batch(rows: int, dtype: torch.dtype = torch.float32) -> tuple[Tensor, Tensor]:
    """Return the first digits, ``[rows, 1, 8, 8]`` from 0 to 1, with their labels."""
    digits = load_digits()
    return torch.tensor(digits.images[:rows, None] / 16, dtype=dtype), torch.tensor(digits.target[:rows])


def largest_difference(way: str, rows: int, *, compiled: bool) -> float:
    """Return the largest difference between a way's second moments and those of ``vmap(grad)``, in float64.

    It is relative to the largest second moment of the same parameter, which is > 0 here.
    """
    images, labels = batch(rows, torch.float64)
    found = WAYS[way](start(torch.float64), compiled=compiled)(images, labels)
    wanted = by_vmap(start(torch.float64), compiled=False)(images, labels)
    return max(float((found[name] - term).abs().max() / term.max()) for name, term in wanted.items())


@dataclass(frozen=True)
class Cost:
    """The cost of a step.

    Attributes:
        seconds: Processor time, the median over rounds.
        peak: Bytes of tensors that it has at most, over those that were there before.
    """

    seconds: float
    peak: int


def measure(rows: int, *, compiled: bool, rounds: int = ROUNDS) -> dict[str, Cost]:
    """Measure all ways at one batch size, in a random order that changes from round to round."""
    images, labels = batch(rows)
    steps = {name: partial(make(start(), compiled=compiled), images, labels) for name, make in WAYS.items()}
    for step in steps.values():
        step()  # compiles
        step()
    times: dict[str, list[float]] = {name: [] for name in steps}
    for round_ in range(rounds):
        for name in random.Random(round_).sample(list(steps), len(steps)):
            before = time.process_time()
            steps[name]()
            times[name].append(time.process_time() - before)
    return {name: Cost(statistics.median(times[name]), peak_bytes(step)) for name, step in steps.items()}


def peak_bytes(step: Callable[[], object]) -> int:
    """Sum up the reports of the allocator, in their order."""
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as recorded:
        step()
    if recorded.profiler is None or recorded.profiler.kineto_results is None:
        raise RuntimeError("the profiler of torch recorded nothing")
    events = [event for event in recorded.profiler.kineto_results.events() if event.name() == "[memory]"]
    sizes = [event.nbytes() for event in sorted(events, key=lambda event: event.start_ns())]
    return int(max(accumulate(sizes, initial=0)))


def table(costs: Mapping[int, Mapping[str, Cost]]) -> str:
    """Return one line for each way, with time and memory by batch size."""
    cells = [f"{f'batch of {rows}':>21}" for rows in costs]
    lines = ["".join([" " * 16, *cells])]
    for name in WAYS:
        own = [costs[rows][name] for rows in costs]
        cells = [f"{f'{cost.seconds * 1e3:.1f} ms, {cost.peak / 1e6:.1f} MB':>21}" for cost in own]
        lines.append("".join([f"{name:16}", *cells]))
    return "\n".join(lines)


def draw(costs: Mapping[int, Mapping[str, Cost]], path: Path) -> str:
    """Draw time and memory over batch size."""
    figure, (left, right) = plt.subplots(1, 2, figsize=(9, 3.4), layout="constrained")
    for name in WAYS:
        own = [of[name] for of in costs.values()]
        line = "o--" if name == "plain gradient" else "o-"
        left.loglog(list(costs), [cost.seconds * 1e3 for cost in own], line, markersize=4, label=name)
        right.loglog(list(costs), [cost.peak / 1e6 for cost in own], line, markersize=4, label=name)
    left.set(xlabel="batch size", ylabel="processor time of a step, ms")
    right.set(xlabel="batch size", ylabel="most memory of a step, MB")
    for axes in (left, right):
        axes.set_xticks(list(costs), [str(rows) for rows in costs])
        axes.minorticks_off()
        axes.grid(alpha=0.3)
    left.legend(fontsize=8)
    figure.savefig(path, dpi=90)
    plt.close(figure)
    return str(path)


def main(argv: Sequence[str] | None = None) -> None:
    """Compare, measure, print, draw."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--eager", action="store_true", help="compile nothing with Inductor")
    parser.add_argument("--sizes", type=int, nargs="+", default=SIZES, help="batch sizes, up to 1797")
    parser.add_argument("--out", type=Path, default=Path(), help="folder of the picture")
    options = parser.parse_args(argv)
    torch.set_num_threads(1)
    if not HAS_OPACUS:
        print("Opacus is left out, for it is not installed: pip install opacus")
    for way in WAYS:
        if way not in ("plain gradient", "vmap(grad)"):
            difference = largest_difference(way, 32, compiled=not options.eager)
            print(f"largest difference from vmap(grad), float64: {way} {difference:.1e}")
    costs = {rows: measure(rows, compiled=not options.eager) for rows in options.sizes}
    print(table(costs))
    print(draw(costs, options.out / "mean_squared_gradients.png"))


if __name__ == "__main__":
    main()
