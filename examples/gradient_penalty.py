"""Train a critic with a gradient penalty (WGAN-GP), and find the NaN that the norm makes at a gradient of 0.

A generator learns eight Gaussians on a circle. The critic's forward computes its gradient at points between true and
made ones, by ``torch.autograd.grad``, and asks for a norm of 1. The critic's last weights begin at 0, so that this
gradient is exactly 0, where the root of a sum of squares has an infinite derivative.
``python examples/gradient_penalty.py`` prints for four programs what a finite check says, and the distance between true
and made points as the critic sees it, while the generator learns.
"""

from __future__ import annotations

import argparse
import math
from collections.abc import Callable, Sequence

import torch
from torch import Tensor, nn

import gradrewrite as gr
from gradrewrite.passes import CheckFinite, NanToNum
from gradrewrite.policy.actions import Policy

ROWS, WIDTH, WEIGHT, CRITIC_STEPS = 128, 64, 1.0, 5
CHECK = gr.on("gradient:*", CheckFinite())


def root(gradient: Tensor) -> Tensor:
    """As in many programs."""
    return gradient.square().sum(1).sqrt()  # planted: the backward is 0 * infinity at 0


def root_with_epsilon(gradient: Tensor) -> Tensor:
    """The usual cure: finite at 0."""
    return torch.sqrt(gradient.square().sum(1) + 1e-12)


def norm(gradient: Tensor) -> Tensor:
    """PyTorch's own norm; its backward is 0 at 0."""
    lengths: Tensor = gradient.norm(dim=1)
    return lengths


PROGRAMS: dict[str, tuple[Callable[[Tensor], Tensor], Policy]] = {
    "root": (root, [CHECK]),
    "root, NaN to 0 at error:/grad": (root, [gr.on("error:/grad", NanToNum()), CHECK]),
    "root with epsilon": (root_with_epsilon, [CHECK]),
    "norm": (norm, [CHECK]),
}


def network(width: int) -> nn.Sequential:
    """Return a network from points to ``[rows, width]``."""
    layers = nn.Linear(2, WIDTH), nn.ReLU(), nn.Linear(WIDTH, WIDTH), nn.ReLU(), nn.Linear(WIDTH, width)
    return nn.Sequential(*layers)


class Critic(nn.Module):
    """Tells true points from others, at a slope of about 1."""

    def __init__(self, length: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.length, self.net = length, network(1)
        for parameter in self.net[-1].parameters():
            nn.init.zeros_(parameter)

    def distance(self, true: Tensor, made: Tensor) -> Tensor:
        """Return the mean distance of the points."""
        distance: Tensor = self.net(true).mean() - self.net(made).mean()
        return distance

    def forward(self, true: Tensor, made: Tensor, shares: Tensor) -> Tensor:
        """Return the loss of points ``[rows, 2]``, mixed by shares ``[rows, 1]``."""
        mixed = torch.lerp(true, made, shares).requires_grad_()
        (gradient,) = torch.autograd.grad(self.net(mixed).sum(), mixed, create_graph=True)
        return WEIGHT * (self.length(gradient) - 1).square().mean() - self.distance(true, made)


def gaussians(rows: int) -> Tensor:
    """Return points ``[rows, 2]`` around eight centres on a circle of radius 2."""
    angles = torch.randint(8, (rows,)) * (math.pi / 4)
    return 2 * torch.stack([angles.cos(), angles.sin()], 1) + 0.1 * torch.randn(rows, 2)


def train(length: Callable[[Tensor], Tensor], policy: Policy, steps: int, seed: int) -> list[float]:
    """Train both networks; return the distance behind each update of the generator."""
    torch.manual_seed(seed)
    critic, generator = Critic(length), network(2)
    model, distances = gr.transform(critic, policy).compile(), []
    rates = [torch.optim.Adam(one.parameters(), lr=2e-3, betas=(0.5, 0.9)) for one in (critic, generator)]
    for _ in range(steps):
        for _ in range(CRITIC_STEPS):
            with torch.no_grad():
                made = generator(torch.randn(ROWS, 2))
            rates[0].zero_grad()
            model(gaussians(ROWS), made, torch.rand(ROWS, 1)).backward()
            rates[0].step()
        rates[1].zero_grad()
        made = generator(torch.randn(ROWS, 2))
        distance = critic.distance(gaussians(ROWS), made)
        made.backward(torch.autograd.grad(distance, made))
        rates[1].step()
        distances.append(distance.item())
    return distances


def main(argv: Sequence[str] | None = None) -> None:
    """Train each program; print the check's error, or the distances."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--steps", type=int, default=200, help="updates of the generator")
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args(argv)
    for name, (length, policy) in PROGRAMS.items():
        try:
            distances = torch.tensor(train(length, policy, options.steps, options.seed))
        except gr.NonFiniteError as error:
            print(f"{name}: {error}")
        else:
            means = [f"{part.mean():.3f}" for part in distances.tensor_split(min(5, len(distances)))]
            print(f"{name}: distance {' -> '.join(means)}")


if __name__ == "__main__":
    main()
