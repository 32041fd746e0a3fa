"""State behind an audit: bit for bit as it was, also with graph breaks, hooks, errors and a second model."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import gradrewrite as gr

X = torch.linspace(-1.0, 1.0, 32).reshape(8, 4)


class Normalized(nn.Module):
    """A layer and a normalization; a function runs between them."""

    center: Tensor

    def __init__(self, between: Callable[[Normalized, Tensor], Tensor]) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layer, self.norm = nn.Linear(4, 4), nn.BatchNorm1d(4)
        self.register_buffer("center", torch.zeros(4))
        self.between = between

    def forward(self, x: Tensor) -> Tensor:
        return self.between(self, self.norm(self.layer(x))).square().mean()


def replaces_a_buffer(model: Normalized, h: Tensor) -> Tensor:
    model.center = model.center * 0.9 + h.detach().mean(0)
    return h - model.center


def breaks_the_graph(model: Normalized, h: Tensor) -> Tensor:
    torch._dynamo.graph_break()
    return h + 1


def goes_to_eval(model: Normalized, h: Tensor) -> Tensor:
    torch._dynamo.graph_break()
    model.eval()
    return h + 1


def freezes_the_layer(model: Normalized, h: Tensor) -> Tensor:
    model.norm.requires_grad_(False)
    return torch.add(h, model.norm(h))


def raises(model: Normalized, h: Tensor) -> Tensor:
    torch._dynamo.graph_break()
    model.center = h.mean(0).detach()
    raise ArithmeticError("its own")


def replaces_and_breaks(model: Normalized, h: Tensor) -> Tensor:
    torch._dynamo.graph_break()
    return replaces_a_buffer(model, h)


def state_of(model: nn.Module) -> dict[str, Any]:
    flags = {f"{name} needs": p.requires_grad for name, p in model.named_parameters()}
    modes = {f"{name} trains": m.training for name, m in model.named_modules()}
    return {**copy.deepcopy(model.state_dict()), **flags, **modes}


def is_as_before(model: nn.Module, before: dict[str, Any]) -> bool:
    now = state_of(model)
    return now.keys() == before.keys() and all(
        torch.equal(v, before[k]) if isinstance(v, Tensor) else v == before[k] for k, v in now.items()
    )


STEPS = (replaces_a_buffer, breaks_the_graph, goes_to_eval, freezes_the_layer, raises, replaces_and_breaks)


@pytest.mark.parametrize("steps", [0, 3])
@pytest.mark.parametrize("between", STEPS, ids=lambda f: f.__name__)
def test_model_state_is_given_back(between: Any, steps: int) -> None:
    model = Normalized(between)
    model(X).sum().backward() if between is breaks_the_graph else None
    before, buffers, gradients = state_of(model), dict(model.named_buffers()), [p.grad for p in model.parameters()]
    random = torch.get_rng_state()
    try:
        gr.audit(model, X, steps=steps)
    except ArithmeticError:
        assert between is raises

    assert is_as_before(model, before)
    assert all(b is buffers[name] for name, b in model.named_buffers())
    assert all(p.grad is g for p, g in zip(model.parameters(), gradients, strict=True))
    assert torch.equal(torch.get_rng_state(), random)


def test_a_second_model_of_the_loss_is_given_back() -> None:
    """The other player of a GAN, with a normalization of its own."""
    model, other = nn.Linear(4, 4), Normalized(lambda model, h: h)
    before = state_of(other)
    found = gr.audit(model, X, compute_loss=lambda m, x: other(m(x)))

    assert found.causes == ()
    assert all(p.grad is None for p in other.parameters())
    assert is_as_before(other, before)


def test_inputs_of_another_model_keep_their_graph() -> None:
    trunk, head = nn.Linear(4, 4), nn.Linear(4, 1)
    nn.init.zeros_(head.weight)  # so that a second step runs
    h = trunk(X).tanh()
    x = X.clone().requires_grad_()
    x.grad = torch.ones_like(x)
    gr.audit(head, h)
    gr.audit(head, x)

    assert trunk.weight.grad is None
    assert torch.equal(x.grad, torch.ones_like(x))
    h.sum().backward()


def test_an_optimizer_in_the_backward_takes_no_step() -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 1))
    optimizers: dict[Tensor, torch.optim.SGD] = {p: torch.optim.SGD([p], lr=0.1) for p in model.parameters()}

    def update(p: Tensor) -> None:
        optimizers[p].step()
        optimizers[p].zero_grad()

    for p in model.parameters():
        p.register_post_accumulate_grad_hook(update)
    before = state_of(model)
    found = gr.audit(model, X)

    assert (found.causes, found.remarks) == ((), ())
    assert is_as_before(model, before)
    model(X).sum().backward()
    assert all(p.grad is None for p in model.parameters())  # the hooks are back
    assert not is_as_before(model, before)


def test_a_lazy_module_is_refused_with_the_way_out() -> None:
    with pytest.raises(ValueError, match="of a lazy module is not initialized: call the model once"):
        gr.audit(nn.Sequential(nn.LazyLinear(4)), X)
