"""Cost of a cold compile of a model of equal blocks: as regions, and as a whole; with a policy, and by torch alone.

Run as ``python tests/benchmarks/region_cost.py [blocks ...]``; writes JSON to the standard output. Each way runs in a
process of its own with an empty cache of Inductor, where a small graph is compiled before the clock starts. What is
measured is CPU seconds of the process and of the compilers that it has started, up to the end of the first backward.
The two ways with regions run three times, in turn.
"""

from __future__ import annotations

import json
import os
import platform
import resource
import subprocess
import sys
import tempfile
from pathlib import Path

import torch
from torch import Tensor, nn

sys.path.insert(0, str(Path(__file__).parent.parent))

import gradrewrite as gr
from gradrewrite.passes import ClipByValue, Observe

BLOCKS = (8, 32)
WAYS = ("plain regions", "regions", "plain whole", "whole")
REPEATED = WAYS[:2]  # whose ratio is small, so that one run says little
RUNS = 3
POLICY = [gr.on("error:blocks.*", [ClipByValue(1e-4), Observe("max_abs")])]
WIDTH, HEADS, BATCH, LENGTH = 64, 4, 2, 16


class Block(nn.Module):
    """A transformer block with causal attention, pre-norm."""

    def __init__(self) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.qkv, self.proj = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.up, self.down = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        b, t, _ = x.shape
        q, k, v = (
            part.view(b, t, HEADS, WIDTH // HEADS).transpose(1, 2) for part in self.qkv(self.norm1(x)).chunk(3, -1)
        )
        mixed = nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.proj(mixed.transpose(1, 2).reshape(b, t, WIDTH))
        return x + self.down(nn.functional.gelu(self.up(self.norm2(x))))


class Net(nn.Module):
    """Blocks between two linear layers."""

    def __init__(self, number: int) -> None:
        super().__init__()
        self.embed, self.head = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, 10)
        self.blocks = nn.ModuleList(Block() for _ in range(number))

    def forward(self, x: Tensor) -> Tensor:
        x = self.embed(x)
        for block in self.blocks:
            x = block(x)
        return self.head(x)


def compiled(way: str, number: int) -> nn.Module:
    """The model, compiled in one of the ways at its first call."""
    model: nn.Module = Net(number)
    if way == "plain regions":
        for block in model.get_submodule("blocks").children():
            block.compile(fullgraph=True)
    elif way == "plain whole":
        model.compile(fullgraph=True)
    else:
        model = gr.transform(model, POLICY, regions="blocks.*" if way == "regions" else ())
        model.compile()
    return model


def cpu_seconds() -> float:
    """CPU seconds of this process and of those that it has waited for."""
    used = [resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)]
    return sum(one.ru_utime + one.ru_stime for one in used)


def measure(way: str, number: int) -> None:
    """Compile and run once; writes the CPU seconds."""
    torch.set_num_threads(1)
    torch._inductor.config.compile_threads = 1
    small = gr.transform(nn.Linear(3, 3), POLICY[:0])
    small.compile()
    small(torch.randn(2, 3)).sum().backward()
    model, x = compiled(way, number), torch.randn(BATCH, LENGTH, WIDTH)
    begin = cpu_seconds()
    model(x).sum().backward()
    print(cpu_seconds() - begin)


def main() -> None:
    """Measure all numbers of blocks, each way after the other."""
    if len(sys.argv) == 3 and sys.argv[1] in WAYS:
        measure(sys.argv[1], int(sys.argv[2]))
        return
    rows = []
    for number in [int(text) for text in sys.argv[1:]] or BLOCKS:
        for way in (*WAYS, *REPEATED * (RUNS - 1)):
            with tempfile.TemporaryDirectory() as folder:
                command = [sys.executable, __file__, way, str(number)]
                surroundings = {**os.environ, "TORCHINDUCTOR_CACHE_DIR": folder}
                done = subprocess.run(command, env=surroundings, stdout=subprocess.PIPE, text=True, check=True)
            rows.append({"way": way, "blocks": number, "cpu_seconds": round(float(done.stdout), 2)})
            print(rows[-1], file=sys.stderr)
    machine = {"python": platform.python_version(), "torch": torch.__version__, "threads": 1}
    print(json.dumps({"machine": machine, "rows": rows}, indent=1))


if __name__ == "__main__":
    main()
