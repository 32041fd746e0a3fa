"""The cost of observing everything in every tenth step, beside plain ``torch.compile``, in one interleaved run.

    python tests/benchmarks/sampling_cost.py [--steps 200] [--every 10] [--out FILE.json]

A GPT of 4 layers trains with a fused AdamW on one thread, in two copies that take turns, the first of each pair drawn
by chance: ``plain`` is compiled by ``torch.compile``; ``sampled`` has four statistics at every module output, its error
and every gradient, a compiled guard, and a monitor that samples. Both graphs are compiled before. Times are processor
seconds of the process.
"""

from __future__ import annotations

import argparse
import json
import platform
import random
import statistics
import sys
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
from torch._dynamo.utils import counters

sys.path.insert(0, str(Path(__file__).parent.parent))

import gradrewrite as gr
from gradrewrite.passes import Observe

from models.gpt import Gpt, batch

STATISTICS = Observe("norm", "max_abs", "nonfinite", "zeros")
POLICY: gr.Policy = [gr.on(f"{kind}:*", STATISTICS) for kind in ("activation", "error", "gradient")]


@dataclass(frozen=True)
class Costs:
    """The figures of one run.

    Attributes:
        every: Steps from one measurement to the next.
        edits: Number of measurements.
        plain: Processor seconds of each plain step.
        sampled: Processor seconds of each step of the observed copy.
        recompiled: Graphs that were compiled while steps were timed.
    """

    every: int
    edits: int
    plain: list[float]
    sampled: list[float]
    recompiled: int

    @property
    def ratio(self) -> float:
        """All steps of the observed copy over all plain ones."""
        return sum(self.sampled) / sum(self.plain)

    def ratio_of(self, *, measuring: bool) -> float:
        """The median ratio of measuring steps, or of those between, to the plain ones in turn with them."""
        pairs = enumerate(zip(self.sampled, self.plain, strict=True))
        return statistics.median(own / plain for n, (own, plain) in pairs if (n % self.every == 0) == measuring)


def make_steps(every: int) -> tuple[gr.RewrittenModule, dict[str, Callable[[], None]]]:
    """Make both copies, and a function for a step of each."""
    torch.manual_seed(0)
    plain = Gpt(4, width=256, context=128)
    torch.manual_seed(0)
    sampled = gr.transform(Gpt(4, width=256, context=128), POLICY, monitor=gr.Monitor(sample=every))
    plain.compile()
    sampled.compile()
    data = batch(8, 128)

    def step_of(model: torch.nn.Module, optimizer: torch.optim.Optimizer) -> Callable[[], None]:
        def step() -> None:
            model(*data).backward()
            optimizer.step()
            optimizer.zero_grad()

        return step

    optimizers = [torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True) for model in (plain, sampled)]
    gr.guard(optimizers[1], sampled)
    return sampled, {"plain": step_of(plain, optimizers[0]), "sampled": step_of(sampled, optimizers[1])}


def measure(steps: int, every: int) -> Costs:
    """Time the steps of both copies in turn."""
    model, ways = make_steps(every)
    for _ in range(every):  # of these the first is measured, the others are not
        for step in ways.values():
            step()
    compiled = counters["stats"]["unique_graphs"]
    seconds: dict[str, list[float]] = {way: [] for way in ways}
    for _ in range(steps):
        for way in random.sample(list(ways), len(ways)):
            begin = time.process_time()
            ways[way]()
            seconds[way].append(time.process_time() - begin)
    edits = sum(len(graph.edits) for graph in model.explain().graphs)
    return Costs(every, edits, seconds["plain"], seconds["sampled"], counters["stats"]["unique_graphs"] - compiled)


def main() -> None:
    """Measure and report."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--every", type=int, default=10)
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    torch.set_num_threads(1)
    random.seed(0)
    costs = measure(options.steps, options.every)
    machine = {"python": platform.python_version(), "torch": torch.__version__, "threads": 1}
    print(
        f"{costs.edits} measurements, {options.steps} steps: all {costs.ratio:.4f} of plain, between "
        f"{costs.ratio_of(measuring=False):.4f}, measuring {costs.ratio_of(measuring=True):.4f}, "
        f"{costs.recompiled} recompilations",
        file=sys.stderr,
    )
    if options.out is not None:
        options.out.write_text(json.dumps({"machine": machine, **asdict(costs)}, indent=1))


if __name__ == "__main__":
    main()
