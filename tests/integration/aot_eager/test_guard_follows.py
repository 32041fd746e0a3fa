"""A guard follows a model that is rewritten again in place: its new policy, and its new monitor."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import nn

import gradrewrite as gr
from gradrewrite.passes import CheckFinite, ClipByGlobalNorm, Observe

pytestmark = pytest.mark.filterwarnings("error")
NORM = "total_norm@step:group:default"


def clip(bound: float) -> Any:
    return gr.on("step:*", ClipByGlobalNorm(bound))


def total(model: nn.Module) -> float:
    return math.sqrt(sum(float(p.grad.square().sum()) for p in model.parameters() if p.grad is not None))


@pytest.mark.long
def test_the_new_monitor_gets_the_records() -> None:
    model = gr.transform(nn.Linear(4, 2), clip(0.1), inplace=True)
    optimizer = gr.guard(torch.optim.SGD(model.parameters(), lr=0.1), model)
    x = torch.randn(5, 4)
    model(x).sum().backward()
    optimizer.step()
    old = model.monitor
    gr.restore(model)
    model = gr.transform(model, clip(0.01), inplace=True)
    for _ in range(3):
        optimizer.zero_grad()
        model(x).sum().backward()
        model(x).sum().backward()
        optimizer.step()
        assert total(model) == pytest.approx(0.01)
    assert len(old.history(NORM)) == 1
    assert len(model.monitor.history(NORM)) == 3
    assert model.monitor.latest()["bound@step:group:default"] == 0.01
    gr.unguard(optimizer)
    gr.restore(model)
    model = gr.transform(model, clip(0.01), inplace=True)
    model(x).sum().backward()
    with pytest.warns(gr.RewriteWarning, match="which nothing runs"):
        model(x).sum().backward()


def test_the_first_check_of_the_new_policy_skips() -> None:
    """Without a call of the optimizer before it."""
    model = gr.transform(nn.Linear(4, 2), clip(0.1), inplace=True)
    optimizer = gr.guard(torch.optim.SGD(model.parameters(), lr=0.1), model)
    gr.restore(model)
    model = gr.transform(model, gr.on("gradient:*", CheckFinite("skip")), inplace=True)
    before = model.weight.detach().clone()
    model(torch.full((5, 4), math.nan)).sum().backward()
    optimizer.step()
    assert torch.equal(model.weight, before)
    assert model.monitor.skipped == 1


@pytest.mark.long
@pytest.mark.parametrize("records", [False, True])
def test_two_optimizers_keep_their_order(records: bool) -> None:
    net = nn.Sequential(nn.Linear(4, 3), nn.Linear(3, 2))
    model = gr.transform(net, clip(0.1), inplace=True)
    optimizers = [gr.guard(torch.optim.SGD(part.parameters(), lr=0.0), model) for part in net]
    for bound in (0.1, 0.01):
        for _ in range(2):
            for optimizer in reversed(optimizers):
                optimizer.zero_grad()
            model(torch.randn(5, 4)).sum().backward()
            totals = [total(part) for part in net]
            for optimizer in reversed(optimizers):
                optimizer.step()
            latest = model.monitor.latest()
            assert [latest[NORM], latest[f"{NORM}#1"]] == pytest.approx(totals)
            assert {"lr@optimizer:0", "lr@optimizer:1"} <= latest.keys()
            assert [total(part) for part in net] == pytest.approx([bound, bound])
        assert len(model.monitor.steps()) == 2
        gr.restore(model)
        policy = [gr.on("gradient:*", Observe("norm")), clip(0.01)] if records else clip(0.01)
        model = gr.transform(model, policy, inplace=True)
