"""First steps of a compiled ``nn.LSTM`` with a clip in each time step, in a first and in a second process.

``python -m tests.benchmarks.recurrent_first_step 50 400`` prints for each length CPU seconds of one thread, the C++
compiler's included, with empty caches of torch and with those of the process before; three times in turn, the medians.
"""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from collections import defaultdict
from statistics import median

PROGRAM = """
import resource, sys, torch
import gradrewrite as gr
from gradrewrite.passes import ClipByNorm

def seconds():
    own = [resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)]
    return sum(usage.ru_utime + usage.ru_stime for usage in own)

torch.set_num_threads(1)
warm = gr.transform(torch.nn.Linear(8, 8), []).compile()  # imports of Inductor
warm(torch.randn(3, 8)).sum().backward()
model = gr.transform(torch.nn.LSTM(64, 64), gr.on("error:l0/h", ClipByNorm(0.01))).compile()
begin = seconds()
model(torch.randn(int(sys.argv[1]), 8, 64))[0].square().mean().backward()
print(seconds() - begin)
"""


def first_step(length: int, cache: str) -> float:
    """Return CPU seconds of the first step in a process of its own."""
    environment = os.environ | {"TORCHINDUCTOR_CACHE_DIR": cache, "TORCHINDUCTOR_COMPILE_THREADS": "1"}
    command = [sys.executable, "-c", PROGRAM, str(length)]
    return float(subprocess.run(command, env=environment, capture_output=True, text=True, check=True).stdout)


def main(lengths: list[int]) -> None:
    """Measure and print."""
    found: dict[int, list[tuple[float, float]]] = defaultdict(list)
    for _ in range(3):
        for length in lengths:
            with tempfile.TemporaryDirectory() as cache:
                found[length].append((first_step(length, cache), first_step(length, cache)))
    for length, times in found.items():
        cold, warm = (median(column) for column in zip(*times, strict=True))
        print(f"{length} time steps: {cold:.2f} s, second process {warm:.2f} s ({warm / cold:.2f})")


if __name__ == "__main__":
    main(list(map(int, sys.argv[1:])))
