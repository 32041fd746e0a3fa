"""The cost of weighing several losses in one compiled backward, beside other ways, in one interleaved run.

    python tests/benchmarks/losses_cost.py [--rounds 12] [--models GPT ConvNet] [--losses 2 3 4] [--out FILE.json]

A GPT and a convolutional net have K heads with a loss each. On one thread, in turns that are drawn by chance, in
processor seconds of the process: ``plain`` differentiates the sum of the losses, compiled by ``torch.compile``;
``gradients`` weighs the losses by PCGrad at the gradients of the trunk, ``features`` at the error of its output, both
in one compiled backward; ``torchjd`` is TorchJD's eager PCGrad; ``backwards`` calls a compiled backward for each loss
(with torch's buffer donation off, for it forbids a second one) and weighs by TorchJD's PCGrad. The share of the
backward is measured in the plain steps. Peak memory is that of a later step, over what was there before it. The
compilation is that of the first step, in processes with caches of their own.
"""

from __future__ import annotations

import argparse
import copy
import itertools
import json
import os
import platform
import random
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.nn import functional

sys.path.insert(0, str(Path(__file__).parent.parent))

import gradrewrite as gr
from gradrewrite.passes import PCGrad, WeighLosses

from benchmarks.measuring import allocations, largest_sum
from models.gpt import Gpt

VOCABULARY = 1024
WAYS = ("plain", "gradients", "features", "torchjd", "backwards")
POLICIES: dict[str, gr.Policy] = {
    "gradients": gr.on("gradient:trunk.*", WeighLosses(PCGrad())),
    "features": gr.on("error:trunk", WeighLosses(PCGrad())),
}


class GptTrunk(Gpt):
    """The blocks of a GPT, without its head."""

    def __init__(self) -> None:
        super().__init__(4, width=256, vocabulary=VOCABULARY, context=128)
        del self.head

    def forward(self, tokens: Tensor) -> Tensor:  # type: ignore[override]
        x = self.embed(tokens) + self.position(torch.arange(tokens.shape[1], device=tokens.device))
        for block in self.blocks:
            x = block(x)
        return self.norm(x)


def convolutions(*widths: int) -> nn.Sequential:
    """Convolutions with BatchNorm; the second one halves the image."""
    layers: list[nn.Module] = []
    for n, (a, b) in enumerate(itertools.pairwise(widths)):
        layers += [nn.Conv2d(a, b, 3, stride=2 if n == 1 else 1, padding=1, bias=False), nn.BatchNorm2d(b), nn.ReLU()]
    return nn.Sequential(*layers)


class Heads(nn.Module):
    """A trunk, and heads that classify its features at each position, each with a loss of its own."""

    def __init__(self, trunk: nn.Module, heads: Sequence[nn.Module]) -> None:
        super().__init__()
        self.trunk, self.heads = trunk, nn.ModuleList(heads)

    def forward(self, x: Tensor, targets: Tensor) -> tuple[Tensor, ...]:
        features = self.trunk(x)
        return tuple(loss_of(head(features), own) for head, own in zip(self.heads, targets, strict=True))


def loss_of(scores: Tensor, targets: Tensor) -> Tensor:
    """Return the cross entropy; classes are the dimension behind the batch, of tokens the last one."""
    if scores.dim() == 3:
        return functional.cross_entropy(scores.flatten(0, 1), targets.flatten())
    return functional.cross_entropy(scores, targets)


