"""The cost of ``gr.audit`` on a GPT of 100 million parameters: time against three training steps, memory against one.

    python tests/benchmarks/audit_cost.py [--tokens 512] [--processes 3]

Each figure is of a process of its own, on two threads: ``steps`` trains three steps with AdamW, eagerly, behind one
that warms up (its peak of resident memory is that of a step); ``audit`` calls ``gr.audit`` with the same optimizer,
nothing before it. ``zeros`` audits a model whose output projections begin with 0, so that a second step runs, between
which parameters are moved. Wall-clock times; the smallest of all processes.
"""

from __future__ import annotations

import argparse
import resource
import subprocess
import sys
import time
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).parent.parent))


def measure(what: str, tokens: int) -> None:
    """Print seconds and peak memory in MiB of one variant, in this process."""
    import gradrewrite as gr

    from models.gpt import Gpt

    torch.set_num_threads(2)
    torch.manual_seed(0)
    model = Gpt(layers=12, width=768, heads=12, vocabulary=9_000, context=tokens)
    assert sum(p.numel() for p in model.parameters()) > 95e6
    if what == "zeros":
        for block in model.blocks:
            torch.nn.init.zeros_(block.mlp.down.weight)
    optimizer = torch.optim.AdamW(model.parameters())
    batch = torch.randint(9_000, (1, tokens)), torch.randint(9_000, (1, tokens))
    gr.audit(torch.nn.Linear(2, 2), torch.ones(1, 2))  # the imports of a first compilation

    def steps(number: int) -> None:
        for _ in range(number):
            optimizer.zero_grad()
            model(*batch).backward()
            optimizer.step()

    if what == "steps":
        steps(1)
    begin = time.perf_counter()
    if what == "steps":
        steps(3)
    else:
        found = gr.audit(model, *batch, optimizer=optimizer)
        assert not found.causes
    seconds = time.perf_counter() - begin
    print(seconds, resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024)


def main() -> None:
    """Measure in processes, and print."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--tokens", type=int, default=512)
    parser.add_argument("--processes", type=int, default=3)
    parser.add_argument("--measure")
    given = parser.parse_args()
    if given.measure:
        measure(given.measure, given.tokens)
        return
    found: dict[str, list[tuple[float, float]]] = {"steps": [], "audit": [], "zeros": []}
    for _ in range(given.processes):
        for what, figures in found.items():
            command = [sys.executable, __file__, "--measure", what, "--tokens", str(given.tokens)]
            seconds, size = subprocess.run(command, capture_output=True, text=True, check=True).stdout.split()
            figures.append((float(seconds), float(size)))
    best = {what: tuple(map(min, zip(*figures, strict=True))) for what, figures in found.items()}
    for what, (seconds, size) in best.items():
        of_time, of_memory = seconds / best["steps"][0], size / best["steps"][1]
        print(f"{what:6} {seconds:6.1f} s ({of_time:.2f} of three steps)   {size:6.0f} MiB ({of_memory:.2f} of a step)")


if __name__ == "__main__":
    main()
