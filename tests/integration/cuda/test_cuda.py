"""The same on a GPU: gradients, records without waiting, CUDA graphs, live thresholds."""

from __future__ import annotations

import copy
import logging
from collections import OrderedDict

import pytest
import torch
from torch import nn

import gradrewrite as gr
from gradrewrite.passes import CheckFinite, ClipByGlobalNorm, ClipByNorm, ClipByValue, Keep, Observe

from gpu.log import SimulatedGpu
from helpers import CASES, assert_same_gradients, clip_norm, eager_gradients, make_case, policy_at, run_case


@pytest.mark.parametrize("compiled", [False, True])
@pytest.mark.parametrize("name", ["mlp", "transformer", "checkpoint"])
def test_equals_eager_hooks(name: str, compiled: bool) -> None:
    case = CASES[name]
    plain, inputs = make_case(case, torch.float32)
    plain, inputs = plain.eval().cuda(), tuple(t.cuda() for t in inputs)
    _, expected = eager_gradients(case, plain, inputs, case.hooked, clip_norm)
    model = gr.transform(copy.deepcopy(plain), policy_at(case.hooked, ClipByNorm(0.1)))
    if compiled:
        model.compile()
    _, got = run_case(case, model, inputs)

    assert_same_gradients(got, expected, rtol=1e-4)


