"""Tensors that actions close over, and whose dtype or size changes: the next call compiles anew."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import gradrewrite as gr
from gradrewrite.backends.backend import make_backend
from gradrewrite.backends.engines import AotEager
from gradrewrite.passes import ClipByValue

from models.small import Lambda


def scaled_by(held: nn.Module) -> Callable[[Tensor], Tensor]:
    def scale(g: Tensor) -> Tensor:
        return g * held.weight.detach().to(g.dtype).flatten()[-1]

    return scale


def held(value: float, number: int = 4) -> nn.Linear:
    layer = nn.Linear(number, 1)
    nn.init.constant_(layer.weight, value)
    return layer


def gradient_of(model: nn.Module, weight: Tensor) -> Tensor:
    weight.grad = None
    model(torch.ones(2, 3)).sum().backward()
    assert weight.grad is not None
    return weight.grad


def larger(layer: nn.Linear) -> None:
    layer.weight.data = torch.full((1, 9), 7.0)


CHANGES: dict[str, tuple[Callable[[nn.Linear], Any], float]] = {
    "dtype": (lambda layer: layer.to(torch.bfloat16), 3.0),
    "sizes": (larger, 7.0),
    "strides": (lambda layer: setattr(layer.weight, "data", torch.full((1, 8), 5.0)[:, ::2]), 5.0),
}


@pytest.mark.broad
@pytest.mark.parametrize("options", [{}, {"regions": "0"}, {"fullgraph": False}], ids=str)
@pytest.mark.parametrize("change", CHANGES)
@pytest.mark.parametrize("kind", ["error:0", "gradient:0.weight"])
def test_the_next_call_reads_the_new_form(kind: str, change: str, options: dict[str, Any]) -> None:
    layer, (make, factor) = held(3.0), CHANGES[change]
    model = gr.transform(nn.Sequential(nn.Linear(3, 2)), gr.on(kind, scaled_by(layer)), **options)
    before = gradient_of(model, model[0].weight)
    make(layer)

    assert torch.equal(gradient_of(model, model[0].weight), before / 3 * factor)


@pytest.mark.broad
def test_a_bound_of_another_dtype() -> None:
    bound = torch.tensor(0.5)
    model = gr.transform(nn.Linear(3, 2), gr.on("gradient:weight", ClipByValue(bound)))
    assert gradient_of(model, model.weight).max() == 0.5
    bound.data = torch.tensor(0.25, dtype=torch.float64)
    assert gradient_of(model, model.weight).max() == 0.25


def test_step_sites() -> None:
    layer = held(3.0)
    model = gr.transform(nn.Linear(3, 2), gr.on("step:weight", scaled_by(layer)))
    optimizer = gr.guard(torch.optim.SGD(model.parameters(), lr=1.0), model)
    moved = []
    for make in (lambda layer: layer, larger, lambda layer: layer.to(torch.bfloat16)):
        make(layer)
        before = model.weight.detach().clone()
        gradient_of(model, model.weight)
        optimizer.step()
        moved.append(before - model.weight.detach())

    torch.testing.assert_close(moved[1] / 7, moved[0] / 3)
    torch.testing.assert_close(moved[2], moved[1])


@pytest.mark.broad
def test_a_change_before_the_backward_is_refused() -> None:
    layer = held(3.0)
    model = gr.transform(nn.Linear(3, 2), gr.on("gradient:*", scaled_by(layer)))
    loss = model(torch.ones(2, 3)).sum()
    layer.to(torch.bfloat16)
    with pytest.raises(gr.PolicyError, match=r"was torch.float32 .* and is torch.bfloat16") as caught:
        loss.backward()
    assert caught.value.code == "live-form"
    gradient_of(model, model.weight)


@pytest.mark.broad
def test_a_backend_refuses() -> None:
    layer, net = held(3.0), nn.Sequential(nn.Linear(3, 2))
    compiled = torch.compile(net, backend=make_backend(gr.on("error:0", scaled_by(layer)), None, AotEager()))
    before = gradient_of(compiled, net[0].weight)
    larger(layer)
    with pytest.raises(gr.PolicyError, match=r"torch.compiler.reset\(\)"):
        gradient_of(compiled, net[0].weight)
    torch.compiler.reset()
    assert torch.equal(gradient_of(compiled, net[0].weight), before / 3 * 7)


def test_a_tensor_with_a_gradient_function_is_read() -> None:
    source = torch.full((), 2.0, requires_grad=True)
    factor = source * 1.5
    net = Lambda(lambda m, x: m.fc(x).sum(), fc=nn.Linear(3, 2))
    model = gr.transform(net, gr.on("gradient:*", lambda g: g * factor))
    model(torch.ones(2, 3)).backward()

    assert torch.equal(net.fc.weight.grad, torch.full((2, 3), 6.0))
    assert source.grad is None
