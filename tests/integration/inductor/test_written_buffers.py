"""Buffers that the forward reads and writes later, compiled: gradients are those of eager mode."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import gradrewrite as gr
from gradrewrite.passes import CheckFinite, Observe, Recompute

from models.buffers import BUFFERS, WIDTH, Net


class All(nn.Module):
    """The mean over nets with each kind of buffer."""

    def __init__(self) -> None:
        super().__init__()
        self.nets = nn.ModuleList(Net(make) for make in BUFFERS.values())

    def forward(self, x: Tensor) -> Tensor:
        return torch.stack([net(x) for net in self.nets]).mean()


@pytest.mark.parametrize(
    ("policy", "options"),
    [
        ([], {}),
        (gr.on("error:*", [CheckFinite(), Observe("norm")]), {}),
        (gr.on("saved:*", Recompute()), {}),
        ([], {"regions": ["nets.*"]}),
    ],
)
def test_gradients_equal_eager(policy: gr.Policy, options: Any) -> None:
    plain = All()
    model = copy.deepcopy(plain)
    rewritten = gr.transform(model, policy, **options)
    rewritten.compile()
    for rows in (600, 600, 700):
        x = torch.randn(rows, WIDTH)
        plain.zero_grad()
        model.zero_grad()
        plain(x).backward()
        rewritten(x).backward()

        torch.testing.assert_close(dict(model.named_buffers()), dict(plain.named_buffers()), rtol=1e-4, atol=1e-5)
        # A bias in front of a batch normalization has a gradient of rounding alone.
        largest = max(float(q.grad.abs().max()) for q in plain.parameters() if q.grad is not None)
        for (name, p), q in zip(model.named_parameters(), plain.named_parameters(), strict=True):
            torch.testing.assert_close(
                p.grad, q[1].grad, rtol=1e-3, atol=1e-4 * largest, msg=lambda m, n=name: f"{n}: {m}"
            )
