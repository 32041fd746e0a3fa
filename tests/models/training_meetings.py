"""What a training step as one graph meets: every kind of site and action, with a model and how to tell that it acts."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

import gradrewrite as gr
from gradrewrite import passes
from gradrewrite.passes import CheckFinite, ClipByGlobalNorm, ClipByNorm, ClipByValue, Keep, Observe

from models.small import Lambda, SquaredTwoLayers
from models.training_steps import Optimize, Pair, adamw, batch, sgd


class TwoTasks(nn.Module):
    """Two losses with opposite wishes behind a trunk."""

    def __init__(self) -> None:
        super().__init__()
        self.trunk, self.a, self.b = nn.Linear(4, 5), nn.Linear(5, 2), nn.Linear(5, 2)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        h = self.trunk(x).tanh()
        return self.a(h).square().mean() + (h - 1).square().mean(), self.b(h).sin().mean() + (h + 1).square().mean()


def two_layers() -> nn.Module:
    return SquaredTwoLayers()


def wide() -> nn.Module:
    """Values of 4 KiB and more, which a form may keep."""
    return Lambda(
        lambda m, x: m.two(m.one(x).sigmoid().sin()).square().mean(), one=nn.Linear(4, 256), two=nn.Linear(256, 2)
    )


def lstm() -> nn.Module:
    return Lambda(lambda m, x: m.lstm(x[None].sin().expand(5, -1, -1))[0].square().mean(), lstm=nn.LSTM(4, 3))


class Cells(nn.Module):
    """A cell in a Python loop."""

    def __init__(self) -> None:
        super().__init__()
        self.cell = nn.GRUCell(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        h = torch.zeros_like(x)
        for _ in range(6):
            h = self.cell(x, h)
        return h.square().mean()


class Root(nn.Module):
    """A square root of what is below 0 in places, which a mask hides from the loss."""

    def __init__(self) -> None:
        super().__init__()
        self.one = nn.Linear(4, 3)

    def forward(self, x: Tensor) -> Tensor:
        h = self.one(x)
        return (h.sqrt() * (h > 0)).nan_to_num().square().mean()


class Dropped(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.one, self.drop, self.two = nn.Linear(4, 8), nn.Dropout(0.5), nn.Linear(8, 2)

    def forward(self, x: Tensor) -> Tensor:
        return self.two(self.drop(self.one(x).tanh())).square().mean()


class Forces(nn.Module):
    """A loss of the gradient of an energy."""

    def __init__(self) -> None:
        super().__init__()
        self.one, self.two = nn.Linear(4, 8), nn.Linear(8, 1)

    def forward(self, x: Tensor) -> Tensor:
        x = x.detach().requires_grad_()
        energy = self.two(self.one(x).tanh())
        (force,) = torch.autograd.grad(energy.sum(), x, create_graph=True)
        return energy.square().mean() + (force - 1).square().mean()


def _halve_large(g: Tensor, *, h: Tensor) -> Tensor:
    return g / (1 + h.abs().mean())


def _noisy(g: Tensor) -> Tensor:
    return g + 0.01 * gr.normal(g) + 0.01 * gr.uniform(g)


def _state() -> Callable[[Tensor], Tensor]:
    count = gr.State((), 0.0, torch.float64, name="count")

    def scale(g: Tensor) -> Tensor:
        count.set(count.value + 1)
        return g / count.value.add(1)

    return scale


def _vector(g: Tensor) -> Tensor:
    gr.record("rows", g.abs().sum(0))
    gr.keep("error", g)
    return g


def _equal(gradients: Mapping[str, Tensor]) -> dict[str, Tensor]:
    norms = torch.stack([g.norm() for g in gradients.values()])
    gr.record("largest", norms.amax())
    return {name: g * (norms.mean() / (1e-6 + g.norm())) for name, g in gradients.items()}


def _weigh(norms: Tensor) -> Tensor:
    return (norms.mean() / norms).clamp(max=1)


@dataclass(frozen=True)
class Meeting:
    """A policy and a model that it meets.

    Attributes:
        policy: Makes the rules.
        make: Makes the model.
        acts: Whether the policy changes what is learned.
        records: Whether it records.
        transform: Options of ``gr.transform``.
        near: The relative tolerance.
        optimize: Makes the optimizer.
        guard: Options of ``gr.guard``; None calls it for the two phases alone.
    """

    policy: Callable[[], Any]
    make: Callable[[], nn.Module] = two_layers
    acts: bool = True
    records: bool = True
    transform: Callable[[], Mapping[str, Any]] = dict
    near: float = 1e-12
    optimize: Optimize = sgd
    guard: Mapping[str, Any] | None = None


on = gr.on
MEETINGS: Mapping[str, Meeting] = {
    "ClipByValue at an error": Meeting(lambda: on("error:one", ClipByValue(0.01)), records=False),
    "ClipByNorm at an error": Meeting(lambda: on("error:one", ClipByNorm(0.1))),
    "Scale at an error": Meeting(lambda: on("error:one", passes.Scale(-0.5)), records=False),
    "Zero at an error": Meeting(lambda: on("error:one", passes.Zero()), records=False),
    "NanToNum at an error": Meeting(lambda: on("error:one", passes.NanToNum()), Root, records=False),
    "at all errors": Meeting(lambda: on("error:*/*", ClipByNorm(0.1))),
    "a function at an error": Meeting(lambda: on("error:one", lambda g: g.clamp(-0.01, 0.01)), records=False),
    "a function of the value": Meeting(lambda: on("error:one", lambda g, h: g / (1 + h.abs())), records=False),
    "Observe at an error": Meeting(
        lambda: on("error:*", Observe("norm", "max_abs", "zeros", "std", "exponents")), acts=False
    ),
    "Observe at an activation": Meeting(lambda: on("activation:*", Observe("norm", "min", "saturated")), acts=False),
    "Keep at an activation": Meeting(lambda: on("activation:one", Keep()), acts=False, records=False),
    "Keep at an error and a gradient": Meeting(
        lambda: [on("error:one", Keep()), on("gradient:*", Keep())], acts=False, records=False
    ),
    "CheckFinite records": Meeting(lambda: on("*", CheckFinite("record")), acts=False),
    "ClipByNorm at a gradient": Meeting(lambda: on("gradient:*", ClipByNorm(0.1))),
    "a global clip": Meeting(lambda: on("gradient:*", ClipByGlobalNorm(0.1))),
    "two groups": Meeting(
        lambda: [
            on("gradient:*.weight", ClipByGlobalNorm(0.1, group="weights")),
            on("gradient:*.bias", ClipByGlobalNorm(0.1, group="biases", norm_type=math.inf)),
        ]
    ),
    "AdaptiveClip at a gradient": Meeting(lambda: on("gradient:*", passes.AdaptiveClip(0.01))),
    "AutoClip": Meeting(lambda: on("gradient:*", passes.AutoClip(50.0))),
    "ZClip": Meeting(lambda: on("gradient:*", passes.ZClip(0.1, warmup=2))),
    "L2": Meeting(lambda: on("gradient:*", passes.L2(0.5)), records=False),
    "Store": Meeting(lambda: on("saved:*", passes.Store("bfloat16")), wide, records=False),
    "Recompute": Meeting(lambda: on("saved:*", passes.Recompute()), wide, acts=False, records=False),
    "stored_error": Meeting(lambda: on("saved:*", [passes.Store("int8"), Observe("stored_error")]), wide),
    "KeepZeros": Meeting(lambda: on("backward:*/sqrt", passes.KeepZeros()), Root, records=False),
    "a backward of its own": Meeting(
        lambda: on("backward:*/tanh", lambda op: op.error * 0.5), records=False
    ),
    "its vjp": Meeting(lambda: on("backward:two/linear", lambda op: op.vjp(op.error.clamp(-0.1, 0.1))), records=False),
    "a global clip of the step": Meeting(lambda: on("step:*", ClipByGlobalNorm(0.1))),
    "AdaptiveClip of the step": Meeting(lambda: on("step:*", passes.AdaptiveClip(0.01))),
    "a function at a step": Meeting(lambda: on("step:*", lambda g, p: g + 0.1 * p), records=False),
    "Observe at a step": Meeting(lambda: on("step:*", Observe("norm", "max_abs")), acts=False),
    "DecayWeights": Meeting(lambda: on("step:*.weight", passes.DecayWeights(0.1)), records=False),
    "Hold": Meeting(lambda: on("step:*", passes.Hold(lambda g, p: p.abs() < 0.2)), records=False),
    "Hold under AdamW": Meeting(
        lambda: on("step:*", passes.Hold(lambda g, p: p.abs() < 0.2)), records=False, optimize=adamw
    ),
    "a function at parameters": Meeting(lambda: on("param:*", lambda p: p.clamp(-0.2, 0.2)), records=False),
    "a function of the parameter before": Meeting(
        lambda: on("param:*", lambda p, before: 0.5 * (p + before)), records=False
    ),
    "a function at a state": Meeting(
        lambda: on("state:*.momentum_buffer", lambda m: m.clamp(-0.1, 0.1)), records=False
    ),
    "Observe at parameters and state": Meeting(
        lambda: [on("param:*", Observe("norm")), on("state:*.momentum_buffer", Observe("max_abs"))], acts=False
    ),
    "Keep at parameters": Meeting(lambda: on("param:*", Keep()), acts=False, records=False),
    "update ratios": Meeting(
        lambda: on("gradient:*", Observe("norm")), acts=False, guard={"update_ratios": True}
    ),
    "ClipPerExample": Meeting(lambda: on("gradient:*", passes.ClipPerExample(0.05))),
    "WeighExamples": Meeting(lambda: on("gradient:*", passes.WeighExamples(_weigh))),
    "norms of examples": Meeting(
        lambda: on("gradient:*", [Observe("example_norm_mean", "noise_scale"), Keep("example_norms")]), acts=False
    ),
    "losses weighed": Meeting(lambda: on("gradient:trunk.*", passes.WeighLosses(passes.PCGrad())), TwoTasks),
    "losses weighed at an error": Meeting(lambda: on("error:trunk", passes.WeighLosses(passes.UPGrad())), TwoTasks),
    "losses compared": Meeting(
        lambda: on("gradient:trunk.*", Observe("loss_norms", "loss_cosine")), TwoTasks, acts=False
    ),
    "several losses": Meeting(lambda: on("gradient:*", ClipByGlobalNorm(0.1)), TwoTasks),
    "in an LSTM": Meeting(lambda: on("error:lstm.l0/h", ClipByNorm(0.01)), lstm),
    "around an LSTM": Meeting(lambda: on("error:lstm", ClipByNorm(0.01)), lstm),
    "a bound by time": Meeting(
        lambda: on("error:lstm.l0/h", ClipByNorm(lambda site: 0.01 * (1 + site.iteration))), lstm
    ),
    "in a rolled loop": Meeting(
        lambda: on("error:cell", ClipByNorm(0.001)), Cells, transform=lambda: {"loops": "rolled"}
    ),
    "a state in a rolled loop": Meeting(
        lambda: on("error:cell", _state()), Cells, transform=lambda: {"loops": "rolled"}, records=False
    ),
    "in an unrolled loop": Meeting(lambda: on("error:cell#2", ClipByNorm(0.0001)), Cells),
    "uses": Meeting(lambda: on("error:cell->cell", ClipByNorm(0.0001)), Cells),
    "a use": Meeting(lambda: on("error:one->/tanh", ClipByNorm(0.01))),
    "reads": Meeting(
        lambda: on("error:one", _halve_large, reads={"h": "activation:two"}), records=False
    ),
    "reads a parameter": Meeting(
        lambda: on("gradient:one.weight", _halve_large, reads={"h": "param:two.weight"}), records=False
    ),
    "together at gradients": Meeting(lambda: gr.together("gradient:*", _equal)),
    "together at steps": Meeting(lambda: gr.together("step:*", _equal)),
    "random numbers": Meeting(lambda: on("error:one", _noisy), records=False),
    "random numbers at steps": Meeting(lambda: on("step:*", _noisy), records=False),
    "a state": Meeting(lambda: on("error:one", _state()), records=False),
    "a state at a gradient": Meeting(lambda: on("gradient:one.weight", _state()), records=False),
    "a state at a step": Meeting(lambda: on("step:one.weight", _state()), records=False),
    "what leaves a function": Meeting(lambda: on("error:one", _vector), acts=False),
    "a schedule": Meeting(
        lambda: on("error:one", ClipByValue(gr.Schedule(lambda step: 0.1 / (1 + step)))), records=False
    ),
    "a schedule at steps": Meeting(
        lambda: on("step:*", ClipByGlobalNorm(gr.Schedule(lambda step: 0.1 / (1 + step))))
    ),
    "Scale by schedule": Meeting(
        lambda: on("error:one", passes.Scale(gr.Schedule(lambda step: float(step % 2)))), records=False
    ),
    "Every": Meeting(lambda: on("error:one", passes.Every(3, ClipByNorm(0.01)))),
    "After": Meeting(lambda: on("error:one", passes.After(3, ClipByNorm(0.01)))),
    "Every step": Meeting(lambda: on("step:*", passes.Every(2, ClipByNorm(0.01)))),
    "sampled": Meeting(
        lambda: on("error:*", Observe("norm")), acts=False, transform=lambda: {"monitor": gr.Monitor(sample=3)}
    ),
    "sampled beside a clip": Meeting(
        lambda: [on("error:*", Observe("norm", every=3)), on("gradient:*", ClipByGlobalNorm(0.1)),
                 on("step:*", Observe("norm", every=2))],
    ),
    "dropout": Meeting(lambda: on("error:one", ClipByNorm(0.01)), Dropped),
    "inner gradients": Meeting(lambda: on("error:one", ClipByNorm(0.01)), Forces),
    "inner gradients, all": Meeting(lambda: on("gradient:*", ClipByGlobalNorm(0.1)), Forces),
}  # fmt: skip


def meet(name: str, *, compiled: bool = False, near: float = 1e-12) -> None:
    """Train for six steps in one graph and in two phases."""
    one = MEETINGS[name]
    torch.manual_seed(0)
    pair = Pair(
        one.make().double(), one.policy, one.optimize, compiled=compiled, near=max(near, one.near),
        transform=one.transform, guard=one.guard,
    )  # fmt: skip
    for number in range(6):
        pair.step(batch(number) * (10 if number == 4 else 1))  # adaptive clips act on what is unusual
    pair.finish(acts=one.acts, records=one.records)
    if "Keep at" in name:
        assert pair.one.monitor.kept()
    if name == "norms of examples":
        pair.same_kept("example_norms")
    if name == "what leaves a function":
        pair.same_kept("error")
