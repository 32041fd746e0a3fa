"""Clips under a loss scale: scaling by a power of two changes no bit but the exponents."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

import gradrewrite as gr
from gradrewrite.passes import ClipByGlobalNorm, ClipByNorm, ClipByValue, Observe

from helpers import Probe

POLICIES: dict[str, Any] = {
    "value": gr.on("error:h", ClipByValue(0.75, log=True)),
    "value, two bounds": gr.on("error:h", ClipByValue(2.0, min=-0.125)),
    "norm": gr.on("error:h", ClipByNorm(1.5, log=True)),
    "infinity norm": gr.on("gradient:w", ClipByNorm(1.5, norm_type=float("inf"))),
    "global norm": gr.on("gradient:w", ClipByGlobalNorm(1.5)),
    "observe": gr.on("error:h", Observe("norm", "max_abs", "mean_abs", "min", "max")),
}
SIZE = 4
ERRORS = st.lists(
    st.floats(-1e4, 1e4, width=32).filter(lambda v: v == 0 or abs(v) > 1e-4), min_size=SIZE, max_size=SIZE
)


def backward(model: gr.RewrittenModule, error: Tensor, scale: Tensor | float = 1.0) -> Tensor:
    model.zero_grad()
    (model(error) * scale).backward()
    assert model.w.grad is not None
    return model.w.grad.clone()


@pytest.mark.long
@pytest.mark.parametrize("name", POLICIES)
def test_powers_of_two_change_no_bit(name: str) -> None:
    scale = torch.tensor(1.0)
    scaled = gr.transform(Probe(SIZE), POLICIES[name], loss_scale=scale)
    plain = gr.transform(Probe(SIZE), POLICIES[name])

    @given(ERRORS, st.integers(-20, 20))
    def unchanged(error: list[float], exponent: int) -> None:
        g = torch.tensor(error)
        scale.fill_(2.0**exponent)
        got, wanted = backward(scaled, g, scale), backward(plain, g)
        assert torch.equal(got, wanted * 2.0**exponent)
        assert scaled.monitor.latest() == plain.monitor.latest()

    unchanged()
    assert len(scaled.explain().graphs) == 1
