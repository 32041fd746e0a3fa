"""Train a potential on energies and forces, some of colliding atoms.

An invariant graph network gives the energy of a cluster of atoms; the forces, which the loss compares too, are minus
the gradient of it at the positions, by ``torch.autograd.grad`` in the forward. Energies and forces are those of
Lennard and Jones, whose forces grow with the 13th power of the inverse distance: one cluster in ten has a pair of atoms
so close that it outweighs all others. ``python examples/forces.py`` prints the errors on new clusters without such a
pair, for clips of the gradients of parameters, of the errors of a layer, and of those of energy and inner gradient.
"""

from __future__ import annotations

import argparse
import math
from collections.abc import Sequence

import torch
from torch import Tensor, nn

import gradrewrite as gr
from gradrewrite.passes import ClipByValue
from gradrewrite.policy.actions import Policy

ATOMS, WIDTH, ROWS, RATE, BOUND = 5, 32, 32, 3e-3, 0.005
GOOD, CLOSE, UNIT = 2000, 200, 8.0  # clusters of each kind; unit of energies and forces
SOURCE, TARGET = (~torch.eye(ATOMS, dtype=torch.bool)).nonzero(as_tuple=True)
CENTRES = torch.arange(0.5, 3.0, 0.15)
ERROR_CLIP = [gr.on("error:/grad", ClipByValue(BOUND)), gr.on("error:energy", ClipByValue(4 * BOUND))]
WAYS: dict[str, tuple[Policy, float]] = {  # the policy, and the bound of torch.nn.utils.clip_grad_norm_
    "plain": ([], math.inf),
    "parameter clip": ([], 1.0),
    "clip at a layer": (gr.on("error:layer", ClipByValue(BOUND)), math.inf),
    "error clip": (ERROR_CLIP, math.inf),
}
Data = tuple[Tensor, ...]


def clusters(count: int, closest: float, seed: int) -> Data:
    """Return positions ``[count, ATOMS, 3]``, energies and forces; the closest pair is up to 0.3 farther apart."""
    generator, kept = torch.Generator().manual_seed(seed), torch.zeros(0, ATOMS, 3)
    while len(kept) < count:
        x = 2.2 * torch.rand(4 * count, ATOMS, 3, generator=generator)
        nearest = (x[:, SOURCE] - x[:, TARGET]).norm(dim=-1).amin(1)
        kept = torch.cat([kept, x[(nearest > closest) & (nearest < closest + 0.3)]])[:count]
    kept.requires_grad_()
    inverse = 1 / (kept[:, SOURCE] - kept[:, TARGET]).square().sum(-1)
    energies = 2 * (inverse**6 - inverse**3).sum(1) / UNIT  # each pair is there twice
    return kept.detach(), energies.detach(), -torch.autograd.grad(energies.sum(), kept)[0]


class Potential(nn.Module):
    """A graph network of distances: turned, moved and renumbered atoms have the same energy."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Parameter(torch.randn(WIDTH))
        self.message = nn.Sequential(nn.Linear(2 * WIDTH + len(CENTRES), WIDTH), nn.SiLU(), nn.Linear(WIDTH, WIDTH))
        self.layer = nn.Sequential(nn.Linear(2 * WIDTH, WIDTH), nn.SiLU(), nn.Linear(WIDTH, WIDTH))
        self.head = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.SiLU(), nn.Linear(WIDTH, 1))

    def predict(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """Return energies ``[rows]`` and forces ``[rows, ATOMS, 3]``."""
        x = x.detach().requires_grad_()
        distances = (x[:, SOURCE] - x[:, TARGET]).norm(dim=-1, keepdim=True)
        edges = torch.exp(-((distances - CENTRES) / 0.15).square())
        h = self.embed.expand(len(x), ATOMS, WIDTH)
        for _ in range(2):
            messages = nn.functional.silu(self.message(torch.cat([h[:, SOURCE], h[:, TARGET], edges], -1)))
            h = h + self.layer(torch.cat([h, messages.unflatten(1, (ATOMS, ATOMS - 1)).sum(2)], -1))
        energies = gr.tap(self.head(h).sum((1, 2)), "energy")
        (gradient,) = torch.autograd.grad(energies.sum(), x, create_graph=True)
        return energies, -gradient

    def forward(self, x: Tensor, energies: Tensor, forces: Tensor) -> Tensor:
        """Return the mean squares of both differences, added."""
        own_energies, own_forces = self.predict(x)
        return (own_energies - energies).square().mean() + (own_forces - forces).square().mean()


def train(model: nn.Module, bound: float, data: Data, steps: int, seed: int) -> None:
    """Train with Adam, at a rate that falls to 0."""
    parameters, generator = list(model.parameters()), torch.Generator().manual_seed(seed)
    optimizer = torch.optim.Adam(parameters, lr=RATE)
    schedule = torch.optim.lr_scheduler.LinearLR(optimizer, 1.0, 0.0, steps)
    for _ in range(steps):
        rows = torch.randint(len(data[0]), (ROWS,), generator=generator)
        optimizer.zero_grad()
        model(*(one[rows] for one in data)).backward()
        nn.utils.clip_grad_norm_(parameters, bound)
        optimizer.step()
        schedule.step()


def main(argv: Sequence[str] | None = None) -> None:
    """Train in each way, and print the errors on new clusters."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--steps", type=int, default=300, help="updates of each training")
    parser.add_argument("--seeds", type=int, default=1)
    options = parser.parse_args(argv)
    good, close, new = clusters(GOOD, 1.0, 0), clusters(CLOSE, 0.7, 1), clusters(500, 1.0, 2)
    both = tuple(torch.cat(pair) for pair in zip(good, close, strict=True))
    print(f"largest force: {good[2].abs().max():.1f}, with the close pairs {close[2].abs().max():.0f}")
    print(f"mean force to learn: {new[2].abs().mean():.3f}")
    for name, (policy, bound) in {**WAYS, "plain, no close pair": WAYS["plain"]}.items():
        net = Potential()
        model = gr.transform(net, policy).compile()
        found = []
        for seed in range(options.seeds):
            torch.manual_seed(seed)
            net.load_state_dict(Potential().state_dict())
            train(model, bound, good if name.endswith("no close pair") else both, options.steps, seed)
            found.append((net.predict(new[0])[1] - new[2]).abs().mean().item())
        print(f"{name:20} mean error of a force {', '.join(f'{error:.3f}' for error in found)}")


if __name__ == "__main__":
    main()
