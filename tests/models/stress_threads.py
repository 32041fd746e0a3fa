"""Threads that transform, compile, train and delete models; run ``python tests/models/stress_threads.py --help``."""

from __future__ import annotations

import argparse
import gc
import itertools
import json
import threading
import time
import types
import warnings
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path

import torch
from torch import Tensor, nn
from torch._dynamo.guards import CheckFunctionManager
from torch._subclasses.fake_tensor import FakeTensor

import gradrewrite as gr
from gradrewrite.passes import CheckFinite, ClipByGlobalNorm, ClipByValue, Keep, Observe

_numbers = itertools.count()


class Net(nn.Module):
    """A small model; with ``breaks`` its graph is broken in the middle."""

    def __init__(self, *, breaks: bool) -> None:
        super().__init__()
        self.first, self.name, self.last = nn.Linear(4, 8), nn.Identity(), nn.Linear(8, 1)
        self.breaks = breaks

    def forward(self, x: Tensor) -> Tensor:
        h = self.name(self.first(x))
        if self.breaks:
            torch._dynamo.graph_break()
        return self.last(h.relu())


@dataclass
class Outcome:
    """The outcome of a run.

    Attributes:
        threads: How many threads ran.
        seconds: For how long.
        models: How many models were made, trained and deleted.
        wrong: Descriptions of gradients that differed from those of one thread.
        errors: Exceptions.
        made: How many of them after each fifth of the run; what follows was counted then.
        tensors: How many tensors were alive.
        fakes: How many fake tensors, which the tracer makes.
        ours: How many objects of gradrewrite's own classes.
        guards: How many compilations whose guards torch still had.
        objects: How many objects the garbage collector knew.
        resident: Resident memory, in MiB.
    """

    threads: int
    seconds: float
    models: int = 0
    wrong: list[str] = field(default_factory=list)
    errors: list[str] = field(default_factory=list)
    made: list[int] = field(default_factory=list)
    tensors: list[int] = field(default_factory=list)
    fakes: list[int] = field(default_factory=list)
    ours: list[int] = field(default_factory=list)
    guards: list[int] = field(default_factory=list)
    objects: list[int] = field(default_factory=list)
    resident: list[float] = field(default_factory=list)

    def measure(self) -> None:
        """Count what is alive once everything that can be freed is freed.

        One collection is not enough: what autograd's nodes and finalizers hold becomes garbage during it.
        """
        while gc.collect():
            pass
        kinds = [type(known) for known in gc.get_objects()]
        self.made.append(self.models)
        self.tensors.append(sum(issubclass(kind, Tensor) and kind is not FakeTensor for kind in kinds))
        self.fakes.append(sum(kind is FakeTensor for kind in kinds))
        self.ours.append(sum(str(kind.__module__).startswith("gradrewrite.") for kind in kinds))
        self.guards.append(sum(kind is CheckFunctionManager for kind in kinds))
        self.objects.append(len(kinds))
        self.resident.append(round(resident(), 1))

    def growth(self) -> dict[str, float]:
        """Return the growth for each model, from the second measurement to the last."""
        models = max(1, self.made[-1] - self.made[1])
        grown = {name: (getattr(self, name)[-1] - getattr(self, name)[1]) / models for name in COUNTED}
        return {name: round(value, 3) for name, value in grown.items()}


KINDS = 6
COUNTED = ("tensors", "fakes", "ours", "guards", "objects", "resident")


