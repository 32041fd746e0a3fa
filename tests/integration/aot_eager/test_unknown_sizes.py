"""Actions on values whose size depends on data: empty, one element, several; and what of it reaches a shared cache."""

from __future__ import annotations

import math
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import gradrewrite as gr
from gradrewrite.passes import CheckFinite, ClipByNorm, ClipByValue, Keep, NanToNum, Observe, Scale, Zero

from helpers import mostly_slow

BOUND = 0.5
INPUTS = {0: [-1.0] * 6, 1: [3.0] + [-1.0] * 5, 3: [1.0, -1.0, 2.0, -3.0, 4.0, -5.0]}


@pytest.fixture(autouse=True, scope="module")
def _data_dependent_sizes() -> Iterator[None]:
    with torch._dynamo.config.patch(capture_dynamic_output_shape_ops=True):
        yield


class Selected(nn.Module):
    """The error at the selection is twice its values; ``w`` is all ones."""

    def __init__(self) -> None:
        super().__init__()
        self.w = nn.Parameter(torch.ones(6))

    def forward(self, x: Tensor) -> Tensor:
        h = (x * self.w)[x > 0]
        return (h * h).sum()


def scaled_to(order: float) -> Any:
    def clip(g: Tensor) -> Tensor:
        norm = torch.linalg.vector_norm(g, order) if g.numel() else torch.zeros(())
        return g * min(1.0, BOUND / float(norm)) if norm > 0 else g

    return clip


ACTIONS: dict[str, tuple[Any, Any]] = {
    "value": (ClipByValue(BOUND, log=True), lambda g: g.clamp(-BOUND, BOUND)),
    "norm 2": (ClipByNorm(BOUND, log=True), scaled_to(2.0)),
    "norm 1": (ClipByNorm(BOUND, norm_type=1.0), scaled_to(1.0)),
    "norm 3": (ClipByNorm(BOUND, norm_type=3.0), scaled_to(3.0)),
    "largest": (ClipByNorm(BOUND, norm_type=math.inf), scaled_to(math.inf)),
    "tensor bound": (ClipByNorm(torch.tensor(BOUND)), scaled_to(2.0)),
    "check": (CheckFinite(), lambda g: g),
    "keep": (Keep(), lambda g: g),
    "scale": (Scale(2.0), lambda g: g * 2),
    "zero": (Zero(), lambda g: g * 0),
    "nan": (NanToNum(), lambda g: g),
    "function": (lambda g: g / (1 + g.norm()), lambda g: g / (1 + g.norm())),
}


def gradient_of(model: nn.Module, values: list[float]) -> Tensor:
    model.zero_grad()
    model(torch.tensor(values)).backward()
    return model.w.grad.clone()


def wanted_gradient(values: list[float], fn: Any) -> Tensor:
    x = torch.tensor(values)
    wanted = torch.zeros(6)
    wanted[x > 0] = fn(2 * x[x > 0]) * x[x > 0]
    return wanted


@pytest.mark.long
@pytest.mark.parametrize("name", mostly_slow(ACTIONS, 4))
def test_action_at_every_size(name: str) -> None:
    action, fn = ACTIONS[name]
    model = gr.transform(Selected(), gr.on("error:/getitem", action))

    for values in INPUTS.values():
        torch.testing.assert_close(gradient_of(model, values), wanted_gradient(values, fn))
    assert len(model.explain().graphs) == 1  # no size was assumed


@pytest.mark.inductor
def test_actions_compiled() -> None:
    for name in ("value", "norm 2", "norm 3"):
        action, fn = ACTIONS[name]
        model = gr.transform(Selected(), gr.on("error:/getitem", action))
        model.compile()
        for values in INPUTS.values():
            torch.testing.assert_close(gradient_of(model, values), wanted_gradient(values, fn))


STATISTICS = ("max_abs", "mean_abs", "norm", "min", "max", "nonfinite", "zeros")


@pytest.mark.parametrize("compiled", [False, pytest.param(True, marks=pytest.mark.inductor)])
@pytest.mark.parametrize("kind", ["error", "activation"])
def test_statistics_at_every_size(kind: str, compiled: bool) -> None:
    model = gr.transform(Selected(), gr.on(f"{kind}:/getitem", Observe(*STATISTICS, "kurtosis", "exponents")))
    if compiled:
        model.compile()
    for size, values in INPUTS.items():
        gradient_of(model, values)
        x = torch.tensor([v for v in values if v > 0]) * (2 if kind == "error" else 1)
        got = model.monitor.latest()
        wanted = [math.nan, math.nan, 0.0, math.nan, math.nan, 0.0, 0.0]
        if size:
            wanted = [float(f) for f in (x.max(), x.mean(), x.norm(), x.min(), x.max(), 0.0, 0.0)]

        assert [got[f"{name}@{kind}:/getitem"] for name in STATISTICS] == pytest.approx(wanted, nan_ok=True)
        moments = [float(x.mean()), float(x.std(correction=0))] if size else [math.nan, math.nan]
        assert [got[f"{name}@{kind}:/getitem"] for name in ("mean", "std")] == pytest.approx(moments, nan_ok=True)
        assert sum(value for key, value in got.items() if key.startswith("exponents_")) == len(x)
        assert got[f"numel@{kind}:/getitem"] == len(x)


PROGRAM = """
import sys
import torch
from torch import nn
import gradrewrite as gr
from gradrewrite.passes import Observe

torch._dynamo.config.capture_dynamic_output_shape_ops = True

class Selected(nn.Module):
    def __init__(self):
        super().__init__()
        self.w = nn.Parameter(torch.ones(6))

    def forward(self, x):
        h = (x * self.w)[x > 0]
        return (h * h).sum()

def largest(g):  # amax of an empty tensor is an error: tracing it assumes that there is an element
    gr.record("largest", g.abs().amax())
    return g

actions = {"empty": [], "function": [largest], "observe": [Observe("norm")]}[sys.argv[1]]
model = gr.transform(Selected(), [gr.on("error:/getitem", action) for action in actions])
model.compile()
for size in map(int, sys.argv[2:]):
    model.zero_grad()
    model(torch.tensor([3.0] * size + [-1.0] * (6 - size))).backward()
    print(size, float(model.w.grad.abs().sum()))
counters = torch._dynamo.utils.counters["inductor"]
print("hits", counters["fxgraph_cache_hit"])
"""


@pytest.mark.slow
@pytest.mark.parametrize("first", ["function", "observe"])
def test_an_assumption_does_not_reach_another_program(first: str, tmp_path: Path) -> None:
    program = tmp_path / "program.py"
    program.write_text(PROGRAM)

    def run(*arguments: str) -> list[str]:
        env = os.environ | {"TORCHINDUCTOR_CACHE_DIR": str(tmp_path / "cache")}
        command = [sys.executable, str(program), *arguments]
        done = subprocess.run(command, env=env, capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stderr
        return done.stdout.splitlines()

    assert run(first, "2")[0] == "2 36.0"
    assert run("empty", "2", "0")[:2] == ["2 36.0", "0 0.0"]
    assert run("empty", "0")[-1] == "hits 2"  # the cache is in use, and what it holds assumes nothing
