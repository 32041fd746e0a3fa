"""The cost of acting behind the update: whole training steps of a GPT, over those without any action.

    python tests/benchmarks/update_cost.py [--rounds 15] [--width 256] [--rows 16]

Each variant is forward, backward and ``optimizer.step()`` of a fused AdamW, compiled, on one thread: ``plain`` is
torch.compile alone, ``hold`` holds elements of every parameter (``Hold(lambda g, v: v == 0)``), ``project`` divides
each row of every matrix by its norm behind the update. Processor times are medians of rounds in which the variants take
turns, as ratios to ``plain`` of the same round. ``held bytes`` are those of the copies of a step over those of the
parameters and their state.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

import gradrewrite as gr
from gradrewrite.optimizer.step_sites import GUARD
from gradrewrite.passes import Hold

from models.gpt import Gpt, batch


def is_zero(gradient: Tensor, value: Tensor) -> Tensor:
    return value == 0


def to_unit_rows(value: Tensor) -> Tensor:
    return value / value.norm(dim=-1, keepdim=True).clamp(min=1.0) if value.dim() > 1 else value


POLICIES: dict[str, Any] = {
    "plain": None,
    "hold": gr.on("step:*", Hold(is_zero)),
    "project": gr.on("param:*", to_unit_rows),
}


def make(policy: Any, width: int, rows: int) -> tuple[Callable[[], None], torch.optim.Optimizer, nn.Module]:
    """Return a training step, its optimizer and its model."""
    torch.manual_seed(0)
    net: Any = Gpt(4, width, vocabulary=1000, context=128)
    tokens = batch(rows, 128, 1000)
    optimizer = torch.optim.AdamW(net.parameters(), lr=1e-4, fused=True)
    run = torch.compile(net) if policy is None else gr.transform(net, policy).compile()
    if policy is not None:
        gr.guard(optimizer, run)

    def step() -> None:
        optimizer.zero_grad()
        run(*tokens).backward()
        optimizer.step()

    return step, optimizer, net


def held_share(step: Callable[[], None], optimizer: torch.optim.Optimizer, net: nn.Module) -> float:
    """Return the bytes of the copies that a step makes, over those of the parameters and their state."""
    changed = optimizer.__dict__[GUARD]._update._changed
    seen: list[int] = []
    run = changed.run

    def counted(own: torch.optim.Optimizer, work: Any, verdict: Tensor | None) -> Any:
        seen.append(sum(t.nbytes for t in work.before.values()))
        return run(own, work, verdict)

    changed.run = counted
    step()
    state = [t for p in net.parameters() for t in (p, *optimizer.state[p].values()) if t.dim()]
    return seen[-1] / sum(t.nbytes for t in state)


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser()
    for name, default in (("rounds", 15), ("width", 256), ("rows", 16)):
        parser.add_argument(f"--{name}", type=int, default=default)
    given = parser.parse_args()
    torch.set_num_threads(1)
    made = {name: make(policy, given.width, given.rows) for name, policy in POLICIES.items()}
    for step, _, _ in made.values():
        step()
        step()
    times: dict[str, list[float]] = {name: [] for name in made}
    for _ in range(given.rounds):
        for name, (step, _, _) in made.items():
            begin = time.process_time()
            step()
            times[name].append(time.process_time() - begin)
    for name, own in times.items():
        ratios = [t / p for t, p in zip(own, times["plain"], strict=True)]
        low, high = min(ratios), max(ratios)
        print(
            f"{name}: {statistics.median(own) * 1e3:.0f} ms, {statistics.median(ratios):.3f} ({low:.3f} to {high:.3f})"
        )
    print(f"held bytes: {held_share(*made['hold']):.2f} of parameters and state")


if __name__ == "__main__":
    main()
