"""Cost of tracing a recurrence: CPU seconds of ``model.trace`` by number of steps, beside torch's own compilation.

Run as ``python tests/benchmarks/trace_cost.py [steps ...]``; writes JSON to the standard output.
"""

from __future__ import annotations

import json
import platform
import sys
import time
from dataclasses import asdict, dataclass
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).parent.parent))

import gradrewrite as gr
from gradrewrite.passes import ClipByGlobalNorm, ClipByValue

from models.recurrence import Recurrence

STEPS = (100, 200, 400, 800)
POLICIES: dict[str, gr.Policy] = {
    "clips": [gr.on("error:*", ClipByValue(1.0)), gr.on("gradient:*", ClipByGlobalNorm(1.0))],
    "empty": [],
}


@dataclass(frozen=True)
class Cost:
    """One recurrence.

    Attributes:
        way: The policy, or ``aot_eager``: plain torch.compile with that backend, one forward and backward.
        steps: How often the cell is called.
        nodes: Number of nodes of the rewritten joint graph; 0 for ``aot_eager``.
        seconds: CPU seconds of the process.
    """

    way: str
    steps: int
    nodes: int
    seconds: float


def trace(policy: str, steps: int) -> Cost:
    """Trace once."""
    model, x = gr.transform(Recurrence(steps), POLICIES[policy]), torch.randn(4, 8)
    begin = time.process_time()
    graph = model.trace(x)
    seconds = time.process_time() - begin
    return Cost(policy, steps, len(graph.graph_module.graph.nodes), seconds)


def compile_plain(steps: int) -> Cost:
    """Compile the model by torch alone, op by op, and run it once."""
    torch.compiler.reset()
    model, x = torch.compile(Recurrence(steps), backend="aot_eager"), torch.randn(4, 8)
    begin = time.process_time()
    model(x).backward()
    return Cost("aot_eager", steps, 0, time.process_time() - begin)


def main() -> None:
    """Measure all sizes in turn, each way after the other."""
    torch.set_num_threads(1)
    trace("clips", 3)
    compile_plain(3)
    sizes = [int(text) for text in sys.argv[1:]] or STEPS
    costs = [cost for n in sizes for cost in (trace("clips", n), trace("empty", n), compile_plain(n))]
    machine = {"python": platform.python_version(), "torch": torch.__version__, "threads": 1}
    print(json.dumps({"machine": machine, "costs": [asdict(cost) for cost in costs]}, indent=1))


if __name__ == "__main__":
    main()
