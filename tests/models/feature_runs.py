"""Runs of single features, for the comparison of two checkouts: traces, records, gradients and parameters of each."""

from __future__ import annotations

import warnings
from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, distributed, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

import gradrewrite as gr
import gradrewrite.passes as P

from models.digests import digest, digest_of, without_own_lines

STEPS = 4
WIDTH = 6


def net() -> nn.Module:
    """Return three layers."""
    layers = {"first": nn.Linear(WIDTH, 8), "act": nn.Tanh(), "middle": nn.Linear(8, 8), "relu": nn.ReLU()}
    return nn.Sequential(OrderedDict({**layers, "head": nn.Linear(8, 4)}))


class Blocks(nn.Module):
    """Equal blocks, for regions."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh()) for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = x + block(x)
        return x


class TwoLosses(nn.Module):
    """Two losses of one trunk."""

    def __init__(self) -> None:
        super().__init__()
        self.trunk, self.one, self.two = nn.Linear(WIDTH, 8), nn.Linear(8, 2), nn.Linear(8, 3)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        hidden = self.trunk(x).tanh()
        return self.one(hidden).square().mean(), self.two(hidden).exp().mean()


class Recurrent(nn.Module):
    """One cell, called several times."""

    def __init__(self) -> None:
        super().__init__()
        self.cell, self.head = nn.RNNCell(WIDTH, WIDTH), nn.Linear(WIDTH, 4)

    def forward(self, x: Tensor) -> Tensor:
        state = x
        for _ in range(4):
            state = self.cell(x, state)
        result: Tensor = self.head(state)
        return result


class Broken(nn.Module):
    """A graph break between two layers."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.head = nn.Linear(WIDTH, 8), nn.Linear(8, 4)

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.first(x).tanh()
        torch._dynamo.graph_break()
        result: Tensor = self.head(hidden)
        return result


def toward_parameter(g: Tensor, p: Tensor) -> Tensor:
    """Read a gradient and its value."""
    gr.record("alignment", (g * p).sum())
    return g + 0.01 * p


def smoothed() -> Callable[[Tensor], Tensor]:
    """Return a function with a state."""
    mean = gr.State(name="mean")

    def divide(g: Tensor) -> Tensor:
        mean.set(0.9 * mean + 0.1 * g.square().mean())
        return g / (1 + mean.sqrt())

    return divide


def falling(step: int) -> float:
    """Return the bound of a step."""
    return 0.1 / (1 + step)


def equalize(gramian: Tensor) -> Tensor:
    """Return weights of losses that make their gradients equally long."""
    return gramian.diagonal().rsqrt()


@dataclass(frozen=True)
class Feature:
    """A policy on a model, trained for some steps."""

    policy: Callable[[], Sequence[Any]]  # anew for each run
    make: Callable[[], nn.Module] = net
    options: Mapping[str, Any] = field(default_factory=dict)  # of ``gr.transform``
    rows: int = 5  # of a batch
    micro_batches: int = 1
    sample: int = 1
    bad_step: int = -1  # whose input is not finite
    scale: float = 0.0  # of the loss
    reads_input: bool = False  # the input has a gradient
    has_trace: bool = True


def _rules(*rules: tuple[str, Any]) -> list[Any]:
    return [gr.on(pattern, action) for pattern, action in rules]


