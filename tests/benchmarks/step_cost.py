"""The cost of clipping at the optimizer's step: bytes per parameter, and time, beside ``clip_grad_norm_``.

    python tests/benchmarks/step_cost.py [--millions 10 100] [--rounds 15 7] [--out FILE.json]

Each variant is one ``optimizer.step()`` of a fused AdamW on one thread, with all that comes before it, on the same
gradients: ``plain`` nothing; ``torch`` ``clip_grad_norm_`` and ``isfinite`` of the norm; ``guard`` step sites with
``CheckFinite("skip")`` and ``ClipByGlobalNorm``, op by op and compiled. Bounds are below the norm (``acts``) or above
(``idle``). Bytes are those of the arguments and results of each operation that PyTorch dispatches, views excepted;
processor times are medians of rounds in which the variants take turns, as ratios to ``plain`` of the same round.
"""

from __future__ import annotations

import argparse
import functools
import json
import platform
import statistics
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

import gradrewrite as gr
from gradrewrite.passes import CheckFinite, ClipByGlobalNorm

BOUNDS = {"acts": 0.5, "idle": 1e9}


class CountBytes(TorchDispatchMode):
    """Counts the bytes that operations read and write."""

    def __init__(self, smallest: int) -> None:
        """Leave out tensors with fewer elements than ``smallest``: norms, factors, step counters."""
        super().__init__()
        self.smallest, self.read, self.written = smallest, 0, 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Run an operation and count."""
        result = func(*args, **(kwargs or {}))
        if func.is_view or func.namespace == "prim":
            return result
        schema = func._schema
        named = dict(zip((a.name for a in schema.arguments), args, strict=False)) | (kwargs or {})
        given = [t for value in named.values() for t in self._large(value)]
        self.read += sum(map(_bytes_of, given))
        is_fused = "fused_adam" in schema.name
        for argument in schema.arguments:
            is_written = argument.alias_info is not None and argument.alias_info.is_write
            if is_fused and argument.name == "grads":
                is_written = named.get("grad_scale") is not None
            if is_written:
                self.written += sum(map(_bytes_of, self._large(named.get(argument.name))))
        known = {id(t) for t in given}
        self.written += sum(_bytes_of(t) for t in self._large(result) if id(t) not in known)
        return result

    def _large(self, value: Any) -> list[Tensor]:
        return [t for t in tree_leaves(value) if isinstance(t, Tensor) and t.numel() >= self.smallest]


def _bytes_of(tensor: Tensor) -> int:
    return tensor.numel() * tensor.element_size()


class Weights(nn.Module):
    """Matrices as those of a transformer, a tenth of them vectors."""

    def __init__(self, millions: int, dtype: torch.dtype) -> None:
        """Make ``millions`` times a million elements."""
        super().__init__()
        sizes = [(1000, 1000)] * millions if millions < 50 else [(2000, 2500)] * (millions // 5)
        self.weights = nn.ParameterList(torch.randn(size).to(dtype) for size in sizes)


class Contest:
    """All variants on the same parameters and gradients."""

    def __init__(self, millions: int, dtype: torch.dtype) -> None:
        """Make parameters, gradients and optimizers; the optimizers of the guards share their moments."""
        torch.manual_seed(0)
        model = Weights(millions, dtype)
        self.about = {"millions": millions, "dtype": str(dtype).removeprefix("torch.")}
        self.parameters = list(model.parameters())
        self.sources = [torch.randn_like(p) * 1e-3 for p in self.parameters]
        for p in self.parameters:
            p.grad = torch.empty_like(p)
        plain = torch.optim.AdamW(self.parameters, lr=1e-6, fused=True)
        self.variants: dict[str, Callable[[], Any]] = {"plain": plain.step}
        for name, bound in BOUNDS.items():
            self.variants[f"torch, {name}"] = functools.partial(self._clip_by_torch, plain, bound)
        self.live = torch.tensor(1.0)
        policy = gr.on("step:*", [CheckFinite("skip"), ClipByGlobalNorm(self.live)])
        self.models = [gr.transform(model, policy) for _ in range(2)]
        self.models[1].compile()
        for engine, rewritten in zip(("op by op", "compiled"), self.models, strict=True):
            optimizer = gr.guard(torch.optim.AdamW(self.parameters, lr=1e-6, fused=True), rewritten)
            for name, bound in BOUNDS.items():
                self.variants[f"guard, {engine}, {name}"] = functools.partial(self._clip_by_guard, optimizer, bound)

    def _clip_by_torch(self, optimizer: torch.optim.Optimizer, bound: float) -> None:
        norm = nn.utils.clip_grad_norm_(self.parameters, bound)
        if torch.isfinite(norm):
            optimizer.step()

    def _clip_by_guard(self, optimizer: torch.optim.Optimizer, bound: float) -> None:
        self.live.fill_(bound)
        optimizer.step()

    def _set_gradients(self) -> None:
        for p, source in zip(self.parameters, self.sources, strict=True):
            assert p.grad is not None
            p.grad.copy_(source)

    def seconds(self) -> dict[str, float]:
        """Run each variant once; return processor times."""
        found = {}
        for name, variant in self.variants.items():
            self._set_gradients()
            before = time.process_time()
            variant()
            found[name] = time.process_time() - before
        return found

    def rows(self, rounds: int) -> Iterator[dict[str, Any]]:
        """Measure all variants."""
        self.seconds()  # the first compiles, and makes moments
        times = [self.seconds() for _ in range(rounds)]
        total = sum(p.numel() for p in self.parameters)
        for name, variant in self.variants.items():
            self._set_gradients()
            with CountBytes(smallest=1000) as counted:
                variant()
            ratios = sorted(each[name] / each["plain"] for each in times)
            yield self.about | {
                "variant": name,
                "read": counted.read / total,
                "written": counted.written / total,
                "seconds": statistics.median(each[name] for each in times),
                "ratio": statistics.median(ratios),
                "ratios": [ratios[0], ratios[-1]],
            }


def print_row(row: dict[str, Any]) -> None:
    """Print a line of the table."""
    print("| " + " | ".join(_text(row)) + " |", flush=True)


def _text(row: dict[str, Any]) -> list[str]:
    size = torch.empty(0, dtype=getattr(torch, row["dtype"])).element_size()
    counted = [f"{row[key]:.1f} ({row[key] / size:.1f})" for key in ("read", "written")]
    ratio = f"{row['ratio']:.2f} ({row['ratios'][0]:.2f} to {row['ratios'][1]:.2f})"
    return [f"{row['millions']} M {row['dtype']}", row["variant"], *counted, f"{row['seconds'] * 1e3:.1f}", ratio]


def main() -> None:
    """Measure all sizes and types, and print a table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--millions", type=int, nargs="+", default=[10, 100])
    parser.add_argument("--rounds", type=int, nargs="+", default=[15, 7])
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    torch.set_num_threads(1)
    print("| size | variant | read, bytes (elements) | written, bytes (elements) | ms | time / plain |")
    print("|---|---|---|---|---|---|")
    found = []
    for millions, rounds in zip(options.millions, options.rounds, strict=True):
        for dtype in (torch.float32, torch.bfloat16):
            for row in Contest(millions, dtype).rows(rounds):
                print_row(row)
                found.append(row)
    if options.out is not None:
        about = {"torch": torch.__version__, "python": platform.python_version(), "machine": platform.machine()}
        options.out.write_text(json.dumps(about | {"rows": found}, indent=1) + "\n")


if __name__ == "__main__":
    main()
