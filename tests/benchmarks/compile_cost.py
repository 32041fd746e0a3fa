"""What a policy adds to compilation: time of probing, asking, tracing and splicing beside the rest, by number of sites.

    python tests/benchmarks/compile_cost.py [--sites 100 300 1000] [--repeat 3] [--action value] [--out FILE.json]

Each compilation is cold (caches off, one process each); plain and rewritten alternate.
"""

from __future__ import annotations

import argparse
import json
import platform
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from importlib import import_module
from pathlib import Path
from types import SimpleNamespace
from typing import Any

OPS_PER_LAYER = 4


@dataclass
class Timing:
    """One cold compilation, in seconds; ``added`` is the part of it that is ours."""

    sites: int
    rewritten: bool
    edits: int
    total: float
    added: float
    parts: dict[str, float]


def measure(sites: int, rewritten: bool, action: str) -> Timing:
    """Compile one model in this process."""
    import torch
    from torch import Tensor, nn

    import gradrewrite as gr
    from gradrewrite.passes import ClipByGlobalNorm, ClipByNorm, ClipByValue

    class Net(nn.Module):
        def __init__(self, layers: int) -> None:
            super().__init__()
            self.layers = nn.ModuleList(nn.Linear(16, 16) for _ in range(layers))

        def forward(self, x: Tensor) -> Tensor:
            for layer in self.layers:  # four values each
                x = x + torch.tanh(layer(x)) * 0.1
            return x

    torch.manual_seed(0)
    torch._inductor.config.force_disable_caches = True
    x = torch.randn(8, 16)
    warm = torch.compile(nn.Linear(16, 16))  # torch's own imports and the first C++ compilation
    warm(x).sum().backward()
    parts: dict[str, float] = {}
    clock = _Clock(parts)
    clock.watch(import_module("gradrewrite.backend"), "place")
    clock.watch(import_module("gradrewrite.job"), "rewrite")
    clock.watch_markers()

    plain = Net(sites // OPS_PER_LAYER)
    start = time.perf_counter()
    if rewritten:
        policies = {
            "value": gr.on("error:*/*", ClipByValue(1.0)),
            "norm": gr.on("error:*/*", ClipByNorm(1.0)),
            "global": gr.on("gradient:*", ClipByGlobalNorm(1.0)),
        }
        model = gr.transform(plain, policies[action])
        model.compile()
        model(x).sum().backward()
        edits = len(model.explain().graphs[0].edits)
    else:
        torch.compile(plain)(x).sum().backward()
        edits = 0
    total = time.perf_counter() - start
    return Timing(sites, rewritten, edits, total, sum(parts.values()), parts)


class _Clock:
    """Sums the time inside functions."""

    def __init__(self, parts: dict[str, float]) -> None:
        self._parts = parts

    def watch(self, module: Any, name: str) -> None:
        """Time every call of one function."""
        setattr(module, name, self._timed(getattr(module, name), name))

    def watch_markers(self) -> None:
        """Time the probes and the markers that they leave while AOTAutograd traces."""
        probes = import_module("gradrewrite.probes")
        probe = probes._probe
        timed = self._timed(probe, "probe")
        probes._probe = timed
        import torch.fx

        torch.fx.node.has_side_effect(timed)
        markers = import_module("gradrewrite.markers")
        probes.markers = SimpleNamespace(
            mark_activation=markers.mark_activation, mark_error=self._timed(markers.mark_error, "mark_error")
        )

    def _timed(self, fn: Callable[..., Any], name: str) -> Callable[..., Any]:
        def run(*args: Any, **kwargs: Any) -> Any:
            start = time.perf_counter()
            try:
                return fn(*args, **kwargs)
            finally:
                self._parts[name] = self._parts.get(name, 0.0) + time.perf_counter() - start

        return run


def run_one(sites: int, rewritten: bool, action: str) -> Timing:
    """Measure in a process of its own."""
    command = [sys.executable, __file__, "--one", str(sites), str(int(rewritten)), "--action", action]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    return Timing(**json.loads(done.stdout.splitlines()[-1]))


def main() -> None:
    """Measure, print a table, write JSON."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--sites", type=int, nargs="+", default=[100, 300, 1000])
    parser.add_argument("--repeat", type=int, default=3)
    parser.add_argument("--action", choices=["value", "norm", "global"], default="value")
    parser.add_argument("--out", type=Path)
    parser.add_argument("--one", type=int, nargs=2, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.one:
        print(json.dumps(asdict(measure(options.one[0], bool(options.one[1]), options.action))))
        return
    timings = []
    print("| sites | edits | plain s | rewritten s | added by us s | added / rest | added per site ms |")
    print("|---|---|---|---|---|---|---|")
    for sites in options.sites:
        plain, ours = [], []
        for _ in range(options.repeat):
            plain.append(run_one(sites, False, options.action))
            ours.append(run_one(sites, True, options.action))
        timings += plain + ours
        total, added = (statistics.median(getattr(t, f) for t in ours) for f in ("total", "added"))
        before = statistics.median(t.total for t in plain)
        print(
            f"| {sites} | {ours[0].edits} | {before:.1f} | {total:.1f} | {added:.2f} | {added / (total - added):.3f} "
            f"| {1000 * added / sites:.2f} |",
            flush=True,
        )
    if options.out:
        record = {
            "python": platform.python_version(),
            "machine": platform.machine(),
            "runs": [asdict(t) for t in timings],
        }
        options.out.write_text(json.dumps(record, indent=1) + "\n")


if __name__ == "__main__":
    main()
