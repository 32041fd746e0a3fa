"""Cost of Python loops on the CPU, rolled and unrolled, compiled: first steps, and steps.

``python -m tests.benchmarks.rolled_cost LOOP LENGTH [--rolled]``, with a loop of ``cell`` (``nn.GRUCell``), ``net``
(that of the README), ``decoder`` (two ``nn.LSTMCell`` with attention, the loss in the loop) or ``simulator``, prints
CPU seconds of one thread: of the first step, with caches of torch in a new folder, and of the fastest of 15 steps,
interleaved, as ratios to the eager loop. A clip acts at the errors of each module. ``--rolled`` leaves the unrolled
loop out, for its compilation takes up to a second an iteration.
"""

from __future__ import annotations

import os
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


def main(name: str, length: int, *, rolled: bool) -> None:
    """Measure and print."""
    torch.set_num_threads(1)
    inputs = [x.float() if x.is_floating_point() else x for x in LOOPS[name].inputs(length, BATCH)]
    ways: dict[str, Any] = {"eager": None, "rolled": "rolled"} | ({} if rolled else {"unrolled": "unrolled"})
    steps: dict[str, Callable[[], None]] = {}
    for way, loops in ways.items():
        torch.manual_seed(0)
        model: nn.Module = LOOPS[name](WIDTH)
        if loops:
            model = gr.transform(model, gr.on("error:*", ClipByNorm(0.1)), loops=loops)
            model.compile()
        steps[way] = lambda model=model: (model.zero_grad(), model(*inputs).backward())
        begin = time.process_time()
        steps[way]()
        print(f"{name}, {length} iterations, {way}: first step {time.process_time() - begin:.1f} CPU s", flush=True)
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
        os.environ["TORCHINDUCTOR_CACHE_DIR"] = folder
        main(sys.argv[1], int(sys.argv[2]), rolled="--rolled" in sys.argv)
