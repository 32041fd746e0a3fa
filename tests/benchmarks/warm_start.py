"""Warm start: the first steps of a GPT whose code is in the caches on disk, beside plain torch.compile.

    python tests/benchmarks/warm_start.py [--layers 4] [--width 256] [--repeat 5] [--out FILE.json]

Each start is a process of its own, on one thread. Measured is its processor time from ``compile()`` to the end of the
third step, without the import of torch and gradrewrite. Policies take turns; the first round fills the caches and
is cold.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

POLICIES = ("plain", "empty", "clips", "checks", "statistics", "function")


def start(name: str, layers: int, width: int) -> dict[str, Any]:
    """Compile and train three steps in this process."""
    import torch
    from torch._dynamo.utils import counters

    import gradrewrite as gr
    from gradrewrite.passes import CheckFinite, ClipByValue, Observe

    sys.path.insert(0, str(Path(__file__).parent.parent))
    from models.gpt import Gpt

    torch.set_num_threads(1)
    torch.manual_seed(0)
    everywhere = ("activation:*", "error:*", "gradient:*")
    policies: dict[str, Any] = {
        "empty": [],
        "clips": gr.on("error:*", ClipByValue(1e-3)),
        "checks": [gr.on(pattern, CheckFinite()) for pattern in everywhere],
        "statistics": [gr.on(pattern, Observe("norm", "max_abs", "zeros")) for pattern in everywhere],
        "function": gr.on("error:*", lambda g: g.clamp(-1e-3, 1e-3)),  # has no hash, so it is rewritten each time
    }
    model, tokens = Gpt(width=width, layers=layers), torch.randint(0, 50, (2, 32))
    before = time.process_time()
    if name != "plain":
        model = gr.transform(model, policies[name])
    model.compile()
    for _ in range(3):
        model(tokens, tokens).backward()
    seconds = time.process_time() - before
    return {"policy": name, "seconds": seconds, "is_hit": bool(counters["aot_autograd"]["autograd_cache_hit"])}


def main() -> None:
    """Measure all policies in turn, and print a table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--width", type=int, default=256)
    parser.add_argument("--repeat", type=int, default=5)
    parser.add_argument("--out", type=Path)
    parser.add_argument("--policy", choices=POLICIES, help="measure this one, in this process")
    options = parser.parse_args()
    if options.policy is not None:
        print(json.dumps(start(options.policy, options.layers, options.width)))
        return
    found: dict[str, list[dict[str, Any]]] = {name: [] for name in POLICIES}
    size = ["--layers", str(options.layers), "--width", str(options.width)]
    with tempfile.TemporaryDirectory() as folder:
        environment = os.environ | {"TORCHINDUCTOR_CACHE_DIR": folder}
        for _ in range(1 + options.repeat):
            for name in POLICIES:
                command = [sys.executable, __file__, "--policy", name, *size]
                done = subprocess.run(command, env=environment, capture_output=True, text=True, check=True)
                found[name].append(json.loads(done.stdout.splitlines()[-1]))
    plain = statistics.median(one["seconds"] for one in found["plain"][1:])
    print("| policy | out of the cache | cold s | warm s (median, range) | warm / plain |\n|---|---|---|---|---|")
    for name, (cold, *warm) in found.items():
        seconds = sorted(one["seconds"] for one in warm)
        middle, is_hit = statistics.median(seconds), all(one["is_hit"] for one in warm)
        spread = f"{middle:.2f} ({seconds[0]:.2f} to {seconds[-1]:.2f})"
        print(f"| {name} | {'yes' if is_hit else 'no'} | {cold['seconds']:.1f} | {spread} | {middle / plain:.2f} |")
    if options.out is not None:
        import torch

        about = {"torch": torch.__version__, "python": platform.python_version(), "machine": platform.machine()}
        options.out.write_text(json.dumps(about | {"layers": options.layers, "width": options.width, "starts": found}))


if __name__ == "__main__":
    main()
