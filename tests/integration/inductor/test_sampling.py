"""Sampling in compiled code: steps between have the kernels of the policy without measurements."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch._dynamo.utils import counters
from torch._inductor.utils import fresh_cache, run_and_get_code

import gradrewrite as gr
from gradrewrite._compat import inductor
from gradrewrite.passes import CheckFinite, ClipByNorm, Keep, Observe, UPGrad, WeighLosses

from models.several_losses import SeveralLosses
from models.small import SquaredTwoLayers, TwoLayers

MEASUREMENTS = [
    gr.on("error:*", [Observe("norm", "max_abs"), Keep()]),
    gr.on("activation:*", Observe("zeros")),
    gr.on("gradient:*", [Observe("norm", "mean_abs"), CheckFinite("record")]),
]
CLIPS = [gr.on("error:two", ClipByNorm(1e-2)), gr.on("gradient:*", ClipByNorm(1.0))]


def code_of(step: Callable[[], Any]) -> str:
    """All code that Inductor makes for one step, without comments, which name the nodes."""
    with torch._inductor.config.patch(force_disable_caches=True):
        _, codes = run_and_get_code(step)
    assert codes
    lines = (line for code in codes for line in code.splitlines() if not line.lstrip().startswith("#"))
    return re.sub(r"cpp_fused_\w+", "kernel", "\n".join(lines))


@pytest.mark.sample(8)
@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:dynamo_pgo force disabled")
@pytest.mark.parametrize("clips", [CLIPS, []], ids=["clips", "nothing else"])
def test_kernels_between_are_those_without_measurements(clips: Any) -> None:
    x = torch.randn(64, 16)
    torch.manual_seed(0)
    sampled = gr.transform(SquaredTwoLayers(16, 32, 8), [MEASUREMENTS, clips], monitor=gr.Monitor(sample=1000))
    plain = gr.transform(sampled.original, clips)
    sampled.compile()
    plain.compile()
    measuring = code_of(lambda: sampled(x).backward())
    between = code_of(lambda: sampled(x).backward())
    assert [graph.measured for graph in sampled.explain().graphs] == ["all", "nothing"]
    assert between == code_of(lambda: plain(x).backward()) != measuring


@pytest.mark.sample(12)
@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:dynamo_pgo force disabled")
@pytest.mark.parametrize("policy", [WeighLosses(UPGrad()), ClipByNorm(1e-2)], ids=["weighed", "not weighed"])
def test_kernels_between_without_figures_of_losses(policy: Any) -> None:
    """There are no copies for each loss in steps between, but those of ``WeighLosses``."""
    x = torch.randn(3, 4)
    observe = [gr.on(f"{kind}:*", Observe("loss_norms", "loss_cosine")) for kind in ("error", "gradient")]
    weigh = gr.on("gradient:trunk.*", policy)
    net = SeveralLosses(nn.Sequential(nn.Linear(4, 5), nn.Tanh(), nn.Linear(5, 6)), x, 2)
    sampled = gr.transform(net, [observe, weigh], monitor=gr.Monitor(sample=1000))
    plain = gr.transform(sampled.original, weigh)
    sampled.compile()
    plain.compile()

    def step(model: Any) -> None:
        model.zero_grad()
        sum(model(x)).backward()

    measuring, between = (code_of(lambda: step(sampled)) for _ in range(2))
    assert between == code_of(lambda: step(plain)) != measuring


def test_compiled_steps() -> None:
    """Steps between are bit-equal to the plain model; a changed ``sample`` compiles nothing."""
    torch.manual_seed(0)
    model = gr.transform(SquaredTwoLayers(16, 32, 8), [gr.on("error:*", Observe("norm", every=3))])
    plain = gr.transform(model.original, [])
    model.compile()
    plain.compile()
    x = torch.randn(64, 16)
    found = []
    for step in range(9):
        compiled = counters["stats"]["unique_graphs"]
        model(x).backward()
        own = [p.grad.clone() for p in model.parameters() if p.grad is not None]
        model.zero_grad()
        assert counters["stats"]["unique_graphs"] - compiled == (step in (0, 1))
        plain(x).backward()
        found.append(any(key.startswith("norm@") for key in model.monitor.latest()))
        for gradient, parameter in zip(own, model.parameters(), strict=True):
            torch.testing.assert_close(gradient, parameter.grad, rtol=1e-5 * found[-1], atol=1e-5 * found[-1])
        model.zero_grad()
        model.monitor.sample = 1 + step // 5
    assert found == [step in (0, 3, 6) for step in range(9)]


def test_a_backend_compiles_both_graphs_at_once() -> None:
    backend = gr.backend([gr.on("error:two", Observe("norm", every=3)), gr.on("error:one", ClipByNorm(1e-2))])
    model = torch.compile(TwoLayers(), backend=backend)
    measured, clipped = [], []
    for _ in range(7):
        model(torch.randn(5, 4)).square().sum().backward()
        measured.append("norm@error:two" in backend.monitor.latest())
        clipped.append("norm@error:one" in backend.monitor.latest())
    assert measured == [step in (0, 3, 6) for step in range(7)]
    assert all(clipped)
    assert [graph.measured for graph in backend.explain().graphs] == ["all", "nothing"]


def test_a_backend_with_one_graph() -> None:
    """All is measured there, in the steps that are due; records of one step are together."""
    backend = gr.backend([gr.on("step:*", Observe("max_abs")), gr.on("gradient:one.weight", Observe("norm"))])
    net = TwoLayers()
    model = torch.compile(net, backend=backend)
    optimizer = gr.guard(torch.optim.SGD(net.parameters(), lr=0.1), backend)
    found = []
    for step in range(6):
        model(torch.randn(5, 4)).square().sum().backward()
        optimizer.step()
        optimizer.zero_grad()
        found.append(sorted(key for key in backend.monitor.latest() if "one.weight" in key))
        if step == 1:
            backend.monitor.sample = 2
    both = ["max_abs@step:one.weight", "norm@gradient:one.weight"]
    assert found == [both, both, both, [], both, []]


@pytest.mark.skipif(not inductor.knows_cache(), reason="its parts are private, and unknown of this torch")
def test_both_graphs_come_out_of_the_code_cache(tmp_path: Path) -> None:
    x = torch.randn(5, 4, generator=torch.Generator().manual_seed(1))

    def steps() -> tuple[list[Any], list[int]]:
        torch.manual_seed(0)
        torch._dynamo.reset()
        policy = [gr.on("error:two", [Observe("norm", every=2), ClipByNorm(1e-2)])]
        model = gr.transform(TwoLayers(), policy)
        model.compile()
        rows, hits = [], []
        for _ in range(4):
            counters.clear()
            model(x).square().sum().backward()
            rows.append((dict(model.monitor.latest()), [p.grad.clone() for p in model.parameters()]))
            hits.append(counters["aot_autograd"]["autograd_cache_hit"])
        return rows, hits

    with fresh_cache(dir=str(tmp_path)):
        cold, missed = steps()
        warm, hits = steps()
    assert (missed, hits) == ([0, 0, 0, 0], [1, 1, 0, 0])
    for (records, gradients), (cached, again) in zip(cold, warm, strict=True):
        assert records == cached
        assert all(torch.equal(a, b) for a, b in zip(gradients, again, strict=True))
