"""Skipped updates take back what the forward wrote to buffers, and nothing waits."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

import gradrewrite as gr
from gradrewrite.passes import CheckFinite

from models.buffers import WIDTH, All

WARM, STEPS = 3, 8  # good steps, then bad ones


@pytest.mark.parametrize("mode", [None, "default", "reduce-overhead"])
def test_skips_leave_no_trace_and_do_not_wait(mode: str | None) -> None:
    model = All().cuda()
    rewritten = gr.transform(model, gr.on("gradient:*", CheckFinite("skip")))
    if mode is not None:
        rewritten.compile(mode=mode)
    optimizer = gr.guard(torch.optim.AdamW(model.parameters(), lr=0.01, fused=True), rewritten)
    good, bad = torch.randn(8, WIDTH, device="cuda"), torch.full((8, WIDTH), math.nan, device="cuda")
    states: list[dict[str, Tensor]] = []
    for step in range(STEPS):
        torch.cuda.set_sync_debug_mode("error" if step >= WARM and mode != "reduce-overhead" else "default")
        optimizer.zero_grad()
        rewritten(good if step < WARM else bad).backward()
        optimizer.step()
        torch.cuda.set_sync_debug_mode("default")
        states.append({name: t.clone() for name, t in model.state_dict().items()})

    trained, *skipped = states[WARM - 1 :]
    for name, t in trained.items():
        assert all(torch.equal(state[name], t) for state in skipped), name
    assert not all(torch.equal(states[0][name], t) for name, t in trained.items())
    assert rewritten.monitor.skipped == STEPS - WARM
