"""Kernels whose results have other strides than torch predicts: op by op, a model runs wherever it does eagerly."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import gradrewrite as gr
from gradrewrite.passes import CheckFinite, ClipByValue

from helpers import failure


class Gate(nn.Module):
    """``softplus_backward`` has the strides of its gradient here; its meta function predicts those of its input."""

    def __init__(self) -> None:
        super().__init__()
        self.fc = nn.Linear(4, 6)

    def forward(self, x: Tensor) -> Tensor:
        return F.softplus(self.fc(x).transpose(1, 2)).reshape(2, 18)


def test_policy_holds_behind_a_kernel_with_unpredicted_strides() -> None:
    torch.manual_seed(0)
    plain = Gate().double()
    model = gr.transform(copy.deepcopy(plain), gr.on("error:fc", ClipByValue(0.3)))
    x = torch.randn(2, 3, 4, dtype=torch.float64, requires_grad=True)
    y = x.detach().clone().requires_grad_()

    def clip(_: nn.Module, __: object, out: Tensor) -> None:
        out.register_hook(lambda g: g.clamp(-0.3, 0.3))

    plain.fc.register_forward_hook(clip)
    plain(x).pow(2).sum().backward()
    model(y).pow(2).sum().backward()

    assert torch.equal(x.grad, y.grad)
    assert torch.equal(plain.fc.weight.grad, model.fc.weight.grad)


@pytest.mark.long
def test_symbolic_sizes() -> None:
    class Anywhere(Gate):
        def forward(self, x: Tensor) -> Tensor:
            return F.softplus(self.fc(x).transpose(1, 2)).flatten(1)

    plain = Anywhere()
    model = gr.transform(copy.deepcopy(plain), [], dynamic=True)
    for size in (3, 5):
        x = torch.randn(2, size, 4)
        plain.zero_grad()
        model.zero_grad()
        plain(x).pow(2).sum().backward()
        model(x).pow(2).sum().backward()
        assert torch.equal(plain.fc.weight.grad, model.fc.weight.grad)


def test_replay_behind_a_kernel_with_unpredicted_strides() -> None:
    model = gr.transform(Gate(), gr.on("gradient:*", CheckFinite()))
    x = torch.ones(2, 3, 4)
    x[0, 0, 0] = torch.inf
    err = failure(model(x).sum().backward)
    assert err.cause == "the input x was not finite already"


@pytest.mark.upstream
def test_softplus_backward_has_other_strides_than_predicted() -> None:
    error, value = torch.randn(2, 4, 3), torch.randn(2, 3, 4).transpose(1, 2)
    real = torch.ops.aten.softplus_backward(error, value, 1.0, 20.0)
    predicted = torch.ops.aten.softplus_backward(error.to("meta"), value.to("meta"), 1.0, 20.0)
    assert real.stride() == (12, 3, 1)
    assert predicted.stride() == (12, 1, 4)
