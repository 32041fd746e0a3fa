"""Cost of the first step of a GPT op by op, with actions everywhere, beside plain torch.compile with ``aot_eager``.

Run as ``python tests/benchmarks/first_step_cost.py [--rounds 3] [layers ...]``; writes JSON to the standard output. The
ways are taken in turn. Beside CPU seconds it counts the Python calls of one more step, which do not depend on the load
of the machine.
"""

from __future__ import annotations

import argparse
import cProfile
import json
import platform
import pstats
import sys
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import median

import torch
from torch import nn

sys.path.insert(0, str(Path(__file__).parent.parent))

import gradrewrite as gr
from gradrewrite.passes import CheckFinite, ClipByGlobalNorm, ClipByNorm, Observe

from models.gpt import Gpt, batch

LAYERS = (2, 8, 32)
POLICY: gr.Policy = [
    gr.on("error:*", [ClipByNorm(1.0), CheckFinite("record")]),
    gr.on("activation:*", [Observe("norm", "max_abs", "zeros"), CheckFinite("record")]),
    gr.on("gradient:*", [Observe("norm", "max_abs"), CheckFinite("skip"), ClipByGlobalNorm(1.0)]),
]


@dataclass(frozen=True)
class Cost:
    """The first steps of one model in one way.

    Attributes:
        way: ``actions``, ``empty`` (the empty policy) or ``aot_eager``.
        layers: Number of layers.
        edits: Number of actions that were inserted.
        seconds: CPU seconds of each round.
        calls: Python calls of a step.
    """

    way: str
    layers: int
    edits: int
    seconds: list[float]
    calls: int


def _plain(layers: int) -> nn.Module:
    torch.compiler.reset()
    model = Gpt(layers)
    model.compile(backend="aot_eager")
    return model


WAYS: dict[str, Callable[[int], nn.Module]] = {
    "actions": lambda layers: gr.transform(Gpt(layers), POLICY),
    "empty": lambda layers: gr.transform(Gpt(layers), []),
    "aot_eager": _plain,
}


def step(model: nn.Module) -> None:
    """Trace, rewrite and run one step."""
    model(*batch()).backward()


def seconds(way: str, layers: int) -> float:
    """CPU seconds of the first step."""
    model = WAYS[way](layers)
    begin = time.process_time()
    step(model)
    return time.process_time() - begin


def calls(way: str, layers: int) -> tuple[int, int]:
    """Python calls of the first step, and the number of edits."""
    model, profile = WAYS[way](layers), cProfile.Profile()
    profile.enable()
    step(model)
    profile.disable()
    graphs = model.explain().graphs if isinstance(model, gr.RewrittenModule) else ()
    return int(pstats.Stats(profile).total_calls), sum(len(graph.edits) for graph in graphs)  # type: ignore[attr-defined]


def main() -> None:
    """Measure all sizes in turn, each way after the other."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("layers", nargs="*", type=int, default=LAYERS)
    parser.add_argument("--rounds", type=int, default=3)
    options = parser.parse_args()
    torch.set_num_threads(1)
    for way in WAYS:
        seconds(way, 1)
    costs = []
    for layers in options.layers:
        taken: dict[str, list[float]] = {way: [] for way in WAYS}
        for _ in range(options.rounds):
            for way, found in taken.items():
                found.append(seconds(way, layers))
        for way, found in taken.items():
            number, edits = calls(way, layers)
            costs.append(Cost(way, layers, edits, found, number))
            print(f"{layers} layers, {way}: {median(found):.2f} s, {number / 1e6:.2f} million calls", file=sys.stderr)
    machine = {"python": platform.python_version(), "torch": torch.__version__, "threads": 1}
    print(json.dumps({"machine": machine, "costs": [asdict(cost) for cost in costs]}, indent=1))


if __name__ == "__main__":
    main()
