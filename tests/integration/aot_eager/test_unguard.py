"""``gr.unguard``: the optimizer, its schedulers and the monitor are as without a guard."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

import gradrewrite as gr
from gradrewrite.passes import ClipByGlobalNorm

CLIP = gr.on("step:*", ClipByGlobalNorm(0.1))
NORM = "total_norm@step:group:default"


@pytest.fixture
def model() -> gr.RewrittenModule:
    torch.manual_seed(0)
    return gr.transform(nn.Linear(4, 2), CLIP)


def step(model: nn.Module, optimizer: torch.optim.Optimizer, x: Tensor) -> float:
    """One step; the norm of the gradients that it used."""
    optimizer.zero_grad()
    model(x).sum().backward()
    optimizer.step()
    return torch.stack([p.grad.norm() for p in model.parameters()]).norm().item()


@pytest.mark.broad
def test_gradients_are_not_clipped_any_more(model: gr.RewrittenModule, x: Tensor) -> None:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    methods = optimizer.step, optimizer.zero_grad
    gr.guard(optimizer, model)
    assert step(model, optimizer, x) == pytest.approx(0.1)
    gr.unguard(optimizer)

    assert (optimizer.step, optimizer.zero_grad) == methods
    with pytest.warns(gr.RewriteWarning, match="which nothing runs"):
        assert step(model, optimizer, x) > 1
    gr.unguard(optimizer)  # without a guard it does nothing


@pytest.mark.filterwarnings("error", "ignore:the policy has actions at step sites:gradrewrite.RewriteWarning")
def test_schedulers_before_and_after_the_guard(model: gr.RewrittenModule, x: Tensor) -> None:
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    before = torch.optim.lr_scheduler.StepLR(optimizer, 1, gamma=0.5)
    gr.guard(optimizer, model)
    after = torch.optim.lr_scheduler.StepLR(optimizer, 1, gamma=0.5)
    for clips in (True, False):
        assert (step(model, optimizer, x) == pytest.approx(0.1)) == clips
        before.step()
        after.step()
        gr.unguard(optimizer)
    assert optimizer.param_groups[0]["lr"] == 0.5**4


def test_next_guard_begins_records_of_its_own(model: gr.RewrittenModule, x: Tensor) -> None:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for _ in range(2):
        gr.guard(optimizer, model)
        for _ in range(3):
            step(model, optimizer, x)
        gr.unguard(optimizer)

    norms = model.monitor.history(NORM)
    assert len(norms) == 6
    assert all(norm > 1 for norm in norms)
    assert not [key for key in model.monitor.latest() if "#" in key or key.endswith(":1")]
