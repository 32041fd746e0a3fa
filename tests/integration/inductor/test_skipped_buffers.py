"""Skipped updates, compiled: what the forward wrote to buffers is taken back."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

import gradrewrite as gr
from gradrewrite.passes import CheckFinite

from models.buffers import WIDTH, All


@pytest.mark.parametrize("fused", [False, True])
def test_skips_leave_no_trace(fused: bool) -> None:
    model = All()
    rewritten = gr.transform(model, gr.on("gradient:*", CheckFinite("skip")))
    rewritten.compile()
    optimizer = gr.guard(torch.optim.AdamW(model.parameters(), lr=0.01, fused=fused), rewritten)
    before: dict[str, Tensor] = {}
    for step in range(22):
        x = torch.randn(8, WIDTH)
        if step:
            x[0] = math.nan
        optimizer.zero_grad()
        rewritten(x).backward()
        optimizer.step()
        after = {name: t.clone() for name, t in model.state_dict().items()}
        for name, t in before.items():
            assert torch.equal(after[name], t), name
        before = after
    assert rewritten.monitor.skipped == 21