@pytest.mark.parametrize("mode", ["default", "reduce-overhead"])
def test_steps_without_waiting(mode: str, caplog: pytest.LogCaptureFixture) -> None:
    bound = torch.tensor(1e-3, device="cuda")
    policy = [gr.on("error:0", [ClipByValue(bound, log=True), Keep()]), gr.on("gradient:*", ClipByGlobalNorm(1e-4))]
    model = gr.transform(nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 2)).cuda(), policy)
    model.compile(mode=mode)
    x = torch.randn(16, 8, device="cuda")
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    norms = []
    with caplog.at_level(logging.INFO, "gradrewrite.monitor"):
        for step in range(6):
            torch.cuda.set_sync_debug_mode("error" if step > 2 else "default")
            optimizer.zero_grad()
            model(x).square().sum().backward()
            optimizer.step()
            torch.cuda.set_sync_debug_mode("default")
            (kept,) = model.monitor.kept().values()
            assert kept.abs().max() <= bound
            norms.append(model.monitor.latest()["total_norm@group:default"])
            bound.mul_(0.5)

    assert norms == sorted(norms, reverse=True)
    assert len(caplog.records) == 6


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.one, self.drop, self.two = nn.Linear(8, 16), nn.Dropout(0.2), nn.Linear(16, 2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.two(self.drop(torch.tanh(self.one(x)))).square().sum()


@pytest.mark.parametrize("mode", [None, "default", "reduce-overhead"])
def test_guarded_step_without_waiting(mode: str | None) -> None:
    policy = [
        gr.on("error:*", [Observe("norm", "zeros"), CheckFinite("warn")]),
        gr.on("gradient:*", CheckFinite("skip")),
        gr.on("activation:*", CheckFinite("skip")),
    ]
    scaler = torch.amp.GradScaler("cuda", init_scale=8.0)
    model = gr.transform(Net().cuda(), policy, monitor=gr.Monitor(every=2), loss_scale=scaler)
    if mode is not None:
        model.compile(mode=mode)
    optimizer = gr.guard(torch.optim.AdamW(model.parameters(), fused=True), model)
    good, bad = torch.randn(16, 8, device="cuda"), torch.full((16, 8), torch.nan, device="cuda")

    def train() -> tuple[list[bool], list[float]]:
        changed = []
        for number, x in enumerate((good, good, good, good, bad, good, bad)):
            before = model.one.weight.detach().clone()
            if mode != "reduce-overhead" and number > 1:
                torch.cuda.set_sync_debug_mode("error")
            optimizer.zero_grad()
            scaler.scale(model(x)).backward()
            scaler.step(optimizer)
            scaler.update()
            torch.cuda.set_sync_debug_mode("default")
            changed.append(not torch.equal(model.one.weight, before))
        return changed, model.monitor.history("nonfinite@gradient:one.weight")

    with pytest.warns(gr.RewriteWarning, match="first non-finite"):  # as soon as the count has arrived
        changed, history = train()

    assert changed == [True, True, True, True, False, True, False]
    assert model.monitor.skipped == 2
    assert [value > 0 for value in history] == [False, False, False, False, True, False, True]


@pytest.mark.parametrize("compiled", [False, True])
def test_replay_of_a_failed_step(compiled: bool) -> None:
    class Root(Net):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            h = self.drop(self.one(x).square())
            return torch.sqrt(h).sum()

    model = gr.transform(Root().cuda(), gr.on("gradient:*", CheckFinite()))
    if compiled:
        model.compile()
    with pytest.raises(gr.NonFiniteError) as caught:
        model(torch.randn(16, 8, device="cuda")).backward()  # dropout makes zeros, whose root has no slope
    assert caught.value.op == "/sqrt"
    assert not caught.value.note
    zeros = caught.value.percent
    assert 5 < zeros < 40


def test_reading_on_another_stream() -> None:
    model = gr.transform(Net().cuda(), gr.on("error:two", Observe("max_abs")))
    model(torch.ones(4, 8, device="cuda")).backward()
    with torch.cuda.stream(torch.cuda.Stream()):
        (value,) = model.monitor.latest().values()
    assert value > 0


@pytest.mark.parametrize("mode", ["default", "reduce-overhead"])
def test_records_outlive_the_next_replay(mode: str) -> None:
    """A CUDA graph overwrites its outputs; records and kept tensors are copied before."""
    policy = [
        gr.on("error:one", Keep()),
        gr.on("error:two", Observe("norm")),
        gr.on("gradient:*", ClipByGlobalNorm(1e9)),
    ]
    model = gr.transform(nn.Sequential(OrderedDict(one=nn.Linear(3, 3), two=nn.Linear(3, 1))).cuda(), policy)
    model.compile(mode=mode)
    x, kept = torch.ones(4, 3, device="cuda"), []
    for factor in (1.0, 2.0, 3.0, 4.0):
        model.zero_grad()
        (model(x).sum() * factor).backward()
        (tensor,) = model.monitor.kept().values()
        kept.append(tensor)

    assert model.monitor.history("norm@error:two") == [2.0, 4.0, 6.0, 8.0]
    total = model.monitor.history("total_norm@group:default")
    assert total == pytest.approx([total[0] * factor for factor in (1.0, 2.0, 3.0, 4.0)])
    assert total[0] > 0
    for tensor, factor in zip(kept, (1.0, 2.0, 3.0, 4.0), strict=True):
        torch.testing.assert_close(tensor, (model.two.weight * factor).expand(4, 3))


@pytest.mark.parametrize("mode", ["default", "reduce-overhead"])
def test_both_graphs_of_a_sampled_model(mode: str, simulation: SimulatedGpu | None) -> None:
    """With CUDA graphs, steps that measure and those between are captured apart."""
    policy = [
        gr.on("error:two", [Observe("norm", "zeros"), ClipByNorm(1.5)]),
        gr.on("gradient:*", [Observe("max_abs", "exponents"), ClipByGlobalNorm(1e9)]),
    ]
    net = nn.Sequential(OrderedDict(one=nn.Linear(3, 3), two=nn.Linear(3, 1))).cuda()
    model = gr.transform(net, policy, monitor=gr.Monitor(sample=3))
    model.compile(mode=mode)
    x, found, gradients = torch.ones(4, 3, device="cuda"), [], []
    for _ in range(9):
        model.zero_grad()
        model(x).sum().backward()
        found.append("zeros@error:two" in model.monitor.latest())
        gradients.append([p.grad.clone() for p in model.parameters()])
    assert found == [step % 3 == 0 for step in range(9)]
    assert model.monitor.history("zeros@error:two")[::3] == [0.0] * 3
    assert model.monitor.history("norm@error:two") == [2.0] * 9
    rows = [step.records for step in model.monitor.steps()]
    for row in rows[::3]:
        assert sum(value for key, value in row.items() if key.startswith("exponents") and "one.weight" in key) == 9
    for own in gradients[1:]:
        for gradient, first in zip(own, gradients[0], strict=True):
            torch.testing.assert_close(gradient, first)
    if mode == "reduce-overhead" and simulation is not None:
        assert simulation.num_graphs == 4  # forward and backward of each
