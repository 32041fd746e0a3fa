"""States and schedules compiled with Inductor: equal to op by op, compiled once."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import gradrewrite as gr
from gradrewrite.passes import AutoClip, ClipByNorm, ClipByValue, ZClip


def follow(g: Tensor) -> Tensor:
    mean.set(0.5 * mean + 0.5 * g.abs().amax())
    return g / (1 + mean)


mean: Any = gr.State(dtype=torch.float64, name="mean")
POLICY = [
    gr.on("error:0", [follow, ClipByValue(gr.Schedule.linear(0.5, 0.05, steps=30))]),
    gr.on("gradient:*.bias", ClipByNorm(gr.Schedule.cosine(1.0, 0.1, steps=5))),
    gr.on("gradient:*", AutoClip(70.0, history=4)),
    gr.on("step:*", ZClip(0.2, warmup=2)),
]


def made(*, compiled: bool) -> tuple[Any, Any]:
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 3)).double()
    model = gr.transform(net, POLICY)
    if compiled:
        model.compile()
    return model, gr.guard(torch.optim.AdamW(model.parameters(), lr=0.001), model)


def train(model: Any, optimizer: Any, steps: range) -> list[dict[str, float]]:
    records = []
    for step in steps:
        optimizer.zero_grad()
        x = torch.randn(5, 4, generator=torch.Generator().manual_seed(step)).double() * (1 + step % 7)
        (model(x) * (1 + step % 7)).square().mean().backward()
        optimizer.step()
        records.append(model.monitor.latest())
    return records


@pytest.mark.sample(6)
def test_equal_to_op_by_op_and_resumed_bit_for_bit() -> None:
    plain, model = made(compiled=False), made(compiled=True)
    wanted, got = train(*plain, range(10)), train(*model, range(10))
    for ours, theirs in zip(got, wanted, strict=True):
        assert ours.keys() == theirs.keys()
        torch.testing.assert_close(list(ours.values()), list(theirs.values()), rtol=1e-6, atol=1e-9, equal_nan=True)
    assert any(r["factor@group:default"] < 1 for r in got)
    assert any(r["factor@step:group:default"] < 1 for r in got)
    for p, q in zip(plain[0].parameters(), model[0].parameters(), strict=True):
        torch.testing.assert_close(p, q, rtol=0, atol=1e-9)
    states, others = gr.state_dict(plain[0]), gr.state_dict(model[0])
    assert states["step"] == others["step"] == 10
    torch.testing.assert_close(others["states"], states["states"], rtol=1e-6, atol=0)
    assert len(model[0].explain().graphs) == 1

    resumed = made(compiled=True)
    for new, old in zip(resumed, model, strict=True):
        new.load_state_dict(copy.deepcopy(old.state_dict()))  # an optimizer takes the tensors themselves
    gr.load_state_dict(resumed[0], others)
    train(*model, range(10, 20))
    train(*resumed, range(10, 20))
    for p, q in zip(model[0].parameters(), resumed[0].parameters(), strict=True):
        assert torch.equal(p, q)
