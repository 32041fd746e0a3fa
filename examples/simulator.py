"""Train a learned simulator over 100 of its own steps, plain and clipped.

A network learns the swings of pendulums. It is given the first state alone, and the loss compares the 100 states that
it makes, one from the other, with the true ones. Its weights begin too large, so that errors grow on their way back
through the steps. The Python loop over the steps is rolled (``loops="rolled"``), so that one step is compiled, not 100.
``python examples/simulator.py`` prints losses; ``--unrolled`` prints what compilation takes with the loop rolled and
unrolled, which takes minutes; ``--out FOLDER`` writes for each training a map of the errors by step and update.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Literal

import torch
from torch import Tensor, nn

import gradrewrite as gr
from gradrewrite import viz
from gradrewrite.passes import ClipByGlobalNorm, ClipByNorm, Observe
from gradrewrite.policy.actions import Policy

ROWS, WIDTH, RATE, SCALE = 32, 64, 3e-3, 6.0
TIME, FINER = 0.1, 10  # of a step, in units of the root of length over gravity; true steps in it
SITE = "error:state"
POLICIES: dict[str, Policy] = {
    "plain": [gr.on(SITE, Observe("norm"))],
    "gradient clip": [gr.on(SITE, Observe("norm")), gr.on("gradient:*", ClipByGlobalNorm(1.0))],
    "error clip": [gr.on(SITE, ClipByNorm(0.01))],
}


def pendulums(count: int, length: int, seed: int) -> Tensor:
    """Return angles and velocities ``[count, length + 1, 2]``, by the method of Runge and Kutta."""

    def change(state: Tensor) -> Tensor:
        return torch.stack([state[:, 1], -torch.sin(state[:, 0])], -1)

    generator, small = torch.Generator().manual_seed(seed), TIME / FINER
    state = (torch.rand(count, 2, generator=generator) * 2 - 1) * torch.tensor([2.0, 1.0])
    states = [state]
    for n in range(length * FINER):
        k1 = change(state)
        k2 = change(state + small / 2 * k1)
        k3 = change(state + small / 2 * k2)
        k4 = change(state + small * k3)
        state = state + small / 6 * (k1 + 2 * k2 + 2 * k3 + k4)
        if n % FINER == FINER - 1:
            states.append(state)
    return torch.stack(states, 1)


class Simulator(nn.Module):
    """Makes each state from the one before; angles and velocities stay within 3."""

    def __init__(self) -> None:
        super().__init__()
        layers = nn.Linear(2, WIDTH), nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, 2)
        with torch.no_grad():
            for layer in layers:
                layer.weight.mul_(SCALE)
        self.change = nn.Sequential(layers[0], nn.Tanh(), layers[1], nn.Tanh(), layers[2])

    def forward(self, true: Tensor) -> Tensor:
        """Return the mean square of the differences to true states ``[rows, steps + 1, 2]``."""
        state, states = true[:, 0], []
        for _ in range(true.shape[1] - 1):
            state = gr.tap(3 * torch.tanh((state + TIME * self.change(state)) / 3), "state")
            states.append(state)
        return (torch.stack(states, 1) - true[:, 1:]).square().mean()


def train(policy: Policy, data: Tensor, updates: int, seed: int) -> tuple[list[float], gr.RewrittenModule]:
    """Train with Adam; return the losses and the model."""
    torch.manual_seed(seed)
    model = gr.transform(Simulator(), policy, loops="rolled").compile()
    optimizer = torch.optim.Adam(model.parameters(), lr=RATE)
    losses = []
    for _ in range(updates):
        loss = model(data[torch.randint(len(data), (ROWS,))])
        optimizer.zero_grad()
        loss.backward()
        model.monitor.log("loss", loss)
        optimizer.step()
        losses.append(loss.item())
    return losses, model


def seconds_of_first_step(data: Tensor, loops: Literal["rolled", "unrolled"]) -> float:
    """Return the seconds of the first step, compilation included."""
    torch.compiler.reset()
    model = gr.transform(Simulator(), POLICIES["error clip"], loops=loops).compile()
    begin = time.perf_counter()
    model(data[:ROWS]).backward()
    return time.perf_counter() - begin


def main(argv: Sequence[str] | None = None) -> None:
    """Train with each policy, and print the losses."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--steps", type=int, default=800, help="updates of each training")
    parser.add_argument("--length", type=int, default=100, help="steps of the simulator")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--unrolled", action="store_true", help="compile with the loop rolled and unrolled")
    parser.add_argument("--out", type=Path, help="folder of the maps")
    options = parser.parse_args(argv)
    data, held_out = (pendulums(count, options.length, seed) for count, seed in ((256, 0), (64, 1)))
    ways: tuple[Literal["rolled", "unrolled"], ...] = ("rolled", "unrolled") if options.unrolled else ()
    for loops in ways:
        print(f"first step, {options.length} steps {loops}: {seconds_of_first_step(data, loops):.1f} s")
    print(f"the mean state: {held_out[:, 1:].var((0, 1)).mean():.2f}")
    for name, policy in POLICIES.items():
        losses, model = train(policy, data, options.steps, options.seed)
        last = losses[-max(len(losses) // 20, 1) :]
        with torch.no_grad():
            print(f"{name:13} loss {losses[0]:.2f} -> {sum(last) / len(last):.2f}, new pendulums {model(held_out):.2f}")
        if options.out is not None:
            path = options.out / f"simulator_{name.replace(' ', '_')}"
            viz.plot(model.monitor, title=f"simulator, {name}").render(path)


if __name__ == "__main__":
    main()
