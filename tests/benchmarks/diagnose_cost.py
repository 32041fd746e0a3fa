"""Seconds of ``gr.diagnose`` for the README's model, without and with trials.

    python tests/benchmarks/diagnose_cost.py

One process, one thread; imports and the first compilation are in the first figure.
"""

from __future__ import annotations

import time

import torch

import gradrewrite as gr
from gradrewrite.examples.exploding_text import ExplodingModel, batches


def main() -> None:
    """Print the seconds and the outcome of both."""
    torch.set_num_threads(1)
    torch.manual_seed(0)
    model, data = ExplodingModel(), list(batches(50))
    for try_clips in (False, True):
        begin = time.perf_counter()
        found = gr.diagnose(
            model, data, optimizer=lambda parameters: torch.optim.SGD(parameters, lr=0.5), try_clips=try_clips
        )
        print(f"try_clips={try_clips}: {time.perf_counter() - begin:.1f} s, {found.outcome}")


if __name__ == "__main__":
    main()
