"""Rules at different sites commute: the rewritten graph is the same in every order of the policy list."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

import gradrewrite as gr
from gradrewrite.passes import CheckFinite, ClipByGlobalNorm, ClipByNorm, ClipByValue, NanToNum, Observe, Scale

PATTERNS = ["error:0", "error:1", "error:2", "gradient:0.weight", "gradient:2.bias"]
ACTIONS = st.sampled_from(
    [ClipByValue(0.5, log=True), ClipByNorm(1.0), Scale(-1.0), NanToNum(), Observe("norm"), CheckFinite("record")]
)
GROUP = gr.on("gradient:2.weight", ClipByGlobalNorm(1.0))


@pytest.mark.slow
def test_order_of_disjoint_rules_does_not_matter() -> None:
    plain, x = nn.Sequential(nn.Linear(3, 3), nn.Tanh(), nn.Linear(3, 2)), torch.ones(2, 3)

    @given(st.data())
    @settings(max_examples=settings().max_examples // 8 + 1)
    def commute(data: st.DataObject) -> None:
        rules: list[Any] = [gr.on(pattern, data.draw(ACTIONS, label=pattern)) for pattern in PATTERNS]
        rules.append(GROUP)
        shuffled = data.draw(st.permutations(rules), label="order")
        wanted, got = (gr.transform(plain, policy).trace(x) for policy in (rules, shuffled))
        torch.compiler.reset()
        assert got.code == wanted.code
        assert got.edits == wanted.edits
        assert len(got.edits) == len(rules)

    commute()
