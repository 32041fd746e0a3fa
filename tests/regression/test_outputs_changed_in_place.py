"""No output of a model is saved for what a policy inserts: the caller may change it before the backward."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import gradrewrite as gr
from gradrewrite.passes import CheckFinite, ClipByValue, Keep, Observe


class Net(nn.Module):
    """Returns a loss, a value that later ops read, and a view; its own backward saves none of them."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(3, 4), nn.Linear(4, 2)

    def forward(self, x: Tensor) -> tuple[Tensor, ...]:
        hidden = self.first(x) + 1.0
        scaled = hidden * 3.0
        logits = self.last(scaled.tanh())
        return logits.pow(2).mean(), hidden, scaled.view(-1)


class Loss(Net):
    """Returns the loss alone, which is smaller than the counts of its elements."""

    def forward(self, x: Tensor) -> tuple[Tensor, ...]:
        return super().forward(x)[:1]


def record_and_scale(g: Tensor, value: Tensor) -> Tensor:
    gr.record("largest", value.abs().max())
    return g * value.tanh()


POLICIES: dict[str, Any] = {
    "check of gradients": gr.on("gradient:*", CheckFinite()),
    "checks of values": gr.on("activation:*/*", CheckFinite("warn")),
    "check of values, by group": [gr.on("activation:*/*", CheckFinite("skip")), gr.on("gradient:*", ClipByValue(1e9))],
    "statistics": gr.on("activation:*/*", Observe("norm", "max_abs", "zeros")),
    "kept values": gr.on("activation:*/*", Keep()),
    "function that reads the value": gr.on("error:*/*", record_and_scale),
}
ENGINES = [False, pytest.param(True, marks=[pytest.mark.inductor, pytest.mark.slow])]


def total(outputs: Sequence[Tensor]) -> Tensor:
    return torch.stack([output.sum() * 0.1 for output in outputs]).sum()


@pytest.mark.long
@pytest.mark.parametrize("compiled", ENGINES)
@pytest.mark.parametrize("name", POLICIES)
@pytest.mark.parametrize("kind", [Net, Loss])
def test_outputs_may_be_changed_in_place_before_the_backward(kind: type[Net], name: str, compiled: bool) -> None:
    torch.manual_seed(0)
    plain = kind()
    x = torch.randn(5, 3)
    unchanged = gr.transform(copy.deepcopy(plain), POLICIES[name])
    model = gr.transform(copy.deepcopy(plain), POLICIES[name])
    if compiled:
        unchanged.compile()
        model.compile()
    total(unchanged(x)).backward()

    outputs = model(x)
    loss = total(outputs)
    for output in outputs[:2]:
        output.mul_(7.0)
    loss.backward()

    for p, q in zip(model.parameters(), unchanged.parameters(), strict=True):
        assert p.grad is not None
        assert q.grad is not None
        assert torch.equal(p.grad, q.grad)
    assert model.monitor.latest() == unchanged.monitor.latest()
    kept, expected = model.monitor.kept(), unchanged.monitor.kept()
    assert kept.keys() == expected.keys()
    assert all(torch.equal(kept[site], expected[site]) for site in kept)
    assert model.monitor.latest() or kept, "the policy did not act"


@pytest.mark.parametrize("compiled", ENGINES)
def test_an_output_that_the_model_itself_saves_fails_as_without_a_policy(compiled: bool) -> None:
    class Exp(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return x.exp()

    model = gr.transform(Exp(), gr.on("input:x", CheckFinite()))
    if compiled:
        model.compile()
    y = model(torch.ones(2, requires_grad=True))
    y /= 2
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        y.sum().backward()


@pytest.mark.long
def test_values_that_are_computed_from_an_output_are_saved_once() -> None:
    """A returned hidden state does not double what the backward keeps of all layers behind it."""

    class Hidden(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers = nn.ModuleList(nn.Linear(8, 8) for _ in range(6))

        def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
            first = h = self.layers[0](x).tanh()
            for layer in self.layers[1:]:
                h = layer(h).tanh()
            return h.sum(), first

    def saved(policy: Any) -> int:
        model, sizes = gr.transform(Hidden(), policy), dict[int, int]()

        def pack(t: Tensor) -> Tensor:
            sizes[t.untyped_storage().data_ptr()] = t.numel()
            return t

        with torch.autograd.graph.saved_tensors_hooks(pack, lambda t: t):
            loss, _ = model(torch.ones(16, 8))
        loss.backward()
        return sum(sizes.values())

    plain = saved([])
    assert (
        saved(gr.on("error:*/tanh", lambda g, v: g * v)) <= plain + 2 * 16 * 8
    )  # a copy of the output, and its error's
