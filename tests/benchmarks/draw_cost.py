"""What pictures of large graphs cost: seconds and bytes, without tracing.

Run as ``python tests/benchmarks/draw_cost.py [layers ...]``; writes JSON to the standard output.
"""

from __future__ import annotations

import json
import platform
import statistics
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).parent.parent))

from gradrewrite import viz
from gradrewrite.ir.joint_graph import JointGraph

from models.graphs import recurrent, transformer

REPEATS = 5
CASES: tuple[tuple[str, viz.Format], ...] = (
    ("ladder", "svg"),
    ("overview", "svg"),
    ("ladder", "html"),
    ("ladder", "dot"),
)


@dataclass(frozen=True)
class Cost:
    """One picture of one graph.

    Attributes:
        graph: The graph.
        nodes: How many nodes it has.
        inserted: How many of them were inserted.
        picture: View and format.
        median: Median of the seconds from the graph to the file.
        slowest: Its maximum.
        kilobytes: Size of the file.
    """

    graph: str
    nodes: int
    inserted: int
    picture: str
    median: float
    slowest: float
    kilobytes: int


def measure(name: str, graph: JointGraph, folder: Path) -> list[Cost]:
    """Draw each picture several times, in turn."""
    seconds: dict[tuple[str, str], list[float]] = {case: [] for case in CASES}
    sizes: dict[tuple[str, str], int] = {}
    for _ in range(REPEATS):
        for view, form in CASES:
            start = time.perf_counter()
            path = viz.draw(graph, view, title=name).render(folder / "picture", form)
            seconds[view, form].append(time.perf_counter() - start)
            sizes[view, form] = Path(path).stat().st_size // 1024
    nodes = len(graph.graph_module.graph.nodes)
    inserted = sum(len(e.nodes) for e in graph.edits) + len(graph.record_nodes)
    return [
        Cost(name, nodes, inserted, f"{v}.{f}", statistics.median(seconds[v, f]), max(seconds[v, f]), sizes[v, f])
        for v, f in CASES
    ]


def main(argv: Sequence[str]) -> None:
    """Measure and print."""
    layers = [int(word) for word in argv] or [24]
    graphs = {"recurrent, 40 steps": recurrent()}
    for count in layers:
        graphs[f"GPT, {count} layers, errors clipped"] = transformer(count, clips_gradients=False)
        graphs[f"GPT, {count} layers, errors and gradients clipped, logged"] = transformer(count)
    with tempfile.TemporaryDirectory() as folder:
        costs = [cost for name, graph in graphs.items() for cost in measure(name, graph, Path(folder))]
    machine = {"python": platform.python_version(), "torch": torch.__version__, "repeats": REPEATS}
    print(json.dumps({**machine, "costs": [asdict(cost) for cost in costs]}, indent=1))


if __name__ == "__main__":
    main(sys.argv[1:])
