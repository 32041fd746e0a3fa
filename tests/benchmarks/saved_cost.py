"""The cost of narrower forms of saved tensors in a compiled training step, in one interleaved run.

    python tests/benchmarks/saved_cost.py [--rounds 30] [--out FILE.json]

A GPT of 4 layers, width 256, on 8 x 128 tokens. On one thread, in turns that are drawn by chance, in processor seconds
of the process: ``plain`` is ``torch.compile``; the others keep all saved tensors in a form, or compute the activations
of the blocks again (``recompute``). Saved bytes are those of the tensors of the compiled graph's autograd node, each
memory once, without parameters and inputs; peak memory is that of a later step, over what was there before it, by the
reports of the allocator; the cosine is that of all gradients with the plain ones.
"""

from __future__ import annotations

import argparse
import copy
import json
import statistics
import sys
import tempfile
import time
import warnings
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

sys.path.insert(0, str(Path(__file__).parent.parent))

import gradrewrite as gr
from gradrewrite.passes import Recompute, Store

from benchmarks.measuring import cache_folder, peak_bytes, prepare, time_in_turn
from models.gpt import Gpt, batch

VOCABULARY = 512
POLICIES: dict[str, gr.Policy] = {
    "int8": gr.on("saved:*", Store("int8")),
    "bfloat16": gr.on("saved:*", Store("bfloat16")),
    "int8, recompute": lambda site: (
        (Recompute() if site.op == "gelu" else Store("int8")) if site.kind == "saved" else None
    ),
}


@dataclass(frozen=True)
class Row:
    """One way.

    Attributes:
        way: Name of the way.
        seconds: Median of a step.
        ratio: Median of the quotients with the plain step of the same round.
        saved: Bytes kept for the backward.
        peak: Bytes at most.
        cosine: Of all gradients with the plain ones.
        compilation: Processor seconds of the first step, with empty caches; the first way's have what torch does once.
    """

    way: str
    seconds: float
    ratio: float
    saved: int
    peak: int
    cosine: float
    compilation: float


@dataclass(frozen=True)
class Step:
    """A training step without an update."""

    model: nn.Module
    run: Callable[..., Tensor]
    inputs: tuple[Tensor, Tensor]

    def clear(self) -> None:
        """Let go of the gradients."""
        self.model.zero_grad()

    def __call__(self) -> None:
        """Run once."""
        self.run(*self.inputs).backward()

    def gradients(self) -> Tensor:
        """Return all gradients of a step as one vector, float64."""
        self.clear()
        self()
        return torch.cat([p.grad.flatten() for p in self.model.parameters() if p.grad is not None]).double()

    def saved_bytes(self) -> int:
        """Return the bytes that the forward keeps."""
        own = {t.untyped_storage().data_ptr() for t in (*self.model.parameters(), *self.model.buffers(), *self.inputs)}
        node: Any = self.run(*self.inputs).grad_fn
        kept = {t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for t in node.saved_tensors}
        return sum(size for address, size in kept.items() if address not in own)


def measure(rounds: int) -> list[Row]:
    """Measure all ways."""
    prepare()
    torch.manual_seed(0)
    model, inputs = Gpt(4, width=256, vocabulary=VOCABULARY, context=128), batch(8, 128, VOCABULARY)
    steps: dict[str, Step] = {}
    compilation: dict[str, float] = {}
    for way in ("plain", *POLICIES):
        own = copy.deepcopy(model)
        run = torch.compile(own) if way == "plain" else gr.transform(own, POLICIES[way])
        if isinstance(run, gr.RewrittenModule):
            run.compile()
        steps[way] = Step(own, run, inputs)
        start = time.process_time()
        steps[way]()
        compilation[way] = time.process_time() - start
    plain = steps["plain"].gradients()
    seconds = time_in_turn(steps, lambda way: steps[way].clear(), "cpu", rounds, 60.0)
    return [
        Row(
            way,
            statistics.median(seconds[way]),
            statistics.median(own / other for own, other in zip(seconds[way], seconds["plain"], strict=True)),
            step.saved_bytes(),
            peak_bytes(step, "cpu"),
            float(torch.cosine_similarity(step.gradients(), plain, dim=0)),
            compilation[way],
        )
        for way, step in steps.items()
    ]


def main() -> None:
    """Measure, print a table, and write the figures."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=30)
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    with warnings.catch_warnings(), tempfile.TemporaryDirectory() as folder, cache_folder(Path(folder)):
        warnings.simplefilter("ignore")
        rows = measure(options.rounds)
    plain = rows[0]
    for row in rows:
        saved, peak = row.saved / plain.saved, row.peak / plain.peak
        print(
            f"| {row.way} | {row.ratio:.3f} | {row.saved / 1e6:.1f} | {saved:.3f} | {row.peak / 1e6:.1f} | {peak:.3f} "
            f"| {row.cosine:.6f} | {row.compilation / plain.compilation:.2f} |"
        )
    if options.out:
        options.out.write_text(json.dumps([asdict(row) for row in rows], indent=1) + "\n")


if __name__ == "__main__":
    main()