FEATURES: Mapping[str, Feature] = {
    "saved forms": Feature(
        lambda: _rules(
            ("saved:act*", P.Store("bfloat16")),
            ("saved:relu*", [P.Store("int8"), P.Observe("stored_error")]),
            ("error:*", P.ClipByNorm(0.1)),
        ),
        rows=256,
    ),
    "recompute": Feature(
        lambda: _rules(("saved:act*", P.Recompute()), ("activation:*", P.Observe("norm", "zeros"))), rows=256
    ),
    "losses": Feature(
        lambda: _rules(
            ("gradient:trunk.*", [P.Observe("norm"), P.WeighLosses(P.UPGrad()), P.ClipByNorm(0.1)]),
            ("error:trunk", P.Observe("loss_norms", "loss_cosine", "norm")),
            ("gradient:*", P.ClipByGlobalNorm(0.5)),
        ),
        TwoLosses,
    ),
    "losses by a function": Feature(
        lambda: _rules(("error:trunk", [P.Scale(2.0), P.WeighLosses(equalize), P.Observe("max_abs")])), TwoLosses
    ),
    "examples": Feature(
        lambda: _rules(
            ("gradient:*", P.Observe("example_norm_mean", "noise_scale", "max_abs")),
            ("gradient:*", P.ClipPerExample(0.05)),
            ("gradient:head.*", P.Keep("example_norms")),
        )
    ),
    "step": Feature(
        lambda: _rules(
            ("step:*", [P.CheckFinite("skip"), P.Observe("norm"), P.ClipByNorm(0.5), P.AdaptiveClip(0.01)]),
            ("step:*.weight", [P.DecayWeights(0.01), P.L2(0.1)]),
            ("step:*", [P.ClipByGlobalNorm(0.1, log=True), P.SkipSpikes(2.0, window=2)]),
        ),
        micro_batches=2,
        bad_step=2,
    ),
    "step with one factor": Feature(lambda: _rules(("step:*", P.ClipByGlobalNorm(0.1)), ("error:*", P.Zero()))),
    "adaptive groups": Feature(
        lambda: _rules(
            ("gradient:first.*", P.AutoClip(50.0, group="auto")),
            ("gradient:head.*", P.ZClip(0.5, group="z")),
            ("step:*", P.AutoClip(10.0)),
        )
    ),
    "parameters and state": Feature(
        lambda: _rules(
            ("param:*", [P.Observe("norm", "max_abs"), P.CheckFinite("record")]),
            ("state:*exp_avg*", [P.Observe("std"), P.Keep()]),
        )
    ),
    "sampling": Feature(
        lambda: _rules(
            ("error:*", [P.Observe("norm", every=2), P.ClipByNorm(0.1), P.Keep(every=3)]),
            ("step:*", [P.Observe("norm", every=2), P.ClipByValue(0.1, log=True)]),
            ("param:*", P.Observe("norm", every=3)),
        )
    ),
    "sampled by the monitor": Feature(
        lambda: _rules(("error:*", P.Observe("norm", "exponents")), ("gradient:*", P.CheckFinite("warn"))), sample=3
    ),
    "states and schedules": Feature(
        lambda: _rules(
            ("error:*", smoothed()),
            ("gradient:*", [P.ClipByNorm(gr.Schedule(falling)), P.Every(2, P.Scale(0.5))]),
            ("step:*", P.After(1, P.ClipByValue(0.05))),
            ("gradient:*", P.ClipByGlobalNorm(gr.Schedule(falling))),
        )
    ),
    "regions": Feature(
        lambda: _rules(
            ("error:blocks.*", [P.ClipByNorm({"blocks.0*": 0.1, "*": 0.2}), P.CheckFinite("skip")]),
            ("gradient:*", [P.Observe("norm"), toward_parameter]),
            ("step:*", P.ClipByGlobalNorm(0.1)),
        ),
        Blocks,
        {"regions": "blocks.*"},
        bad_step=1,
        has_trace=False,
    ),
    "functions of values": Feature(
        lambda: _rules(
            ("error:*", toward_parameter), ("gradient:*", toward_parameter), ("step:*", toward_parameter),
            ("input:*", P.ClipByNorm(0.1)),
        ),
        reads_input=True,
    ),
    "loss scale": Feature(
        lambda: _rules(
            ("error:*", [P.ClipByNorm(0.1, log=True), P.Observe("norm", "std", "fingerprint")]),
            ("gradient:*", [toward_parameter, P.ClipByGlobalNorm(0.3)]),
            ("step:*", P.ClipByGlobalNorm(0.2)),
        ),
        scale=2.0**10,
    ),
    "calls": Feature(
        lambda: _rules(
            ("error:cell*", [P.ClipByNorm(0.01), P.CheckFinite("record")]),
            ("activation:cell*", P.Observe("saturated", "norm")),
            ("gradient:cell.*", P.ClipByGlobalNorm(0.1, group="cell", log=True)),
        ),
        Recurrent,
    ),
    "parts": Feature(
        lambda: _rules(
            ("error:*", [P.ClipByNorm(0.1), P.CheckFinite("skip")]), ("gradient:*", P.Observe("norm", "nonfinite"))
        ),
        Broken,
        {"fullgraph": False},
        bad_step=2,
        has_trace=False,
    ),
}  # fmt: skip