def make(model: str, number: int) -> tuple[nn.Module, tuple[Tensor, Tensor]]:
    """Return a model with ``number`` losses, and its inputs.

    The GPT predicts the next ``number`` tokens of 1,024; the convolutional net has dense tasks with two convolutions
    each. ``"GPT, small heads"`` and ``"ConvNet, small heads"`` have almost nothing behind the trunk.
    """
    torch.manual_seed(0)
    is_small = model.endswith("small heads")
    if model.startswith("GPT"):
        classes = 16 if is_small else VOCABULARY
        heads: list[nn.Module] = [nn.Linear(256, classes) for _ in range(number)]
        return Heads(GptTrunk(), heads), (
            torch.randint(VOCABULARY, (8, 128)),
            torch.randint(classes, (number, 8, 128)),
        )
    dense = [nn.Conv2d(64, 4, 1) if is_small else dense_head() for _ in range(number)]
    return Heads(convolutions(3, 32, 64, 64, 64, 64, 64), dense), (
        torch.randn(16, 3, 32, 32),
        torch.randint(4, (number, 16, 16, 16)),
    )


def dense_head() -> nn.Module:
    """Return the head of a dense task: a convolution half as wide as the trunk, and one to the classes."""
    return nn.Sequential(nn.Conv2d(64, 32, 3, padding=1), nn.ReLU(), nn.Conv2d(32, 4, 1))


@dataclass(frozen=True)
class Costs:
    """The figures of one model with one number of losses.

    Attributes:
        model: Its name.
        losses: The number of losses.
        seconds: Processor seconds of each step, by way.
        backward: Processor seconds of each backward of the plain steps.
        peaks: Bytes that a later step has at most, over those before it, by way.
        compilation: Processor seconds of the first step, by way, with cold caches.
    """

    model: str
    losses: int
    seconds: dict[str, list[float]]
    backward: list[float]
    peaks: dict[str, int]
    compilation: dict[str, float]

    @property
    def share(self) -> float:
        """Share of the backward in a plain step."""
        return statistics.median(b / s for b, s in zip(self.backward, self.seconds["plain"], strict=True))

    def ratio(self, way: str) -> float:
        """Median ratio of the steps of a way to the plain ones of the same round."""
        pairs = zip(self.seconds[way], self.seconds["plain"], strict=True)
        return statistics.median(own / plain for own, plain in pairs)

    @property
    def bound(self) -> float:
        """The bound of ``ratio("gradients")``."""
        return 1 + 0.95 * (self.losses - 1) * self.share


def line(costs: Costs) -> str:
    """Return the row of the page: ratios to plain steps, peaks in MB, compilation over plain."""
    ratios = [f"{costs.ratio(way):.3f}" for way in WAYS[1:]]
    peaks = [f"{costs.peaks[way] / 1e6:.0f}" for way in WAYS]
    compilation = [f"{costs.compilation[way] / costs.compilation['plain']:.2f}" for way in POLICIES]
    cells = [costs.model, str(costs.losses), f"{costs.share:.3f}", f"{costs.bound:.3f}", *ratios]
    return f"| {' | '.join([*cells, ' / '.join(peaks), ' / '.join(compilation)])} |"


def step_of(way: str, model: nn.Module, inputs: tuple[Tensor, Tensor], backward: list[float]) -> Callable[[], None]:
    """Return a training step of a way, without an optimizer; plain ones note the seconds of the backward."""
    from torchjd.aggregation import PCGrad as Aggregator
    from torchjd.aggregation import PCGradWeighting
    from torchjd.autojac import jac_to_grad, mtl_backward

    if way in POLICIES:
        model = gr.transform(model, POLICIES[way])
    if way != "torchjd":
        model.compile()
    trunk, heads = list(model.trunk.parameters()), list(model.heads.parameters())

    def summed() -> None:
        loss = torch.stack(model(*inputs)).sum()
        begin = time.process_time()
        loss.backward()
        backward.append(time.process_time() - begin)

    def torchjd() -> None:
        features = model.trunk(inputs[0])
        losses = [loss_of(head(features), own) for head, own in zip(model.heads, inputs[1], strict=True)]
        mtl_backward(losses, features=features)
        jac_to_grad(trunk, Aggregator())

    def backwards() -> None:
        losses = model(*inputs)
        every = [*trunk, *heads]
        found = [torch.autograd.grad(x, every, retain_graph=x is not losses[-1], allow_unused=True) for x in losses]
        rows = torch.stack([torch.cat([g.flatten() for g in own[: len(trunk)] if g is not None]) for own in found])
        weights = PCGradWeighting()(rows @ rows.T)
        for n, parameter in enumerate(every):
            own = [row[n] for row in found]
            terms = [g * w if n < len(trunk) else g for g, w in zip(own, weights, strict=True) if g is not None]
            parameter.grad = torch.stack(terms).sum(0)

    run = {"torchjd": torchjd, "backwards": backwards}.get(way, summed)

    def step() -> None:
        run()
        model.zero_grad()

    return step


