"""Launches of a step on the simulated GPU; its own process, since the device is registered before torch is imported.

``GRADREWRITE_GPU=compiled python -m benchmarks.launches bounds``, or the name of a case, in the folder ``tests``;
prints JSON.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
import warnings
from pathlib import Path
from typing import Any

TESTS = Path(__file__).parent.parent
BOUNDS = "bounds"


def ask(what: str) -> Any:
    """Run this module in a new process.

    Args:
        what: The name of a case: a dict from its ways to the results of ``of_case``. Or ``BOUNDS``: what ``of_bounds``
            returns.

    Raises:
        RuntimeError: The process failed.
    """
    environment = os.environ | {"GRADREWRITE_GPU": "compiled", "PYTHONPATH": str(TESTS)}
    command = [sys.executable, "-m", "benchmarks.launches", what]
    done = subprocess.run(command, env=environment, cwd=TESTS, capture_output=True, text=True, check=False)
    if done.returncode:
        raise RuntimeError(f"launches of {what}: {done.stderr[-2000:]}")
    return json.loads(done.stdout.splitlines()[-1])


def of_case(name: str) -> dict[str, dict[str, float]]:
    """Count launches and waits of a step in each way, and the processor time of its compilation in this process."""
    import torch

    from benchmarks.cases import CASES, WAYS
    from gpu.device import simulated_gpu

    found = {}
    with simulated_gpu(90):  # what torch imports when it first compiles
        torch.compile(torch.nn.Linear(8, 8).cuda())(torch.ones(4, 8, device="cuda")).sum().backward()
    for way in WAYS.values():
        # detect_anomaly and nan_asserts read values, which are not computed here.
        if not way.is_timed or way.also == "detect_anomaly" or way.options or not way.is_in(name):
            continue
        with simulated_gpu(90) as gpu:
            step = way.step(CASES[name], "cuda")
            start = time.process_time()
            step()
            seconds = time.process_time() - start
            for _ in range(2):
                step.clear()
                before = gpu.count()
                step()
            count = gpu.count() - before
        launches = count.launches + count.operations
        found[way.name] = {"launches": launches, "waits": count.waits, "uploads": count.uploads, "seconds": seconds}
    return found


def of_bounds() -> list[dict[str, Any]]:
    """Count what each policy adds to the launches of the models whose bounds the tests hold."""
    from gpu.launch_counts import DTYPES, MODELS, POLICIES, added

    return [
        {"model": name, "dtype": dtype, "policy": policy, "bound": bound, "added": added(name, dtype, policy)}
        for name in MODELS
        for dtype in DTYPES
        for policy, (_, bound) in POLICIES.items()
    ]


def main(what: str) -> int:
    """Print JSON."""
    from gpu.session import GPU, reason_to_skip  # registers the device, before torch is imported

    if GPU != "compiled":
        print(reason_to_skip("compiled"), file=sys.stderr)
        return 1
    warnings.simplefilter("ignore")
    print(json.dumps(of_bounds() if what == BOUNDS else of_case(what)))
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1]))