def observe(name: str, *, compiled: bool = False) -> dict[str, Any]:
    """Train a model; return traces, gradients and parameters as digests, and the records of each step."""
    feature = FEATURES[name]
    torch.manual_seed(0)
    scaler = torch.amp.GradScaler("cpu", init_scale=feature.scale) if feature.scale else None
    plain = feature.make()
    options = {**feature.options, **({"loss_scale": scaler} if scaler is not None else {})}
    model = gr.transform(plain, feature.policy(), monitor=gr.Monitor(sample=feature.sample), **options)
    if compiled:
        model.compile()
    optimizer = gr.guard(torch.optim.Adam(model.parameters(), lr=0.01), model)
    found: dict[str, Any] = {"records": [], "gradients": []}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        if feature.has_trace:
            found["trace"] = digest(without_own_lines(str(model.trace(_batch(0, feature)))))
        for step in range(STEPS):
            for part in range(feature.micro_batches):
                loss = _total(
                    model(_batch(step * feature.micro_batches + part, feature, is_bad=step == feature.bad_step))
                )
                (loss if scaler is None else scaler.scale(loss)).backward()
            found["gradients"].append(digest_of([p.grad for p in model.parameters()]))
            if scaler is None:
                optimizer.step()
            else:
                scaler.step(optimizer)
                scaler.update()
            found["records"].append({key: repr(value) for key, value in model.monitor.latest().items()})
            kept = model.monitor.kept()
            found["gradients"].append(digest_of([kept[site] for site in sorted(kept, key=str)]))
            optimizer.zero_grad()
        found["skipped"] = model.monitor.skipped
    found["step trace"] = digest(without_own_lines(str(model.trace_step(optimizer))))
    found["parameters"] = digest_of(list(model.parameters()))
    found["gradients"] = digest(" ".join(found["gradients"]))
    return found


def observe_ranks(path: Path) -> dict[str, Any]:
    """Train on two processes, with plain and with sharded parameters; see ``observe``."""
    processes = torch.multiprocessing.start_processes  # type: ignore[attr-defined]
    processes(_observe_rank, (path,), nprocs=2, start_method="spawn")
    return {f"rank {rank}": torch.load(path / f"{rank}.pt", weights_only=True) for rank in range(2)}


def _observe_rank(rank: int, path: Path) -> None:
    from ranks import join

    join(path, rank, 2)
    found: dict[str, Any] = {}
    for name, is_sharded in (("plain", False), ("sharded", True)):
        torch.manual_seed(0)
        rules = _rules(
            ("error:*", [P.Observe("norm", "std"), P.ClipByNorm(0.1)]),
            ("step:*", [P.Observe("norm", "max_abs"), P.ClipByValue(0.1), P.ClipByGlobalNorm(0.2)]),
            ("param:*", P.Observe("norm")),
        )
        if not is_sharded:
            rules += _rules(("gradient:*", [P.AllReduce(), P.CheckFinite("skip"), P.ClipByNorm(0.5)]))
        plain = Blocks()
        if is_sharded:
            fully_shard(plain, mesh=init_device_mesh("cpu", (2,)))
        model = gr.transform(plain, rules)
        optimizer = gr.guard(torch.optim.Adam(model.parameters(), lr=0.01), model)
        records = []
        for _ in range(STEPS):
            model(torch.randn(5, WIDTH) + rank).square().sum().backward()
            optimizer.step()
            optimizer.zero_grad()
            records.append({key: repr(value) for key, value in model.monitor.reduce().items()})
        own = [p.detach() if not is_sharded else p.detach().to_local() for p in model.parameters()]  # type: ignore[attr-defined]
        found[name] = {"records": records, "parameters": digest_of(own)}
        torch.compiler.reset()
        distributed.barrier()
    torch.save(found, path / f"{rank}.pt")
    distributed.destroy_process_group()


def _batch(number: int, feature: Feature, *, is_bad: bool = False) -> Tensor:
    torch.manual_seed(100 + number)
    x = torch.randn(feature.rows, WIDTH)
    if is_bad:
        x[3, 2] = torch.inf
    return x.requires_grad_(feature.reads_input)


def _total(output: Tensor | tuple[Tensor, ...]) -> Tensor:
    return torch.stack(output).sum() if isinstance(output, tuple) else output.square().sum(dim=1).mean()