def train(kind: int, *, compiled: bool) -> list[Tensor]:
    """Make a model of one of six kinds, train it for two steps, and return its gradients."""
    breaks = kind % 2 == 1
    policy = [gr.on("error:name", ClipByValue(0.1)), gr.on("gradient:*", ClipByGlobalNorm(0.5))]
    if kind >= 4:  # and a graph of the step
        policy.append(gr.on("step:*", [Observe("norm"), ClipByGlobalNorm(0.1)]))
    elif kind >= 2:
        policy += [gr.on("gradient:*", [Observe("norm"), CheckFinite("skip")]), gr.on("error:name", Keep())]
    generator = torch.Generator().manual_seed(kind)
    plain = Net(breaks=breaks)
    with torch.no_grad():
        for parameter in plain.parameters():
            parameter.copy_(torch.randn(parameter.shape, generator=generator))
    model = gr.transform(plain, policy, fullgraph=not breaks, dynamic=False)
    if compiled:
        model.compile()
    optimizer = gr.guard(torch.optim.SGD(model.parameters(), lr=0.1), model)
    gradients = []
    for size in (3, 5):
        optimizer.zero_grad()
        model(torch.randn(size, 4, generator=generator)).square().sum().backward()
        gradients += [parameter.grad.clone() for parameter in model.parameters()]
        optimizer.step()
    return gradients


def resident() -> float:
    """Resident memory of this process in MiB; NaN where the system does not tell."""
    status = Path("/proc/self/status")
    if not status.exists():
        return float("nan")
    line = next(text for text in status.read_text().splitlines() if text.startswith("VmRSS"))
    return int(line.split()[1]) / 1024


def work(outcome: Outcome, wanted: Sequence[Sequence[Tensor]], end: float, first: int, compiled: bool) -> None:
    """Train models of all kinds in turn, until a time of the monotonic clock."""
    number = first
    while time.monotonic() < end:
        kind = number % len(wanted)
        number += 1
        try:
            got = train(kind, compiled=compiled)
        except Exception as err:
            outcome.errors.append(f"kind {kind}: {type(err).__name__}: {err}")
            return
        differences = [float((g - w).abs().max()) for g, w in zip(got, wanted[kind], strict=True)]
        if any(differences):
            outcome.wrong.append(f"kind {kind}: gradients differ by {differences}")
        outcome.models += 1


def train_plain(kind: int, *, compiled: bool) -> None:
    """Train a model of this kind by torch.compile alone, then let torch forget all that it has compiled."""
    breaks = kind % 2 == 1
    model = Net(breaks=breaks)
    code = Net.forward.__code__.replace(co_name=f"forward_{next(_numbers)}")
    forward = types.FunctionType(code, Net.forward.__globals__)
    backend = "inductor" if compiled else "aot_eager"
    run = torch.compile(forward, backend=backend, fullgraph=not breaks, dynamic=False)
    for size in (3, 5):
        run(model, torch.ones(size, 4)).square().sum().backward()
    torch.compiler.reset()


def measure_plain(models: int, *, compiled: bool) -> Outcome:
    """Measure the growth for each model under torch.compile alone, on one thread."""
    outcome = Outcome(threads=1, seconds=0.0)
    for _ in range(3):
        for kind in range(models):
            train_plain(kind, compiled=compiled)
        outcome.models += models
        outcome.measure()
    return outcome


def stress(threads: int, seconds: float, *, compiled: bool) -> Outcome:
    """Run, and measure memory five times while all threads wait."""
    warnings.simplefilter("ignore")
    outcome = Outcome(threads, seconds)
    wanted = [train(kind, compiled=compiled) for kind in range(KINDS)]
    for _ in range(5):
        end = time.monotonic() + seconds / 5
        pool = [threading.Thread(target=work, args=(outcome, wanted, end, first, compiled)) for first in range(threads)]
        for thread in pool:
            thread.start()
        for thread in pool:
            thread.join()
        outcome.measure()
    return outcome


def main() -> int:
    """Print the outcome as JSON; 1 if a gradient was wrong, a thread failed or something of ours stayed."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--seconds", type=float, default=60.0)
    parser.add_argument("--compiled", action="store_true", help="by Inductor, not op by op")
    arguments = parser.parse_args()
    outcome = stress(arguments.threads, arguments.seconds, compiled=arguments.compiled)
    plain = measure_plain(4, compiled=arguments.compiled)
    found = {**asdict(outcome), "growth": outcome.growth(), "growth_of_plain_torch": plain.growth()}
    print(json.dumps(found, indent=2))
    return bool(outcome.wrong or outcome.errors or outcome.ours[-1] > outcome.ours[1])


if __name__ == "__main__":
    raise SystemExit(main())
