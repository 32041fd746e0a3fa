"""Compiled models with stored saved tensors: bytes, outputs and gradients, against the traced graph op by op."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import gradrewrite as gr
from gradrewrite.passes import Store

from models.gpt import Gpt, batch
from models.saved_tensors import assert_as_expected, trace

LARGEST_SHARE = {"int8": 0.35, "float8_e4m3fn": 0.35}


def step(model: nn.Module, inputs: tuple[Tensor, ...]) -> tuple[Tensor, int, list[Tensor]]:
    """Loss, bytes that autograd keeps beside the parameters, each memory once, and gradients."""
    model.zero_grad()
    loss = model(*inputs)
    own = {p.untyped_storage().data_ptr() for p in (*model.parameters(), *inputs)}
    saved = [t.untyped_storage() for t in loss.grad_fn.saved_tensors if t is not None]
    memory = {s.data_ptr(): s.nbytes() for s in saved if s.data_ptr() not in own}
    loss.backward()
    return loss.detach(), sum(memory.values()), [p.grad.clone() for p in model.parameters()]


def distance(one: Tensor, other: Tensor) -> float:
    """The difference of two tensors, relative to the norm of the second one."""
    return float((one - other).norm() / other.norm())


@pytest.fixture(scope="module")
def gpt() -> tuple[nn.Module, tuple[Tensor, ...], Any]:
    """A model, its inputs, and one step of it, compiled without rules."""
    torch.manual_seed(0)
    model, inputs = Gpt(layers=2, width=64, heads=2, context=64), batch(rows=4, context=64)
    unchanged = gr.transform(copy.deepcopy(model), [])
    unchanged.compile()
    return model, inputs, step(unchanged, inputs)


@pytest.mark.sample(12)
@pytest.mark.parametrize("form", ["int8", "float8_e4m3fn"])
def test_compiled_gpt(gpt: tuple[nn.Module, tuple[Tensor, ...], Any], form: Any) -> None:
    plain, inputs, (wanted_loss, plain_bytes, plain_gradients) = gpt
    policy = gr.on("saved:*", Store(form))
    model = gr.transform(copy.deepcopy(plain), policy)
    model.compile()
    loss, num_bytes, gradients = step(model, inputs)
    traced = trace(copy.deepcopy(plain), policy, *inputs)
    assert_as_expected(traced, form, rtol=1e-5)
    assert torch.equal(loss, wanted_loss)
    assert num_bytes <= LARGEST_SHARE[form] * plain_bytes
    by_op = [g for g in traced.with_tangents_of_one().run()[traced.num_outputs :] if isinstance(g, Tensor)]
    # Where a compiled value rounds otherwise, its form may be the next number.
    assert max(distance(g, t) for g, t in zip(gradients, by_op, strict=True)) < 1e-3
    assert max(distance(g, t) for g, t in zip(gradients, plain_gradients, strict=True)) > 4e-3
