"""Held elements, and functions at parameters and optimizer state, against the same by hand behind a plain step."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import gradrewrite as gr
from gradrewrite.passes import CheckFinite, ClipByGlobalNorm, ClipByNorm, DecayWeights, Hold, Observe

from models.small import Lambda

Make = Callable[[Iterable[nn.Parameter]], torch.optim.Optimizer]
OPTIMIZERS: dict[str, Make] = {
    "AdamW": lambda p: torch.optim.AdamW(p, lr=0.1, weight_decay=0.3),
    "AdamW foreach": lambda p: torch.optim.AdamW(p, lr=0.1, weight_decay=0.3, foreach=True, amsgrad=True),
    "AdamW fused": lambda p: torch.optim.AdamW(p, lr=0.1, weight_decay=0.3, fused=True),
    "SGD": lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9, weight_decay=0.3, nesterov=True),
    "SGD fused": lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9, fused=True),
    "RMSprop": lambda p: torch.optim.RMSprop(p, lr=0.01, momentum=0.5, centered=True),
    "Rprop": lambda p: torch.optim.Rprop(p, lr=0.01),
    "NAdam": lambda p: torch.optim.NAdam(p, lr=0.01),
    "Adagrad": lambda p: torch.optim.Adagrad(p, lr=0.01, initial_accumulator_value=0.5),
}
STEPS = 6


def made() -> nn.Module:
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(4, 5), nn.Tanh(), nn.Linear(5, 3), Lambda(lambda m, x: x * m.s, s=nn.Parameter(torch.ones(()))))
    with torch.no_grad():
        net[0].weight[torch.rand(5, 4) < 0.5] = 0.0
    return net.double()


def batch(number: int) -> Tensor:
    return torch.randn(6, 4, dtype=torch.float64, generator=torch.Generator().manual_seed(number))


def is_zero(gradient: Tensor, value: Tensor) -> Tensor:
    return value == 0


def is_small(gradient: Tensor, value: Tensor) -> Tensor:
    return gradient.abs() < gradient.abs().mean()


def to_unit_rows(value: Tensor) -> Tensor:
    norms = value.norm(dim=-1, keepdim=True)
    gr.record("longest", norms.amax())
    return value / norms.clamp(min=1.0)


def half_way(value: Tensor, before: Tensor) -> Tensor:
    return 0.5 * (value + before)


Reference = Callable[[dict[str, Tensor], dict[str, dict[str, Tensor]], dict[str, Tensor], dict[str, Any]], None]


def hold(where: Any, names: tuple[str, ...]) -> Reference:
    def put_back(parameters: Any, states: Any, old: Any, old_states: Any) -> None:
        for name in names:
            mask = where(parameters[name].grad, old[name])
            parameters[name].data = torch.where(mask, old[name], parameters[name].data)
            for key, tensor in states[name].items():
                if key in ("step", "mu_product"):
                    continue
                first = tensor.clone() if key == "step_size" else torch.zeros_like(tensor)
                tensor.copy_(torch.where(mask, old_states[name].get(key, first), tensor))

    return put_back


def project(parameters: Any, states: Any, old: Any, old_states: Any) -> None:
    value = parameters["0.weight"]
    value.data = value.data / value.data.norm(dim=-1, keepdim=True).clamp(min=1.0)


def average(parameters: Any, states: Any, old: Any, old_states: Any) -> None:
    for name in ("0.weight", "2.bias", "3.s"):
        parameters[name].data = 0.5 * (parameters[name].data + old[name])


NAMES = ("0.weight", "0.bias", "2.weight", "2.bias", "3.s")
POLICIES: dict[str, tuple[Callable[[], list[Any]], list[Reference]]] = {
    "hold zeros": (lambda: [gr.on("step:0.weight", Hold(is_zero))], [hold(is_zero, ("0.weight",))]),
    "hold small gradients": (lambda: [gr.on("step:*", Hold(is_small))], [hold(is_small, NAMES)]),
    "two holds": (
        lambda: [gr.on("step:0.*", Hold(is_zero)), gr.on("step:0.*", Hold(is_small))],
        [hold(lambda g, v: is_zero(g, v) | is_small(g, v), NAMES[:2])],
    ),
    "project": (lambda: [gr.on("param:0.weight", to_unit_rows)], [project]),
    "average": (
        lambda: [gr.on(f"param:{name}", half_way) for name in ("0.weight", "2.bias", "3.s")], [average],
    ),
    "hold and project": (
        lambda: [gr.on("param:0.weight", to_unit_rows), gr.on("step:0.weight", Hold(is_zero))],
        [hold(is_zero, ("0.weight",)), project],
    ),
}  # fmt: skip


def train(net: nn.Module, run: Callable[[Tensor], Tensor], optimizer: Any, around: Callable[[Callable[[], None]], None]) -> None:
    for step in range(STEPS):
        optimizer.zero_grad()
        for part in range(2):
            run(batch(2 * step + part)).square().sum().backward()
        around(optimizer.step)


def state_of(optimizer: torch.optim.Optimizer, net: nn.Module) -> dict[str, dict[str, Tensor]]:
    return {name: optimizer.state.get(p, {}) for name, p in net.named_parameters()}


def by_hand(net: nn.Module, make: Make, references: list[Reference]) -> torch.optim.Optimizer:
    optimizer = make(net.parameters())

    def around(step: Callable[[], None]) -> None:
        old = {name: p.detach().clone() for name, p in net.named_parameters()}
        old_states = copy.deepcopy({n: {k: t.clone() for k, t in s.items()} for n, s in state_of(optimizer, net).items()})
        step()
        for reference in references:
            reference(dict(net.named_parameters()), state_of(optimizer, net), old, old_states)

    train(net, net, optimizer, around)
    return optimizer


def assert_same(net: nn.Module, optimizer: Any, plain: nn.Module, other: Any, near: float = 1e-10) -> None:
    for (name, p), q in zip(net.named_parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(p, q, rtol=near, atol=near, msg=lambda m, n=name: f"{n}: {m}")
    ours, theirs = state_of(optimizer, net), state_of(other, plain)
    for name in ours:
        assert ours[name].keys() == theirs[name].keys()
        for key, t in ours[name].items():
            torch.testing.assert_close(t, theirs[name][key], rtol=near, atol=near, msg=lambda m, n=f"{name}.{key}": f"{n}: {m}")


@pytest.mark.parametrize("name", OPTIMIZERS)
@pytest.mark.parametrize("policy", POLICIES)
def test_equals_the_same_by_hand(policy: str, name: str) -> None:
    rules, references = POLICIES[policy]
    net, plain = made(), made()
    other = by_hand(plain, OPTIMIZERS[name], references)
    model = gr.transform(net, rules())
    optimizer = gr.guard(OPTIMIZERS[name](net.parameters()), model)
    train(net, model, optimizer, lambda step: step())
    assert_same(net, optimizer, plain, other)
