"""Train a network with weights of 2 bits: rounding has no derivative, a straight-through rule gives it one.

The weights of a classifier of scikit-learn's digits are rounded to -1, 0 or 1 times a scale in each forward. torch's
derivative of ``round`` is 0, so nothing learns. ``gr.on("backward:*/round", lambda op: op.error)`` hands the error on;
the model stays as it is. ``python examples/quantize_aware.py`` prints the accuracy of three trainings on new digits:
as it is, with the rule, and with real weights that are rounded afterwards.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence

import torch
from torch import Tensor, nn
from torch.nn import functional as F

import gradrewrite as gr
from gradrewrite.policy.actions import Policy

TRAINED = 1400  # of 1797 digits
STRAIGHT_THROUGH = gr.on("backward:*/round", lambda op: op.error)


class Rounded(nn.Linear):
    """A linear layer with weights of -1, 0 or 1 times a scale."""

    is_rounded = True

    def forward(self, x: Tensor) -> Tensor:
        """Return ``[B, out_features]``."""
        if not self.is_rounded:
            return super().forward(x)
        scale = self.weight.detach().abs().mean()
        return F.linear(x, torch.round(self.weight / scale).clamp(-1, 1) * scale, self.bias)


def classifier(*, is_rounded: bool) -> nn.Sequential:
    """Return a network of two layers for images ``[B, 64]``."""
    torch.manual_seed(0)
    model = nn.Sequential(Rounded(64, 64), nn.ReLU(), Rounded(64, 10))
    round_weights(model, is_rounded=is_rounded)
    return model


def round_weights(model: nn.Module, *, is_rounded: bool) -> None:
    """Let the layers round their weights, or not."""
    for layer in model.modules():
        if isinstance(layer, Rounded):
            layer.is_rounded = is_rounded


def digits() -> tuple[Tensor, Tensor]:
    """Return scikit-learn's digits, ``[1797, 64]`` from 0 to 1, and their labels, in a random order."""
    from sklearn.datasets import load_digits

    data = load_digits()
    order = torch.randperm(len(data.target), generator=torch.Generator().manual_seed(0))
    return torch.tensor(data.data, dtype=torch.float32)[order] / 16, torch.tensor(data.target)[order]


def train(model: nn.Module, policy: Policy, steps: int) -> float:
    """Train a model; return the last loss."""
    run = gr.transform(model, policy).compile()
    optimizer = torch.optim.Adam(model.parameters(), lr=3e-3)
    images, labels = digits()
    loss = torch.tensor(float("nan"))
    for step in range(steps):
        rows = torch.randint(0, TRAINED, (64,), generator=torch.Generator().manual_seed(step))
        optimizer.zero_grad()
        loss = F.cross_entropy(run(images[rows]), labels[rows])
        loss.backward()
        optimizer.step()
    return loss.item()


def accuracy(model: nn.Module) -> float:
    """Return the share of right answers to new digits, with rounded weights."""
    round_weights(model, is_rounded=True)
    images, labels = digits()
    with torch.no_grad():
        is_right = model(images[TRAINED:]).argmax(-1) == labels[TRAINED:]
    return float(is_right.float().mean())


def main(argv: Sequence[str] | None = None) -> None:
    """Run from the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=500, help="updates of each training")
    args = parser.parse_args(argv)
    for name, is_rounded, policy in (
        ("rounded, as it is", True, []),
        ("rounded, straight through", True, STRAIGHT_THROUGH),
        ("real, rounded afterwards", False, []),
    ):
        model = classifier(is_rounded=is_rounded)
        loss = train(model, policy, args.steps)
        print(f"{name:26} loss {loss:.3f}, {accuracy(model):.1%} of new digits")


if __name__ == "__main__":
    main()
