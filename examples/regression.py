"""Fit y = x + 3 with a first weight that is too large: plain SGD diverges, with clipped gradients it converges.

The network is that of PaddlePaddle's gradient-clip guide. ``python examples/regression.py --steps 1000`` prints both
losses and writes the ladder of the rewritten graph to ``regression.svg``.
"""

from __future__ import annotations

import argparse
import copy
from collections.abc import Sequence
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.nn import functional

import gradrewrite as gr
from gradrewrite import viz
from gradrewrite.passes import ClipByNorm

ROWS = 16
POLICY = gr.on("gradient:*", ClipByNorm(1.0))


class Regression(nn.Module):
    """A network of three linear layers, 1-32-32-1, without activations."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(1, 32), nn.Linear(32, 32), nn.Linear(32, 1))

    def reset(self) -> None:
        """Initialize the parameters from the current seed; the first weight is too large."""
        linears = [layer for layer in self.layers if isinstance(layer, nn.Linear)]
        for layer in linears:
            layer.reset_parameters()
        with torch.no_grad():
            linears[0].weight += 2

    def forward(self, x: Tensor) -> Tensor:
        """Return the mean squared error of ``y = x + 3``; ``x`` is ``[rows, 1]``."""
        return functional.mse_loss(self.layers(x), x + 3)


def train(net: Regression, model: nn.Module, *, seed: int, steps: int) -> list[float]:
    """Initialize ``net`` and train ``model``, which is ``net`` or its rewritten form; return the losses."""
    torch.manual_seed(seed)
    net.reset()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    losses = []
    for _ in range(steps):
        loss = model(5 * torch.rand(ROWS, 1))
        optimizer.zero_grad()
        loss.backward()
        if isinstance(model, gr.RewrittenModule):
            model.monitor.log("loss", loss)
        optimizer.step()
        losses.append(loss.item())
    return losses


def main(argv: Sequence[str] | None = None) -> None:
    """Train without and with the policy, print the losses, draw the rewritten graph."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--steps", type=int, default=1000)
    parser.add_argument("--out", type=Path, default=Path(), help="folder of the drawing")
    options = parser.parse_args(argv)
    net = Regression()
    clipped = copy.deepcopy(net)
    model = gr.transform(clipped, POLICY)
    model.compile()
    plain_losses = train(net, net, seed=0, steps=min(options.steps, 10))
    losses = train(clipped, model, seed=0, steps=options.steps)
    print(f"plain:   {plain_losses[0]:.4g} -> {plain_losses[-1]:.4g} after {len(plain_losses)} steps")
    print(f"clipped: {losses[0]:.4g} -> {losses[-1]:.4g} after {len(losses)} steps")
    graph = model.trace(torch.ones(ROWS, 1))
    print(viz.draw(graph, monitor=model.monitor, title="y = x + 3").render(options.out / "regression"))


if __name__ == "__main__":
    main()
