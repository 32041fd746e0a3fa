"""Read and draw digits with one small trunk and two losses.

The plain sum serves the larger loss. Six features of an image of a digit are to tell the digit (cross entropy) and to
draw the image again (squared error of grey levels from 0 to 16, a thousand times as large).
``python examples/multi_task.py`` trains with the plain sum, with the first loss enlarged by hand, and with
``WeighLosses``, from the same starts on the same batches, and draws what each reaches on images that were left out.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import matplotlib.pyplot as plt
import torch
from sklearn.datasets import load_digits
from torch import Tensor, nn
from torch.nn import functional

import gradrewrite as gr
from gradrewrite import viz
from gradrewrite.passes import MGDA, AlignedMTL, CAGrad, Observe, UPGrad, WeighLosses

ROWS, TRAINED, FEATURES, GREYS = 64, 1200, 6, 16
FACTORS = (10, 100, 300, 1000)  # of the first loss, by hand
TRUNK = "gradient:trunk.*"
POLICIES: dict[str, Any] = {
    "plain sum": gr.on(TRUNK, Observe("loss_norms", "loss_cosine")),
    "UPGrad": gr.on(TRUNK, WeighLosses(UPGrad())),
    "UPGrad, reg_eps=1e-4": gr.on(TRUNK, WeighLosses(UPGrad(reg_eps=1e-4))),  # as TorchJD has it
    "CAGrad": gr.on(TRUNK, WeighLosses(CAGrad(c=0.5))),
    "AlignedMTL": gr.on(TRUNK, WeighLosses(AlignedMTL())),
    "MGDA": gr.on(TRUNK, WeighLosses(MGDA())),
    "MGDA at the features": gr.on("error:trunk", WeighLosses(MGDA())),
}


class ReadAndDraw(nn.Module):
    """A reader and a drawer of digits, behind a few features."""

    def __init__(self) -> None:
        super().__init__()
        self.trunk = nn.Sequential(nn.Linear(64, 32), nn.ReLU(), nn.Linear(32, FEATURES), nn.Tanh())
        self.read, self.draw = nn.Linear(FEATURES, 10), nn.Linear(FEATURES, 64)

    def forward(self, images: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
        """Return both losses of images ``[rows, 64]``, in [0, 1], and labels ``[rows]``."""
        features = self.trunk(images)
        errors = GREYS * (self.draw(features) - images)
        return functional.cross_entropy(self.read(features), labels), errors.square().sum(1).mean()

    @torch.no_grad()
    def score(self, images: Tensor, labels: Tensor) -> tuple[float, float]:
        """Return the share of digits that are read, and the mean squared error of a grey level."""
        features = self.trunk(images)
        errors = GREYS * (self.draw(features) - images)
        return (self.read(features).argmax(1) == labels).float().mean().item(), errors.square().mean().item()


@dataclass(frozen=True)
class Way:
    """The scores of a way of training, by seed."""

    name: str
    read: list[float]  # shares of digits
    drawn: list[float]  # squared errors of a grey level

    def __str__(self) -> str:
        read, drawn = (sum(values) / len(values) for values in (self.read, self.drawn))
        span = f"{min(self.read):.3f} to {max(self.read):.3f}"
        return f"{self.name:22} reads {read:.3f} ({span}), draws with a squared error of {drawn:5.2f}"


def train(policy: Any, seed: int, steps: int, factor: float = 1.0) -> tuple[gr.RewrittenModule, tuple[float, float]]:
    """Train from the start of a seed; return the model and its scores on the images that were left out."""
    torch.manual_seed(seed)
    found = load_digits()
    images, labels = torch.tensor(found.data, dtype=torch.float32) / GREYS, torch.tensor(found.target)
    order = torch.randperm(len(labels))
    net = ReadAndDraw()
    model = gr.transform(net, policy)
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    for _ in range(steps):
        batch = order[torch.randint(TRAINED, (ROWS,))]
        optimizer.zero_grad()
        reading, drawing = model(images[batch], labels[batch])
        loss = factor * reading + drawing
        loss.backward()
        if policy:
            model.monitor.log("loss", loss)
        optimizer.step()
    rest = order[TRAINED:]
    return model, net.score(images[rest], labels[rest])


def of_seeds(name: str, policy: Any, steps: int, seeds: int, factor: float = 1.0) -> Way:
    """Train with each seed, and print the scores."""
    read, drawn = zip(*(train(policy, seed, steps, factor)[1] for seed in range(seeds)), strict=True)
    way = Way(name, list(read), list(drawn))
    print(way)
    return way


def draw(ways: Sequence[Way], scaled: Sequence[Way], path: Path) -> str:
    """Draw both scores of each way and seed, and the line of the sums that were scaled by hand."""
    figure, axis = plt.subplots(figsize=(7, 4.5), layout="constrained")
    line = [(sum(way.drawn) / len(way.drawn), sum(way.read) / len(way.read)) for way in (ways[0], *scaled)]
    axis.plot(*zip(*line, strict=True), "o-", color="0.7", label="sum, first loss enlarged by hand")
    for number, way in enumerate(ways):
        axis.scatter(way.drawn, way.read, s=22, color=f"C{number}", label=way.name, zorder=2)
    axis.set(xlabel="squared error of a drawn grey level", ylabel="share of digits read")
    axis.legend(frameon=False)
    figure.savefig(path, dpi=100)
    plt.close(figure)
    return str(path)


def main(argv: Sequence[str] | None = None) -> None:
    """Train in each way with each seed, print, draw."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--steps", type=int, default=400)
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument("--out", type=Path, default=Path(), help="folder of the picture")
    options = parser.parse_args(argv)
    torch.set_num_threads(1)  # the tensors are small
    steps, seeds = options.steps, options.seeds
    model, _ = train(POLICIES["plain sum"], 0, steps)
    print(*(text for text in viz.report(model.monitor).health.verdict.remarks if "loss" in text.lower()), sep="\n")
    ways = [of_seeds(name, policy, steps, seeds) for name, policy in POLICIES.items()]
    scaled = [of_seeds(f"sum, first loss x {factor}", [], steps, seeds, factor) for factor in FACTORS]
    print(draw(ways, scaled, options.out / "multi_task.png"))


if __name__ == "__main__":
    main()
