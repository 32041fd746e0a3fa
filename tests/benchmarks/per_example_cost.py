"""The cost of per-example gradients: time and memory beside plain torch.compile, ``vmap(grad)`` and Opacus.

    OMP_WAIT_POLICY=PASSIVE python tests/benchmarks/per_example_cost.py [MODEL ...] [--ways WAY ...] [--out FILE.json]

Each way is forward and backward of one model on one batch, without an optimizer: ``clip`` ends with the mean of the
clipped gradients, ``moment`` with the plain gradient and the mean of the squared ones. Those of ``vmap`` are one
compiled function, those of Opacus are not compiled, and left out where it is not installed. Gradients of the ways are
compared before they are measured. Processor time of one thread, in rounds in which the ways take turns; peak memory
is that of tensors that live at one time, with parameters and inputs.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import os
import platform
import statistics
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

sys.path.insert(0, str(Path(__file__).parent.parent))

import gradrewrite as gr
from gradrewrite.passes import ClipPerExample, Keep

from benchmarks.measuring import peak_bytes, prepare, time_in_turn
from benchmarks.per_example_models import CASES, Case, WithLoss, losses_of

MAX_NORM = 0.5  # below the norm of every example here, so that the clip acts
# Largest difference to our gradients, relative to the largest element. Of two ways in float32 one unit at the kink of a
# ReLU may be on either side: 2e-3 between plain eager and compiled gradients of ResNet-20. Tests compare in float64.
CLOSE = 1e-2


@dataclass(frozen=True)
class Way:
    """Forward and backward in one way.

    Attributes:
        net: Its parameters get the gradients.
        run: Computes them.
        clear: Lets go of them.
        moments: The mean squared gradients by parameter, after ``run``; empty where there are none.
    """

    net: nn.Module
    run: Callable[[], Any]
    clear: Callable[[], Any]
    moments: Callable[[], Mapping[str, Tensor]] = dict

    def __call__(self) -> None:
        """Run."""
        self.run()


@dataclass(frozen=True)
class Row:
    """The figures of one way.

    Attributes:
        model: Name of the case.
        way: Name of the way.
        seconds: Median of processor times.
        ratio: First quartile, median and third quartile of the ratios to plain, each of one round.
        peak: Bytes of tensors at one time, parameters and inputs included.
        peak_ratio: The same over that of plain.
    """

    model: str
    way: str
    seconds: float
    ratio: tuple[float, float, float]
    peak: int
    peak_ratio: float


def _net_of(case: Case) -> nn.Module:
    torch.manual_seed(0)
    return case.make()


def plain(case: Case, x: Tensor, y: Tensor) -> Way:
    """Plain torch.compile: the mean gradient."""
    net = _net_of(case)
    run = torch.compile(WithLoss(net), fullgraph=True)
    return Way(net, lambda: run(x, y).backward(), net.zero_grad)


def of_ours(case: Case, x: Tensor, y: Tensor, action: Any) -> Way:
    """A policy with one action at every gradient, compiled."""
    net = _net_of(case)
    model = gr.transform(WithLoss(net), gr.on("gradient:*", action))
    model.compile()

    def moments() -> dict[str, Tensor]:
        return {site.name.removeprefix("net."): t for site, t in model.monitor.kept("second_moment").items()}

    is_kept = isinstance(action, Keep)
    return Way(net, lambda: model(x, y).backward(), net.zero_grad, moments if is_kept else dict)


def of_vmap(case: Case, x: Tensor, y: Tensor, what: str) -> Way:
    """The same by ``vmap(grad)``, in one compiled function."""
    net = _net_of(case)
    own = dict(net.named_parameters())
    parameters = {name: p.detach() for name, p in own.items()}

    def loss(given: dict[str, Tensor], row: Tensor, target: Tensor) -> Tensor:
        logits = torch.func.functional_call(net, given, (row.unsqueeze(0),))
        return losses_of(logits, target.unsqueeze(0)).mean()

    terms_of = torch.func.vmap(torch.func.grad(loss), in_dims=(None, 0, 0))

    def clip(given: dict[str, Tensor], x: Tensor, y: Tensor) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
        terms = terms_of(given, x, y)
        norms = torch.stack([t.flatten(1).square().sum(1) for t in terms.values()]).sum(0).sqrt()
        factors = (MAX_NORM / norms).clamp(max=1) / len(norms)
        return {name: torch.einsum("b,b...->...", factors, t) for name, t in terms.items()}, {}

    def moment(given: dict[str, Tensor], x: Tensor, y: Tensor) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
        terms = terms_of(given, x, y)
        return {name: t.mean(0) for name, t in terms.items()}, {name: t.square().mean(0) for name, t in terms.items()}

    compiled = torch.compile(clip if what == "clip" else moment, fullgraph=True)
    kept: dict[str, Tensor] = {}

    def run() -> None:
        gradients, found = compiled(parameters, x, y)
        for name, gradient in gradients.items():
            own[name].grad = gradient
        kept.update(found)

    def clear() -> None:
        net.zero_grad()
        kept.clear()

    return Way(net, run, clear, lambda: kept)


def of_opacus_hooks(case: Case, x: Tensor, y: Tensor) -> Way:
    """Clipping by Opacus: hooks write the gradients of examples, its optimizer clips them."""
    from opacus import GradSampleModule
    from opacus.optimizers import DPOptimizer

    net = _net_of(case)
    module = GradSampleModule(net, loss_reduction="mean")
    optimizer = DPOptimizer(
        torch.optim.SGD(net.parameters()), noise_multiplier=0.0, max_grad_norm=MAX_NORM, expected_batch_size=len(x)
    )

    def run() -> None:
        losses_of(module(x), y).mean().backward()
        optimizer.pre_step()

    return Way(net, run, lambda: optimizer.zero_grad(set_to_none=True))


class _LossOfEach:
    """The loss as Opacus calls it."""

    reduction = "mean"

    def __call__(self, logits: Tensor, targets: Tensor) -> Tensor:
        return losses_of(logits, targets)


def of_opacus_ghost(case: Case, x: Tensor, y: Tensor) -> Way:
    """Clipping by Opacus: norms by hooks in a first backward, weighted losses in a second one."""
    from opacus.grad_sample import GradSampleModuleFastGradientClipping
    from opacus.optimizers import DPOptimizerFastGradientClipping
    from opacus.utils.fast_gradient_clipping_utils import DPLossFastGradientClipping

    net = _net_of(case)
    module = GradSampleModuleFastGradientClipping(net, max_grad_norm=MAX_NORM, loss_reduction="mean")
    optimizer = DPOptimizerFastGradientClipping(
        torch.optim.SGD(net.parameters()), noise_multiplier=0.0, max_grad_norm=MAX_NORM, expected_batch_size=len(x)
    )
    loss = DPLossFastGradientClipping(module, optimizer, _LossOfEach())

    def run() -> None:
        loss(module(x), y).backward()
        optimizer.pre_step()

    return Way(net, run, lambda: optimizer.zero_grad(set_to_none=True))


def ways_of(case: Case) -> dict[str, Way]:
    """All ways, on the same batch; those of Opacus if it is installed."""
    torch.manual_seed(1)
    x, y = case.batch()
    ways = {
        "plain": plain(case, x, y),
        "clip": of_ours(case, x, y, ClipPerExample(MAX_NORM)),
        "clip, vmap": of_vmap(case, x, y, "clip"),
        "moment": of_ours(case, x, y, Keep("second_moment")),
        "moment, vmap": of_vmap(case, x, y, "moment"),
    }
    if importlib.util.find_spec("opacus") is not None:
        ways["clip, Opacus hooks"] = of_opacus_hooks(case, x, y)
        ways["clip, Opacus ghost"] = of_opacus_ghost(case, x, y)
    return ways


def check(ways: Mapping[str, Way]) -> None:
    """Raise an error where the gradients or moments of two ways are not the same."""
    results: dict[str, dict[str, dict[str, Tensor | None]]] = {}
    for name, way in ways.items():
        begin = time.process_time()
        way()
        print(f"{name}: {time.process_time() - begin:.0f} s to compile", file=sys.stderr, flush=True)
        gradients = {key: p.grad for key, p in way.net.named_parameters()}
        results[name] = {"gradient": gradients, "moment": dict(way.moments())}
        way.clear()
    for name in ways:
        ours = "clip" if name.startswith("clip") else "moment"
        wanted = results.get(ours, results[name])
        for what, found in results[name].items():
            for key, tensor in found.items():
                other = wanted[what][key]
                assert tensor is not None
                assert other is not None
                largest = float((tensor - other).abs().max() / other.abs().max())
                if not largest < CLOSE:
                    raise AssertionError(f"{name}: {what} of {key} differs by {largest:.1e} from ours")


def measure(model: str, chosen: list[str], rounds: int) -> Iterator[Row]:
    """Measure ways of one model, all if none is chosen."""
    case = CASES[model]
    ways = {name: way for name, way in ways_of(case).items() if not chosen or name in ("plain", *chosen)}
    check(ways)
    times = time_in_turn(ways, lambda name: ways[name].clear(), "cpu", rounds, 0)
    torch.manual_seed(1)
    tensors = [*ways["plain"].net.parameters(), *case.batch()]
    state = sum(t.numel() * t.element_size() for t in tensors)
    peaks = {name: peak_bytes(way, "cpu") + state for name, way in ways.items()}
    for name, seconds in times.items():
        low, middle, high = statistics.quantiles(
            (a / b for a, b in zip(seconds, times["plain"], strict=True)), n=4, method="inclusive"
        )
        peak = peaks[name]
        yield Row(model, name, statistics.median(seconds), (low, middle, high), peak, peak / peaks["plain"])


def line(row: Row) -> str:
    """A line of the table."""
    low, middle, high = row.ratio
    times = f"{row.seconds * 1e3:.1f} | {middle:.2f} ({low:.2f}-{high:.2f})"
    return f"| {row.model} | {row.way} | {times} | {row.peak / 1e6:.1f} | {row.peak_ratio:.2f} |"


def main() -> None:
    """Measure, and print a table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("models", nargs="*", metavar="MODEL", help=f"of {', '.join(CASES)}; all if none is given")
    parser.add_argument("--ways", nargs="+", metavar="WAY", default=[], help="of all ways, these and plain")
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    prepare()
    print("| model | way | ms | time / plain (quartiles) | peak MB | peak / plain |\n|---|---|---|---|---|---|")
    rows: list[Row] = []
    for model in options.models or CASES:
        for row in measure(model, options.ways, options.rounds):
            print(line(row), flush=True)
            rows.append(row)
    if importlib.util.find_spec("opacus") is None:
        print("Opacus is not installed; its ways are left out.")
    if options.out is not None:
        machine = {"python": platform.python_version(), "torch": torch.__version__, "threads": 1}
        machine |= {"cores": os.cpu_count() or 0, "load": round(os.getloadavg()[0], 1)}
        found = {"machine": machine, "rounds": options.rounds, "rows": [asdict(row) for row in rows]}
        options.out.write_text(json.dumps(found, indent=1) + "\n")


if __name__ == "__main__":
    main()
