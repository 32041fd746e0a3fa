"""``assert_matches_eager(optimizer=...)``: a guarded optimizer against the plain one and the actions by hand."""

from __future__ import annotations

import math
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor, nn

import gradrewrite as gr
from gradrewrite.passes import (
    AdaptiveClip,
    CheckFinite,
    ClipByGlobalNorm,
    ClipByNorm,
    ClipByValue,
    DecayWeights,
    Hold,
    Observe,
    Scale,
    SkipSpikes,
)
from gradrewrite.testing import assert_matches_eager

_X = torch.linspace(-1, 1, 8, dtype=torch.float64).reshape(4, 2)
OPTIMIZERS: dict[str, Any] = {
    "SGD": lambda parameters: torch.optim.SGD(parameters, lr=0.1, momentum=0.9),
    "AdamW": lambda parameters: torch.optim.AdamW(parameters, lr=0.01),
    "fused": lambda parameters: torch.optim.AdamW(parameters, lr=0.01, fused=True),
}


def half(state: Tensor) -> Tensor:
    gr.record("largest", state.abs().amax())
    return 0.5 * state


POLICIES: dict[str, Any] = {
    "norm": gr.on("step:*", ClipByNorm(0.01)),
    "global norm": gr.on("step:*", ClipByGlobalNorm(0.01)),
    "single, then group": [gr.on("step:*", ClipByGlobalNorm(0.01)), gr.on("step:0.*", Scale(10.0))],
    "adaptive": gr.on("step:*.weight", AdaptiveClip(0.01)),
    "function": gr.on("step:*", lambda g, p: g + 0.1 * p),
    "decay": gr.on("step:*.weight", DecayWeights(0.1)),
    "errors too": [gr.on("error:*", ClipByValue(0.01)), gr.on("step:*", Scale(0.5))],
    "spikes": gr.on("step:*", SkipSpikes(window=2)),
    "held": gr.on("step:*", Hold(lambda g, p: g.abs() < g.abs().mean())),
    "held and decayed": [gr.on("step:*", Hold(lambda g, p: p > 0)), gr.on("step:0.*", DecayWeights(0.1))],
    "parameters": [gr.on("param:0.*", lambda p, before: 0.5 * (p + before)), gr.on("param:*", Observe("norm"))],
    "state": gr.on("state:*.exp_avg", half),
    "records": [gr.on(f"{kind}:*", Observe("norm")) for kind in ("step", "param", "state")],
}


def _net() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(2, 3), nn.Tanh(), nn.Linear(3, 1)).double()


@pytest.mark.broad
@pytest.mark.parametrize("optimizer", OPTIMIZERS)
@pytest.mark.parametrize("policy", POLICIES)
def test_steps_are_compared(policy: str, optimizer: str) -> None:
    if (policy, optimizer) == ("state", "SGD"):
        pytest.skip("SGD has no state of this name")
    found = assert_matches_eager(_net(), POLICIES[policy], _X, optimizer=OPTIMIZERS[optimizer], steps=4, compiled=False)
    kinds = {site.partition(":")[0] for site in found.acted}
    assert "step" in kinds or policy in ("parameters", "state")
    if policy == "records":
        assert {"norm@step:0.weight", "norm@param:0.weight"} <= set(found.records)
        assert any(record.startswith("norm@state:0.weight.") for record in found.records)
    elif policy in ("parameters", "state"):
        assert any(site.startswith(f"{policy.removesuffix('eters')}:") for site in found.changed)
    elif policy not in ("spikes", "held", "held and decayed"):
        assert any(site.startswith("step:") for site in found.changed) or policy == "decay"


@pytest.mark.broad
@pytest.mark.parametrize("kind", ["gradient", "error", "step"])
def test_skipped_updates_are_compared(kind: str) -> None:
    policy = gr.on(f"{kind}:*", CheckFinite("skip"))
    x = torch.full((4, 2), math.nan, dtype=torch.float64)
    assert_matches_eager(_net(), policy, x, optimizer=OPTIMIZERS["SGD"], steps=2, compiled=False)


@pytest.mark.inductor
def test_compiled_steps_are_compared() -> None:
    policy = [gr.on("error:*", ClipByValue(0.01)), gr.on("step:*", ClipByGlobalNorm(0.01))]
    assert_matches_eager(_net(), policy, _X, optimizer=OPTIMIZERS["AdamW"], steps=2)


@pytest.mark.parametrize("kind", ["step", "param", "state"])
def test_without_an_optimizer_rules_of_the_update_are_an_error(kind: str) -> None:
    with pytest.raises(gr.PolicyError, match=rf"{kind}:\*.*optimizer=lambda"):
        assert_matches_eager(_net(), gr.on(f"{kind}:*", Observe("norm")), _X, compiled=False)


def test_a_wrong_step_is_noticed() -> None:
    with mock.patch.object(ClipByNorm, "apply", lambda self, g: g * 0.9 if torch._guards.detect_fake_mode() else g):
        with pytest.raises(AssertionError, match=r"parameter 0\.weight: the rewritten model and the plain one differ"):
            assert_matches_eager(
                _net(), gr.on("step:*", ClipByNorm(1e9)), _X, optimizer=OPTIMIZERS["SGD"], compiled=False
            )
