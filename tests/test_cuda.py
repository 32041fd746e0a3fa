"""The same on a GPU: gradients, records without waiting, CUDA graphs, live thresholds."""

from __future__ import annotations

import copy
import logging

import pytest
import torch
from torch import nn

import gradrewrite as gr
from gradrewrite.passes import ClipByGlobalNorm, ClipByNorm, ClipByValue, Keep

from helpers import CASES, eager_gradients, make_case, run_case
from oracle import assert_same_gradients, clip_norm, policy_at

pytestmark = [pytest.mark.cuda, pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")]


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
    with caplog.at_level(logging.INFO, "gradrewrite"):
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
