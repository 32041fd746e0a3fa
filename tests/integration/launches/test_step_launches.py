"""Launches and bytes of what a guard runs before the update, on the simulated GPU."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import gradrewrite as gr
from gradrewrite.passes import CheckFinite, ClipByGlobalNorm, ClipByValue, Observe, SkipSpikes

from gpu.log import Count
from models.gpt import Gpt

# Launches for the gradients of all 29 parameters, and passes over them.
CASES: dict[str, tuple[Any, int, float]] = {
    "global norm": ([CheckFinite("skip"), ClipByGlobalNorm(1.0)], 3, 1.0),
    "spikes": ([CheckFinite("skip"), ClipByGlobalNorm(1.0), SkipSpikes()], 5, 1.0),
    "value": (ClipByValue(0.1), 1, 2.0),
    "observed": (Observe("norm", "max_abs"), 2, 1.0),
}


def step(action: Any) -> tuple[Count, int]:
    """The last of three steps; and the bytes of all gradients."""
    from gpu.device import simulated_gpu  # imports triton

    with simulated_gpu(90) as gpu:
        with torch.device("cuda"):
            net = Gpt(2, 256, vocabulary=1000, context=128)
        for p in net.parameters():
            p.grad = torch.randn_like(p)
        optimizer: torch.optim.Optimizer = torch.optim.AdamW(net.parameters(), fused=True)
        model = gr.transform(net, gr.on("step:*", action))
        model.compile()
        gr.guard(optimizer, model)
        for _ in range(3):
            begin = gpu.count()
            optimizer.step()
        return gpu.count() - begin, sum(p.numel() * p.element_size() for p in net.parameters())


@pytest.mark.parametrize("name", CASES)
def test_launches_before_the_update(name: str) -> None:
    action, launches, passes = CASES[name]
    found, size = step(action)
    assert found.launches <= launches
    assert found.size <= 1.02 * passes * size
    assert found.waits == 0
