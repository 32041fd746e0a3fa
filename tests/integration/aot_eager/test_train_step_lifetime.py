"""What a training step keeps: kept tensors of their own, nothing of deleted models."""

from __future__ import annotations

import gc
import weakref

import pytest
import torch
from torch import Tensor, nn

import gradrewrite as gr
from gradrewrite.passes import CheckFinite, ClipByGlobalNorm, Keep, Observe


class Transposed(nn.Module):
    """A view of a parameter that is a value with a site."""

    def __init__(self) -> None:
        super().__init__()
        self.w = nn.Parameter(torch.ones(3, 2))

    def forward(self, x: Tensor) -> Tensor:
        loss: Tensor = (x @ self.w.t()).square().mean()
        return loss


def test_a_kept_view_of_a_parameter_is_that_of_the_forward() -> None:
    net = Transposed()
    model = gr.transform(net, gr.on("activation:/t", Keep()))
    step = gr.train_step(model, torch.optim.SGD(model.parameters(), lr=0.1), compile=False)
    for _ in range(2):
        before = net.w.detach().clone()
        step(torch.ones(2, 2))
        (kept,) = model.monitor.kept().values()
        assert torch.equal(kept, before.t())
        assert not torch.equal(net.w, before)


def test_deleted_steps_leave_nothing() -> None:
    net = nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 1))
    model = gr.transform(net, gr.on("gradient:*", [Observe("norm"), CheckFinite("skip")]))
    optimizer = torch.optim.AdamW(model.parameters())
    step = gr.train_step(model, optimizer, compute_loss=lambda m, x: m(x).square().mean(), compile=False)
    for _ in range(2):
        step(torch.randn(3, 4))
    assert model.monitor.latest()
    refs = [weakref.ref(one) for one in (net, model, optimizer, step, net[0].weight)]
    del net, model, optimizer, step
    gc.collect()
    assert [ref() for ref in refs] == [None] * len(refs)


@pytest.mark.inductor
def test_sums_keep_the_strides_of_gradients() -> None:
    """The gradient of a transposed weight is transposed."""
    torch.manual_seed(0)
    nets = [Transposed() for _ in range(2)]
    policy = [gr.on("step:*", ClipByGlobalNorm(0.1))]
    one, two = (gr.transform(net, policy) for net in nets)
    step = gr.train_step(one, torch.optim.SGD(one.parameters(), lr=0.1))
    optimizer = gr.guard(torch.optim.SGD(two.parameters(), lr=0.1), two)
    for _ in range(2):
        x = torch.randn(4, 2)
        step.accumulate(x)
        step.accumulate(2 * x)
        step(3 * x)
        for factor in (1, 2, 3):
            two(factor * x).backward()
        optimizer.step()
        optimizer.zero_grad()
    torch.testing.assert_close(nets[0].w, nets[1].w)
    assert not torch.equal(nets[0].w, torch.ones(3, 2))
