"""Rewritten gradients equal those of eager tensor hooks, for models of every kind."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

import gradrewrite as gr
from gradrewrite.passes import ClipByNorm, ClipByValue

from helpers import (
    CASES,
    assert_same_gradients,
    clip_norm,
    clip_value,
    eager_gradients,
    make_case,
    mostly_slow,
    policy_at,
    run_case,
)


def turn(g: Tensor) -> Tensor:
    return g.flip(-1) * 1.5


ACTIONS: dict[str, tuple[Any, Callable[[Tensor], Tensor]]] = {
    "value": (ClipByValue(0.05), clip_value),
    "norm": (ClipByNorm(0.1), clip_norm),
    "function": (turn, turn),
}


@pytest.mark.long
@pytest.mark.parametrize("action", mostly_slow(ACTIONS))
@pytest.mark.parametrize("name", CASES)
def test_op_by_op_equals_eager_hooks(name: str, action: str) -> None:
    case = CASES[name]
    inserted, fn = ACTIONS[action]
    dtype = torch.float32 if case.autocast else torch.float64
    plain, inputs = make_case(case, dtype)
    expected_out, expected = eager_gradients(case, plain, inputs, case.hooked, fn)
    unclipped = eager_gradients(case, plain, inputs, (), fn)[1]

    model = gr.transform(copy.deepcopy(plain), policy_at(case.hooked, inserted))
    out, got = run_case(case, model, inputs)

    torch.testing.assert_close(vars_of(out), vars_of(expected_out), rtol=0, atol=0)
    assert_same_gradients(got, expected, rtol=2e-2 if case.autocast else 1e-12)
    assert any(g is not None and not torch.equal(g, unclipped[n]) for n, g in got.items())


@pytest.mark.inductor
@pytest.mark.parametrize("name", CASES)
def test_inductor_equals_eager_hooks(name: str) -> None:
    case = CASES[name]
    plain, inputs = make_case(case, torch.float32)
    _, expected = eager_gradients(case, plain, inputs, case.hooked, clip_norm)

    model = gr.transform(copy.deepcopy(plain), policy_at(case.hooked, ClipByNorm(0.1)))
    model.compile(options={"fallback_random": True})
    _, got = run_case(case, model, inputs)

    assert_same_gradients(got, expected, rtol=3e-2 if case.autocast else 1e-5)


def vars_of(out: Any) -> Any:
    return vars(out) if hasattr(out, "__dataclass_fields__") else out
