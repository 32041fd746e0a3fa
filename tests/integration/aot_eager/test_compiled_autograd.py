"""Compiled autograd would lose the policy: it is refused at the first backward."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch._dynamo.compiled_autograd as compiled_autograd
from torch import nn

import gradrewrite as gr
from gradrewrite.passes import CheckFinite, Observe

from helpers import mostly_slow


def compiler(gm: torch.fx.GraphModule) -> Any:
    return torch.compile(gm, backend="aot_eager")


POLICIES = [[], gr.on("error:0", Observe("norm")), gr.on("gradient:*", CheckFinite("raise"))]


def make(policy: Any) -> gr.RewrittenModule:
    torch.manual_seed(0)
    return gr.transform(nn.Sequential(nn.Linear(3, 3), nn.ReLU(), nn.Linear(3, 1)), policy)


@pytest.mark.parametrize("policy", mostly_slow(POLICIES))
def test_backward_in_the_context_manager_is_refused(policy: Any) -> None:
    model, batch = make(policy), torch.ones(2, 3)
    loss = model(batch).sum()
    with compiled_autograd._enable(compiler), pytest.raises(gr.NotRewrittenError, match="compiled autograd"):
        loss.backward()
    assert model.original[0].weight.grad is None
    model(batch).sum().backward()
    assert model.original[0].weight.grad is not None


def test_backward_is_refused_when_it_ran_before_without() -> None:
    model, batch = make(POLICIES[1]), torch.ones(2, 3)
    model(batch).sum().backward()
    with compiled_autograd._enable(compiler), pytest.raises(gr.NotRewrittenError, match="compiled autograd"):
        model(batch).sum().backward()


@pytest.mark.long
@pytest.mark.parametrize("policy", mostly_slow(POLICIES))
def test_backward_in_a_compiled_training_step_is_refused(policy: Any) -> None:
    model, batch = make(policy), torch.ones(2, 3)

    def step() -> None:
        model(batch).sum().backward()

    with torch._dynamo.config.patch(compiled_autograd=True):  # torch.compile reads it
        with pytest.raises(gr.NotRewrittenError, match="compiled autograd"):
            torch.compile(step, backend="aot_eager")()


@pytest.mark.inductor
def test_backward_of_a_backend_is_refused() -> None:
    step = torch.compile(nn.Linear(3, 1), backend=gr.backend([]))
    loss = step(torch.ones(2, 3)).sum()
    with compiled_autograd._enable(compiler), pytest.raises(gr.NotRewrittenError, match="compiled autograd"):
        loss.backward()


@pytest.mark.long
def test_other_models_use_compiled_autograd_as_ever() -> None:
    refused, plain, batch = make([]), nn.Linear(3, 1), torch.ones(2, 3)
    run = torch.compile(plain, backend="aot_eager")
    run(batch).sum().backward()
    wanted, plain.weight.grad = plain.weight.grad, None
    loss = refused(batch).sum()
    with compiled_autograd._enable(compiler):
        with pytest.raises(gr.NotRewrittenError):
            loss.backward()
        run(batch).sum().backward()
    assert torch.equal(plain.weight.grad, wanted)


def test_setting_without_a_compiled_backward_changes_nothing() -> None:
    model = make(POLICIES[1])
    with torch._dynamo.config.patch(compiled_autograd=True):
        model(torch.ones(2, 3)).sum().backward()
    assert model.monitor.latest()["norm@error:0"] > 0
