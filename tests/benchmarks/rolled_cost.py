"""Cost of Python loops on the CPU, rolled and unrolled, compiled: first steps, and steps.

``python -m tests.benchmarks.rolled_cost LOOP LENGTH [--rolled]``, with a loop of ``cell`` (``nn.GRUCell``), ``net``
(that of the README), ``decoder`` (two ``nn.LSTMCell`` with attention, the loss in the loop) or ``simulator``, prints
CPU seconds of one thread: of first steps, with caches of torch in a new folder and the C++ compiler included, and of
the fastest of 15 steps, interleaved, as ratios to the eager loop. A clip acts at the errors of each module. The first
step of ``dynamo`` is that of ``torch.compile(backend="eager")``, which traces alone. ``--rolled`` leaves the unrolled
loop out, for its compilation takes up to a second an iteration.
"""

from __future__ import annotations

import os
import resource
import sys
import tempfile
import time
from collections import defaultdict
from collections.abc import Callable
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent.parent))

import torch
from torch import nn

import gradrewrite as gr
from gradrewrite.passes import ClipByNorm

from models.python_loops import Cell, Decoder, Plain, Simulator

LOOPS: dict[str, Any] = {"cell": Cell, "net": Plain, "decoder": Decoder, "simulator": Simulator}
WIDTH, BATCH = 64, 16


def cpu_seconds() -> float:
    """Return the CPU seconds of this process and of those that it has started."""
    usages = map(resource.getrusage, (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN))
    return sum(usage.ru_utime + usage.ru_stime for usage in usages)


def main(name: str, length: int, *, rolled: bool) -> None:
    """Measure and print."""
    torch.set_num_threads(1)
    inputs = [x.float() if x.is_floating_point() else x for x in LOOPS[name].inputs(length, BATCH)]
    ways = ["eager", "dynamo", "rolled"] + ["unrolled"] * (not rolled)
    warm = gr.transform(nn.Linear(8, 8), []).compile()  # imports of Inductor
    warm(torch.randn(3, 8)).sum().backward()
    steps: dict[str, Callable[[], None]] = {}
    for way in ways:
        torch.manual_seed(0)
        model: nn.Module = LOOPS[name](WIDTH)
        if way == "dynamo":
            model = torch.compile(model, backend="eager")
        elif way != "eager":
            model = gr.transform(model, gr.on("error:*", ClipByNorm(0.1)), loops=way).compile()
        steps[way] = lambda model=model: (model.zero_grad(), model(*inputs).backward())
        begin = cpu_seconds()
        steps[way]()
        print(f"{name}, {length} iterations, {way}: first step {cpu_seconds() - begin:.1f} CPU s", flush=True)
    del steps["dynamo"]
    best: dict[str, float] = defaultdict(lambda: float("inf"))
    for _ in range(15):
        for way, step in steps.items():
            begin = time.process_time()
            step()
            best[way] = min(best[way], time.process_time() - begin)
    for way, seconds in best.items():
        print(f"{way}: {seconds * 1e3:.1f} ms, {seconds / best['eager']:.2f} of eager")


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as folder:
        os.environ |= {"TORCHINDUCTOR_CACHE_DIR": folder, "TORCHINDUCTOR_COMPILE_THREADS": "1"}
        main(sys.argv[1], int(sys.argv[2]), rolled="--rolled" in sys.argv)
