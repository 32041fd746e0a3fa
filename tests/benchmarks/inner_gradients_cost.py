"""The cost of a policy where the forward differentiates itself: steps over those of torch.compile alone.

    python tests/benchmarks/inner_gradients_cost.py [--rounds 25] [--width 256] [--rows 1024]

A step is forward and backward of a perceptron of three layers, on two threads: ``forces`` has a first derivative in the
loss, ``heat`` a second one. ``plain`` is torch.compile with Dynamo's switch for torch.autograd.grad, ``eager`` no
compiler, ``empty`` an empty policy, ``clips`` a clip by norm at every module's error. Processor times of rounds in
which the variants take turns, as ratios to ``plain`` of the same round: median, and middle half.
"""

from __future__ import annotations

import argparse
import copy
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import nn

import gradrewrite as gr
from gradrewrite._compat.inner_gradients import inner_gradients_traced
from gradrewrite.passes import ClipByNorm

sys.path.insert(0, str(Path(__file__).parent.parent))

from models.inner_gradients import LOSSES, Inner


def steps(loss: str, width: int, rows: int) -> dict[str, Callable[[], None]]:
    """Return a step of each variant, which has run twice."""
    torch.manual_seed(0)
    layers = nn.Linear(3, width), nn.SiLU(), nn.Linear(width, width), nn.Tanh(), nn.Linear(width, 1)
    plain = Inner(nn.Sequential(*layers), LOSSES[loss])
    inputs = torch.randn(rows, 3), torch.randn(rows, 3)
    models: dict[str, Any] = {"eager": copy.deepcopy(plain), "plain": torch.compile(copy.deepcopy(plain))}
    for name, policy in (("empty", []), ("clips", gr.on("error:*", ClipByNorm(1e-3)))):
        models[name] = gr.transform(copy.deepcopy(plain), policy).compile()

    def stepping(model: Any) -> Callable[[], None]:
        def step() -> None:
            model.zero_grad()
            model(*inputs).backward()

        return step

    found = {name: stepping(model) for name, model in models.items()}
    with inner_gradients_traced():
        for step in found.values():
            step()
            step()
    return found


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser()
    for name, default in (("rounds", 25), ("width", 256), ("rows", 1024)):
        parser.add_argument(f"--{name}", type=int, default=default)
    given = parser.parse_args()
    torch.set_num_threads(2)
    for loss in ("forces", "heat"):
        made = steps(loss, given.width, given.rows)
        times: dict[str, list[float]] = {name: [] for name in made}
        for number in range(given.rounds):
            for name in list(made)[:: 1 if number % 2 else -1]:
                begin = time.process_time()
                for _ in range(5):
                    made[name]()
                times[name].append((time.process_time() - begin) / 5)
        print(f"{loss}: plain {1e3 * statistics.median(times['plain']):.2f} ms")
        for name, own in times.items():
            ratios = sorted(a / b for a, b in zip(own, times["plain"], strict=True))
            quarter = len(ratios) // 4
            print(f"  {name:6} {statistics.median(ratios):.3f} ({ratios[quarter]:.3f} to {ratios[-1 - quarter]:.3f})")


if __name__ == "__main__":
    main()