def measure(name: str, number: int, rounds: int) -> Costs:
    """Time the ways in turn."""
    model, inputs = make(name, number)
    notes: dict[str, list[float]] = {way: [] for way in WAYS}
    steps = {way: step_of(way, copy.deepcopy(model), inputs, notes[way]) for way in WAYS}
    for step in steps.values():
        step()
        step()
    notes["plain"].clear()
    seconds: dict[str, list[float]] = {way: [] for way in WAYS}
    for _ in range(rounds):
        for way in random.sample(WAYS, len(WAYS)):
            begin = time.process_time()
            steps[way]()
            seconds[way].append(time.process_time() - begin)
    backward = list(notes["plain"])
    peaks = {way: largest_sum(allocations(step)) for way, step in steps.items()}
    compilation = {way: compile_cold(name, number, way) for way in ("plain", *POLICIES)}
    return Costs(name, number, seconds, backward, peaks, compilation)


def compile_cold(name: str, number: int, way: str) -> float:
    """Return the processor seconds of the first step of a way, children included, in a process with empty caches."""
    with tempfile.TemporaryDirectory() as folder:
        call = [sys.executable, __file__, "--first", name, str(number), way]
        environment = {**os.environ, "TORCHINDUCTOR_CACHE_DIR": folder}
        return float(subprocess.run(call, env=environment, capture_output=True, text=True, check=True).stdout)


def time_first(name: str, number: int, way: str) -> float:
    """Return the processor seconds of the first step in this process and its children."""
    model, inputs = make(name, number)
    warm = torch.compile(lambda x: (x * 2).sum(), dynamic=False)
    warm(torch.ones(3, requires_grad=True)).backward()  # what a process compiles once
    step = step_of(way, model, inputs, [])
    begin = os.times()
    step()
    end = os.times()
    return sum(end[:4]) - sum(begin[:4])


def main() -> None:
    """Measure and report."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=12)
    parser.add_argument("--models", nargs="+", default=["GPT", "ConvNet"])
    parser.add_argument("--losses", nargs="+", type=int, default=[2, 3, 4])
    parser.add_argument("--first", nargs=3)
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    torch.set_num_threads(1)
    torch._functorch.config.donated_buffer = False
    random.seed(0)
    if options.first:
        name, number, way = options.first
        print(time_first(name, int(number), way))
        return
    found = []
    for name in options.models:
        for number in options.losses:
            costs = measure(name, number, options.rounds)
            found.append(costs)
            ratios = ", ".join(f"{way} {costs.ratio(way):.3f}" for way in WAYS[1:])
            print(
                f"{name}, {number} losses: share {costs.share:.3f}, bound {costs.bound:.3f}, {ratios}", file=sys.stderr
            )
            print("  peak MB", {w: round(p / 1e6, 1) for w, p in costs.peaks.items()}, file=sys.stderr)
            print("  compilation", {w: round(s, 1) for w, s in costs.compilation.items()}, file=sys.stderr)
    machine = {"python": platform.python_version(), "torch": torch.__version__, "threads": 1}
    if options.out is not None:
        options.out.write_text(json.dumps({"machine": machine, "costs": [asdict(one) for one in found]}, indent=1))


if __name__ == "__main__":
    main()
