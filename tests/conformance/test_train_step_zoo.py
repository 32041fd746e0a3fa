"""Models of transformers, timm, diffusers and torch_geometric in training steps as one graph, against two phases."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import gradrewrite as gr
from gradrewrite.passes import ClipByGlobalNorm

from conformance.outcomes import check_outcome
from conformance.test_zoo import CASES, Given, clip_to_mean, given, raise_if_torch_refuses, weighted

SUITE = "train step zoo"
STEPS = 2


def trained(case: Given, net: nn.Module, *, as_one: bool, rules: list[Any]) -> tuple[nn.Module, list[Tensor]]:
    model = gr.transform(net, rules)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3, momentum=0.9)
    gr.guard(optimizer, model)

    def compute_loss(model: Any, **inputs: Any) -> Tensor:
        out = model(**inputs)
        loss: Tensor = weighted(out) if case.loss is None else case.loss(out)
        return loss

    step = gr.train_step(model, optimizer, compute_loss=compute_loss, compile=False) if as_one else None
    losses = []
    for number in range(STEPS):
        torch.manual_seed(number)
        inputs = {n: t.clone() if isinstance(t, Tensor) else t for n, t in case.inputs.items()}
        if step is not None:
            losses.append(step(**inputs))
            continue
        loss = compute_loss(model, **inputs)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.detach())
    return model, losses


def check(name: str) -> None:
    case = given(name)
    rules = [gr.on("error:*", clip_to_mean), gr.on("gradient:*", ClipByGlobalNorm(1e-1))]
    plain = copy.deepcopy(case.model)
    two, wanted = trained(case, copy.deepcopy(case.model), as_one=False, rules=rules)
    torch.compiler.reset()
    try:
        one, losses = trained(case, copy.deepcopy(case.model), as_one=True, rules=rules)
    except Exception as err:
        raise_if_torch_refuses(case, err)
        raise
    near = 1e-5 if any(p.dtype == torch.float32 for p in two.parameters()) else 1e-9
    for got, loss in zip(losses, wanted, strict=True):
        torch.testing.assert_close(got, loss, rtol=near, atol=near)
    state = two.state_dict()
    for key, t in one.state_dict().items():
        torch.testing.assert_close(t, state[key], rtol=near, atol=near, msg=lambda m, n=key: f"{n}: {m}")
    assert one.monitor.history("total_norm@group:default")[-1] > 0
    assert any(not torch.equal(t, state[key]) for key, t in plain.state_dict().items())


@pytest.mark.slow
@pytest.mark.sample(12)
@pytest.mark.parametrize("name", CASES)
def test_models(name: str) -> None:
    check_outcome(SUITE, name, lambda: check(name))
