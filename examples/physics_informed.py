"""Train a network to solve the equation of Burgers.

The network is the solution ``u(x, t)`` of ``u_t + u u_x = v u_xx`` from ``-sin(pi x)``, which becomes steep in the
middle. Its derivatives are those of ``torch.autograd.grad`` in the forward, the second one a gradient of a gradient.
``python examples/physics_informed.py`` prints the relative error to the solution of Cole and Hopf: for the plain sum of
both losses, clips, and weights of the losses from their gradients, found in one backward.
"""

from __future__ import annotations

import argparse
import math
from collections.abc import Sequence

import torch
from torch import Tensor, nn

import gradrewrite as gr
from gradrewrite.passes import AlignedMTL, ClipByGlobalNorm, ClipByValue, UPGrad, WeighLosses
from gradrewrite.policy.actions import Policy

VISCOSITY, POINTS, EDGE, WIDTH, RATE = 0.02 / math.pi, 256, 64, 32, 0.01
WAYS: dict[str, tuple[Policy, float]] = {  # the policy, and a factor of the conditions' loss
    "plain": ([], 1.0),
    "parameter clip": (gr.on("gradient:*", ClipByGlobalNorm(0.1)), 1.0),
    "residual clip": (gr.on("error:residual", ClipByValue(0.3 / POINTS)), 1.0),
    "UPGrad": (gr.on("gradient:*", WeighLosses(UPGrad())), 1.0),
    "AlignedMTL": (gr.on("gradient:*", WeighLosses(AlignedMTL())), 1.0),
    "conditions x 3": ([], 3.0),
    "conditions x 10": ([], 10.0),
}


class Burgers(nn.Module):
    """The solution as a network; its forward returns two losses."""

    def __init__(self) -> None:
        super().__init__()
        hidden = nn.Linear(2, WIDTH), nn.Tanh(), nn.Linear(WIDTH, WIDTH), nn.Tanh(), nn.Linear(WIDTH, WIDTH), nn.Tanh()
        self.net = nn.Sequential(*hidden, nn.Linear(WIDTH, 1))

    def solution(self, x: Tensor, t: Tensor) -> Tensor:
        """Return ``u`` at points ``[rows]``."""
        u: Tensor = self.net(torch.stack([x, t], 1)).squeeze(1)
        return u

    def forward(self, x: Tensor, t: Tensor, edge: Tensor) -> tuple[Tensor, Tensor]:
        """Return the losses of the equation, and of the initial and boundary values; ``edge`` is from -1 to 1."""
        x, t = x.detach().requires_grad_(), t.detach().requires_grad_()
        u = self.solution(x, t)
        u_x, u_t = torch.autograd.grad(u.sum(), (x, t), create_graph=True)
        (u_xx,) = torch.autograd.grad(u_x.sum(), x, create_graph=True)
        residual = gr.tap(u_t + u * u_x - VISCOSITY * u_xx, "residual")
        initial = self.solution(edge, torch.zeros_like(edge)) + torch.sin(math.pi * edge)
        boundary = self.solution(edge.sign(), edge.abs())
        return residual.square().mean(), initial.square().mean() + boundary.square().mean()


def exact(x: Tensor, t: Tensor) -> Tensor:
    """Return ``u`` at points ``[rows]`` with ``t > 0``, as a quotient of integrals, by the trapezoidal rule."""
    z = torch.linspace(-10, 10, 801, dtype=torch.float64)
    y = math.pi * (x.double()[:, None] - z * (4 * VISCOSITY * t.double()[:, None]).sqrt())
    weights = torch.exp(-(z**2) - torch.cos(y) / (2 * math.pi * VISCOSITY))
    return (-(torch.sin(y) * weights).sum(1) / weights.sum(1)).to(x.dtype)


def train(policy: Policy, factor: float, steps: int, seed: int) -> float:
    """Train with Adam, at a rate that falls to 0; return the relative error, of the 2-norm, at a grid of points."""
    torch.manual_seed(seed)
    network = Burgers()
    model = gr.transform(network, policy).compile()
    optimizer = torch.optim.Adam(network.parameters(), lr=RATE)
    schedule = torch.optim.lr_scheduler.LinearLR(optimizer, 1.0, 0.0, steps)
    for _ in range(steps):
        optimizer.zero_grad()
        equation, conditions = model(2 * torch.rand(POINTS) - 1, torch.rand(POINTS), 2 * torch.rand(EDGE) - 1)
        (equation + factor * conditions).backward()
        optimizer.step()
        schedule.step()
    x, t = torch.cartesian_prod(torch.linspace(-1, 1, 201), torch.linspace(0.025, 1, 40)).unbind(1)
    wanted = exact(x, t)
    with torch.no_grad():
        return float((network.solution(x, t) - wanted).norm() / wanted.norm())


def main(argv: Sequence[str] | None = None) -> None:
    """Train in each way, and print the errors."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--steps", type=int, default=1200, help="updates of each training")
    parser.add_argument("--seeds", type=int, default=1)
    options = parser.parse_args(argv)
    for name, (policy, factor) in WAYS.items():
        errors = [train(policy, factor, options.steps, seed) for seed in range(options.seeds)]
        print(f"{name:16} relative error {', '.join(f'{error:.3f}' for error in errors)}")


if __name__ == "__main__":
    main()
