"""Policies are looked at where they are given."""

from __future__ import annotations

from typing import Any

import pytest
from torch import nn

import gradrewrite as gr
from gradrewrite.errors import PolicyError
from gradrewrite.passes import MGDA, AllReduce, ClipByNorm, DecayWeights, Hold, SkipSpikes, WeighLosses
from gradrewrite.policy.rules import check_policy

pytestmark = pytest.mark.pure


def test_an_action_that_no_guard_may_run_is_refused_where_it_is_given() -> None:
    """No graph of the model has step sites, and without a guard nobody asks."""
    with pytest.raises(PolicyError, match=r"step:w: WeighLosses\(MGDA\(\)\) does not apply to this kind of site"):
        check_policy([gr.on("step:w", WeighLosses(MGDA()))])
    check_policy([gr.on("step:w", ClipByNorm(1.0)), gr.on("w", WeighLosses(MGDA()))])


@pytest.mark.parametrize(
    ("action", "pattern"), [(WeighLosses(MGDA()), "gradient"), (ClipByNorm(1.0), "error"), (AllReduce(), "gradient")]
)
def test_the_example_for_a_lone_action_is_one_that_works(action: Any, pattern: str) -> None:
    with pytest.raises(PolicyError, match=rf"gr\.on\('{pattern}:\*', "):
        check_policy(action)


@pytest.mark.parametrize("action", [Hold(lambda g, v: v == 0), DecayWeights(0.1), SkipSpikes()])
def test_step_actions_need_a_pattern_with_their_kind(action: Any) -> None:
    with pytest.raises(gr.PolicyError, match=r"applies to step sites alone.*gr\.on\('step:weight', "):
        gr.transform(nn.Linear(2, 2), gr.on("weight", action))
