"""Cost of what is kept for ``monitor.culprits()`` in steps that nobody asks about.

Run as ``python tests/benchmarks/culprits_cost.py [--rounds 200] [--width 128] [--length 64]``; writes JSON to the
standard output. A GPT of four layers, compiled, is trained by a fused AdamW on two micro-batches a step, in four ways,
one step of each in turn and in random order: plain torch.compile without a guard; SkipSpikes with the keeping of steps
switched off; SkipSpikes as it is, twice, which shows the noise. Beside times: Python calls of one more step, Inductor's
kernels, and bytes that are alive between two steps in tensors of the batch's making. Processor time of this process,
for the machine has others.
"""

from __future__ import annotations

import argparse
import cProfile
import json
import platform
import pstats
import random
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch._inductor import metrics

sys.path.insert(0, str(Path(__file__).parent.parent))

import gradrewrite as gr
from gradrewrite.backends.model_state import state_of
from gradrewrite.passes import SkipSpikes

from models.gpt import Gpt

WAYS = ("plain", "not kept", "kept", "kept again")
MICRO, BATCH, VOCABULARY = 2, 8, 256


def make_step(way: str, width: int, length: int) -> Callable[[], None]:
    """A training step of two micro-batches in one of the ways."""
    torch.manual_seed(0)
    model: Any = Gpt(4, width, 4, VOCABULARY, length)
    if way != "plain":
        model = gr.transform(model, gr.on("step:*", SkipSpikes()))
    model.compile()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True)
    if way != "plain":
        gr.guard(optimizer, model)
        if way == "not kept":
            state: Any = state_of(model)
            state.session._skips = False

    def step() -> None:
        optimizer.zero_grad()
        for _ in range(MICRO):
            tokens = torch.randint(0, VOCABULARY, (BATCH, length + 1))
            (model(tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous()) / MICRO).backward()
        optimizer.step()

    if way != "plain":
        step.kept = lambda: _kept_bytes(model)  # type: ignore[attr-defined]
    return step


def _kept_bytes(model: Any) -> int:
    """Bytes of inputs, and of gradients of outputs, that are kept after a step."""
    kept = model.monitor._recorder.links.kept_step
    snapshots = [] if kept is None else [s for own in kept.micro_batches.values() for s in own if s is not None]
    held = [ref.value for s in snapshots for ref in (*s.inputs, *s.tangents.values()) if isinstance(ref.value, Tensor)]
    return sum(t.numel() * t.element_size() for t in held)


def calls_of(step: Callable[[], None]) -> int:
    """Python calls of one step."""
    profile = cProfile.Profile()
    profile.runcall(step)
    total: int = pstats.Stats(profile).total_calls  # type: ignore[attr-defined]
    return total


def main() -> None:
    """Compile all ways, time them in turn, count."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=200)
    parser.add_argument("--width", type=int, default=128)
    parser.add_argument("--length", type=int, default=64)
    options = parser.parse_args()
    rounds = options.rounds
    torch.set_num_threads(1)
    steps, kernels = {}, {}
    for way in WAYS:
        steps[way] = make_step(way, options.width, options.length)
        metrics.reset()
        for _ in range(3):
            steps[way]()
        kernels[way] = metrics.generated_kernel_count
    seconds: dict[str, list[float]] = {way: [] for way in WAYS}
    for _ in range(rounds):
        for way in random.sample(WAYS, len(WAYS)):
            begin = time.process_time()
            steps[way]()
            seconds[way].append(time.process_time() - begin)
    rows = []
    for way in WAYS:
        to = {
            other: [a / b for a, b in zip(seconds[way], seconds[other], strict=True)] for other in ("plain", "not kept")
        }
        milliseconds = round(1000 * statistics.median(seconds[way]), 3)
        ratios = {f"to_{other.replace(' ', '_')}": round(statistics.median(own), 4) for other, own in to.items()}
        row = {"way": way, "milliseconds": milliseconds, **ratios}
        kept = getattr(steps[way], "kept", lambda: 0)()
        rows.append({**row, "python_calls": calls_of(steps[way]), "kernels": kernels[way], "kept_bytes": kept})
    machine = {"python": platform.python_version(), "torch": torch.__version__, "threads": 1, "rounds": rounds}
    machine |= {"width": options.width, "length": options.length}
    print(json.dumps({"machine": machine, "rows": rows}, indent=1))


if __name__ == "__main__":
    main()
