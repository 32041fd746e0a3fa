"""Train an actor by policy gradients (REINFORCE), with a training step of one graph and one of two phases.

A cart on a track is pushed left or right and is to come to rest in the middle. ``python examples/reinforce.py`` prints
the mean reward of the first and the last episodes for both, and the seconds of an update.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

import gradrewrite as gr
from gradrewrite.passes import CheckFinite, ClipByGlobalNorm

CARTS, MOMENTS, DISCOUNT = 64, 30, 0.95
POLICY = [gr.on("gradient:*", CheckFinite("skip")), gr.on("step:*", ClipByGlobalNorm(0.5))]


class Actor(nn.Module):
    """Log-probabilities of a push to the left and to the right, from positions and speeds ``[rows, 2]``."""

    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Linear(2, 32), nn.Tanh(), nn.Linear(32, 2))

    def forward(self, seen: Tensor) -> Tensor:
        """Return log-probabilities ``[rows, 2]``."""
        found: Tensor = self.net(seen).log_softmax(-1)
        return found


@dataclass
class Episode:
    """Observations, pushes and advantages: ``[rows, 2]``, ``[rows]`` and ``[rows]``."""

    seen: Tensor
    pushes: Tensor
    advantages: Tensor
    reward: float  # mean of a moment


def play(actor: nn.Module) -> Episode:
    """Let carts run for one episode; rewards are minus the distance from the middle, and minus a tenth of the speed."""
    position, speed = torch.rand(CARTS) * 2 - 1, torch.zeros(CARTS)
    seen, pushes, rewards = [], [], []
    for _ in range(MOMENTS):
        seen.append(torch.stack([position, speed], -1))
        with torch.no_grad():
            pushes.append(torch.multinomial(actor(seen[-1]).exp(), 1).squeeze(1))
        speed = 0.9 * speed + 0.1 * (2 * pushes[-1] - 1)
        position = position + 0.3 * speed
        rewards.append(-position.abs() - 0.1 * speed.abs())
    gain, gains = torch.zeros(CARTS), []
    for reward in reversed(rewards):
        gain = reward + DISCOUNT * gain
        gains.append(gain)
    returns = torch.stack(gains[::-1])
    advantages = (returns - returns.mean(1, keepdim=True)) / returns.std()
    return Episode(torch.cat(seen), torch.cat(pushes), advantages.flatten(), float(torch.stack(rewards).mean()))


def loss_of(actor: nn.Module, seen: Tensor, pushes: Tensor, advantages: Tensor) -> Tensor:
    """Return the loss of a policy gradient."""
    chosen: Tensor = actor(seen).gather(1, pushes[:, None]).squeeze(1)
    return -(chosen * advantages).mean()


def in_one_graph(model: Any, optimizer: torch.optim.Optimizer, *, compiled: bool) -> Callable[..., Tensor]:
    """Return an update of one graph."""
    return gr.train_step(model, optimizer, compute_loss=loss_of, compile=compiled)


def in_two_phases(model: Any, optimizer: torch.optim.Optimizer, *, compiled: bool) -> Callable[..., Tensor]:
    """Return an update of two phases."""
    gr.guard(optimizer, model)
    if compiled:
        model.compile()

    def step(*batch: Tensor) -> Tensor:
        loss = loss_of(model, *batch)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss.detach()

    return step


def train(make_step: Callable[..., Callable[..., Tensor]], steps: int, *, compiled: bool) -> tuple[list[float], float]:
    """Return the mean reward of each episode, and the seconds of an update (the median)."""
    torch.manual_seed(0)
    actor = Actor()
    model = gr.transform(actor, POLICY)
    step = make_step(model, torch.optim.AdamW(model.parameters(), lr=0.02), compiled=compiled)
    rewards, seconds = [], []
    for _ in range(steps):
        episode = play(actor)
        begin = time.perf_counter()
        step(episode.seen, episode.pushes, episode.advantages)
        seconds.append(time.perf_counter() - begin)
        rewards.append(episode.reward)
    return rewards, sorted(seconds)[len(seconds) // 2]


def main() -> None:
    """Train with both and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=80, metavar="N", help="episodes (80)")
    parser.add_argument("--eager", action="store_true", help="run the graphs op by op")
    options = parser.parse_args()
    for name, make_step in {"two phases": in_two_phases, "one graph": in_one_graph}.items():
        rewards, seconds = train(make_step, options.steps, compiled=not options.eager)
        few = max(1, len(rewards) // 10)
        first, last = sum(rewards[:few]) / few, sum(rewards[-few:]) / few
        print(f"{name:10} mean reward {first:.2f} -> {last:.2f}, {1e3 * seconds:.1f} ms an update")


if __name__ == "__main__":
    main()
