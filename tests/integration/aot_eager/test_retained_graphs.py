"""``backward(retain_graph=True)`` op by op, against the eager model."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn

import gradrewrite as gr
from gradrewrite.passes import CheckFinite, Observe


@pytest.mark.broad
@pytest.mark.parametrize("dynamic", [True, False, None])
@pytest.mark.parametrize("after_a_plain_step", [False, True])
@pytest.mark.parametrize("policy", [[], gr.on("error:*", [CheckFinite(), Observe("norm")])])
@pytest.mark.parametrize("regions", [(), "1"])
def test_second_backward(
    dynamic: bool | None, after_a_plain_step: bool, policy: gr.Policy, regions: str | tuple[()]
) -> None:
    plain = nn.Sequential(nn.Linear(4, 4), nn.Sequential(nn.GELU(), nn.Linear(4, 4), nn.Tanh()), nn.Linear(4, 1))
    inner = copy.deepcopy(plain)
    model = gr.transform(inner, policy, dynamic=dynamic, regions=regions)
    for rows in (5, 6, 6):
        x = torch.randn(rows, 4)
        for run in (plain, model):
            run.zero_grad()
            if after_a_plain_step:
                run(x).sum().backward()
            loss = run(x).sum()
            loss.backward(retain_graph=True)
            loss.backward()
        for p, q in zip(inner.parameters(), plain.parameters(), strict=True):
            torch.testing.assert_close(p.grad, q.grad)
