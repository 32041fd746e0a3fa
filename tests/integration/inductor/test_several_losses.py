"""Losses weighed in code that Inductor compiles: the gradients of one backward a loss, in every kind of step."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import Tensor

import gradrewrite as gr
from gradrewrite.passes import Observe, UPGrad, WeighLosses

from models.several_losses import (
    MODULES,
    assert_equal_gradients,
    eager_gradients,
    eager_gradients_by_error,
    losses_of,
    make,
)


def total(output: Any) -> Tensor:
    return torch.stack(losses_of(output)).sum()


@pytest.mark.parametrize("name", MODULES)
def test_gradients_equal_eager(name: str) -> None:
    plain, x = make(name)
    expected, weights = eager_gradients(copy.deepcopy(plain), x, "trunk", UPGrad().weights)
    model = gr.transform(plain, gr.on("gradient:trunk*", WeighLosses(UPGrad())))
    model.compile()
    total(model(x)).backward()
    found = model.monitor.latest()

    assert [found[f"loss_weight_{k}@group:default"] for k in range(len(weights))] == pytest.approx(weights.tolist())
    assert_equal_gradients(model, expected, 1e-8)


@pytest.mark.parametrize("name", ["conv and batch norm", "Put"])
def test_error_site_equals_eager(name: str) -> None:
    plain, x = make(name)
    module = "trunk.0" if name == "Put" else "trunk"
    reference = copy.deepcopy(plain)
    eager_gradients_by_error(reference, x, module, UPGrad().weights)
    model = gr.transform(plain, gr.on(f"error:{module}", WeighLosses(UPGrad())))
    model.compile()
    total(model(x)).backward()

    assert_equal_gradients(model, {n: p.grad for n, p in reference.named_parameters() if p.grad is not None}, 1e-8)


def test_steps_between_are_weighed_too() -> None:
    plain, x = make("residual")
    observe = [gr.on("error:trunk.one", Observe("loss_norms", every=2)), gr.on("gradient:*", Observe("norm", every=2))]
    model = gr.transform(plain, [gr.on("gradient:trunk.*", WeighLosses(UPGrad())), *observe])
    model.compile()
    seen = []
    for _ in range(4):
        expected, _ = eager_gradients(copy.deepcopy(plain), x, "trunk", UPGrad().weights)
        model.zero_grad()
        total(model(x)).backward()
        found = model.monitor.latest()
        assert_equal_gradients(model, expected, 1e-8)
        seen.append(("loss_norm_2@error:trunk.one" in found, "loss_weight_2@group:default" in found))
        torch.optim.SGD(plain.parameters(), lr=0.1).step()

    assert seen == [(True, True), (False, True)] * 2


@pytest.mark.sample(8)
def test_training_equals_eager() -> None:
    """Weights change from step to step, and one compilation serves all."""
    plain, x = make("two transformer layers")
    reference = copy.deepcopy(plain)
    model = gr.transform(plain, gr.on("gradient:trunk.*", WeighLosses(UPGrad())))
    model.compile()
    own, other = (torch.optim.AdamW(m.parameters(), lr=0.01) for m in (model, reference))
    for step in range(5):
        batch = x.roll(step, 1) + 0.1 * step
        expected, _ = eager_gradients(reference, batch, "trunk", UPGrad().weights)
        own.zero_grad()
        total(model(batch)).backward()
        assert_equal_gradients(model, expected, 1e-8)
        own.step()
        for name, parameter in reference.named_parameters():
            parameter.grad = expected[name]
        other.step()
    weights = model.monitor.history("loss_weight_0@group:default")

    assert len(model.explain().graphs) == 1
    assert len({round(weight, 6) for weight in weights}) > 2
