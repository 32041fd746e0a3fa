"""Norms that updates used, against a clip and a baseline."""

from __future__ import annotations

import math
import random
from collections.abc import Sequence
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gradrewrite.diagnostics.health import examine
from gradrewrite.diagnostics.judge import Evidence
from gradrewrite.diagnostics.run_log import Step, last_run
from gradrewrite.diagnostics.used_gradients import (
    checked_clip,
    clip_causes,
    missing_norms,
    scale_exponent,
    scale_text,
    used_norms,
)

pytestmark = pytest.mark.pure


def run_of(norms: Sequence[float]) -> list[Step]:
    """A run that learns, with these norms at one step site."""
    return [Step(n, {"norm@step:w": norm, "loss@run": 2.0 * 0.9**n}) for n, norm in enumerate(norms)]


def test_norms_of_parameters_and_of_groups_behind_their_clips() -> None:
    assert used_norms(last_run([Step(0, {"norm@step:a": 3.0, "norm@step:b": 4.0, "norm@gradient:a": 9.0})])) == {0: 5.0}
    clipped = {"norm@step:a": 3.0, "factor@step:a": 0.5, "norm@step:b": 2.0}
    assert used_norms(last_run([Step(0, clipped)])) == {0: 2.5}
    groups = {"norm@step:a": 9.0, "total_norm@step:group:default": 8.0, "factor@step:group:default": 0.25}
    assert used_norms(last_run([Step(0, groups)])) == {0: 2.0}
    skipped = [Step(0, {"norm@step:a": 3.0, "skipped@optimizer:0": 1.0}), Step(1, {"norm@step:a": math.inf})]
    assert used_norms(last_run(skipped)) == {}


def test_a_clip_that_is_exceeded() -> None:
    health = examine(run_of([0.5, 1.0, 37.2, 4.0]), evidence=Evidence(clip=1.0))
    (cause,) = health.faults
    assert (cause.kind, cause.site, cause.step, cause.factor) == ("update", "", 2, 37.2)
    assert cause.text == (
        "clip=1, but the optimizer used gradients of norm up to 37.2: the clip ran before backward(), after step(), or "
        "on other parameters. It is exceeded in 2 of 4 updates."
    )
    assert cause.rules == ('gr.on("step:*", ClipByGlobalNorm(1))',)
    assert health.verdict.causes == (cause,)
    assert cause.figures == {"clip": 1.0, "largest": 37.2, "above": 2, "updates": 4}


@given(seed=st.integers(0, 10**6), clip=st.floats(1e-3, 1e3), number=st.integers(1, 60))
def test_norms_up_to_a_clip_are_no_fault(seed: int, clip: float, number: int) -> None:
    rng = random.Random(seed)
    norms = [min(clip, clip * math.exp(rng.gauss(-1.0, 2.0))) * rng.uniform(0.999, 1.001) for _ in range(number)]
    run = last_run(run_of(norms))
    assert clip_causes(run, clip, used_norms(run)) == []


@given(seed=st.integers(0, 10**6), scale=st.sampled_from([2**k for k in range(4, 20)]))
def test_a_clip_of_scaled_gradients(seed: int, scale: int) -> None:
    rng = random.Random(seed)
    norms = [1.5 / scale * rng.uniform(0.999, 1.001) for _ in range(12)] + [0.4 / scale] * 3
    rng.shuffle(norms)
    run = last_run(run_of(norms))
    (cause,) = clip_causes(run, 1.5, used_norms(run))
    assert (cause.kind, cause.factor) == ("loss scale", scale)
    assert f"the clip saw gradients scaled by {scale:,}: scaler.unscale_(optimizer) has to come before" in cause.text


def test_few_norms_tell_no_scale() -> None:
    run = last_run(run_of([2.0**-16] * 3))
    assert clip_causes(run, 1.0, used_norms(run)) == []


def test_without_norms_the_rule_is_told() -> None:
    steps = [Step(n, {"norm@gradient:w": 1.0, "loss@run": 2.0 * 0.9**n}) for n in range(30)]
    health = examine(steps, evidence=Evidence(clip=1.0))
    assert health.faults == ()
    assert missing_norms(1.0) in health.verdict.remarks
    assert 'gr.on("step:*", Observe("norm"))' in missing_norms(1.0)


@pytest.mark.parametrize("wrong", [0, -1.0, math.nan, math.inf, True, "1.0", None])
def test_a_clip_is_a_number(wrong: Any) -> None:
    with pytest.raises(ValueError, match=r"here: clip is a number > 0, .* got "):
        checked_clip(wrong, "here")


def two_runs(exponent: int, noise: float, seed: int, kind: str = "gradient") -> tuple[list[Step], list[Step]]:
    rng = random.Random(seed)
    found: tuple[list[Step], list[Step]] = ([], [])
    for n in range(12):
        norms = [math.exp(rng.gauss(0.0, 1.0)) for _ in range(5)]
        for run, scale in zip(found, (2.0**exponent, 1.0), strict=True):
            values = {
                f"norm@{kind}:{m}": norm * scale * (1 + rng.uniform(-noise, noise)) for m, norm in enumerate(norms)
            }
            run.append(Step(n, values | {"loss@run": 2.0 * 0.9**n}))
    return found


@given(seed=st.integers(0, 10**6), exponent=st.integers(-20, 20))
def test_a_power_of_two_against_a_baseline(seed: int, exponent: int) -> None:
    run, other = map(last_run, two_runs(exponent, 0.003, seed))
    assert scale_exponent(run, other) == (exponent if abs(exponent) >= 4 else None)


@given(seed=st.integers(0, 10**6))
def test_other_runs_are_no_powers_of_two(seed: int) -> None:
    run, other = map(last_run, two_runs(16, 0.3, seed))
    assert scale_exponent(run, other) is None


def test_a_scale_is_a_cause_where_updates_use_it_and_else_a_remark() -> None:
    health = examine(*two_runs(16, 0.0, 0, "step"))
    assert [fault.kind for fault in health.faults] == ["loss scale"]
    assert "the gradients that the optimizer used are 65,536-fold: a loss scale." in health.faults[0].text
    health = examine(*two_runs(16, 0.0, 0))
    assert health.faults == ()
    assert "Against the baseline, norms of the backward are 65,536-fold: a loss scale." in health.verdict.remarks
    assert "in the place of their mean" in scale_text(5)
    assert "1/65,536" in scale_text(-16)
