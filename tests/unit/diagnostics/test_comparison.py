"""Losses and sizes of two runs."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from gradrewrite.diagnostics.comparison import comparable_sizes, compare, loss_of, loss_text
from gradrewrite.diagnostics.run_log import Run, Step, last_run

pytestmark = pytest.mark.pure

NAN, INF = math.nan, math.inf


def losses(values: Sequence[float], name: str = "loss@run") -> Run:
    return last_run([Step(n, {name: value}) for n, value in enumerate(values)])


@given(st.lists(st.floats(0, 1e6), min_size=1, max_size=150))
def test_loss_equals_numpy(values: list[float]) -> None:
    loss = loss_of(losses(values))

    assert loss is not None
    count = max(1, min(10, len(values) // 10))
    assert loss.steps == len(values)
    assert (loss.first, loss.last) == pytest.approx((np.mean(values[:count]), np.mean(values[-count:])))
    assert (loss.peak, loss.bad_step) == (max(values), -1)
    noise = np.std(values[-count:], ddof=1) / math.sqrt(count) if count > 1 else 0.0
    assert loss.noise == pytest.approx(noise, abs=1e-6)


def test_loss_of_a_tap_and_of_none() -> None:
    assert loss_of(losses([1.0], "norm@gradient:w")) is None
    loss = loss_of(losses([3.0, 2.0], "max@activation:loss"))
    assert loss is not None
    assert (loss.first, loss.last) == (3.0, 2.0)
    assert loss_text(None) == 'No loss was recorded: monitor.log("loss", loss) after each backward.'


def test_a_loss_that_is_not_finite() -> None:
    loss = loss_of(losses([1.0, 5.0, INF, NAN]))

    assert loss is not None
    assert (loss.peak, loss.bad_step) == (5.0, 2)
    assert math.isnan(loss.last)
    assert (
        loss_text(loss)
        == "The loss peaked at 5 and ended at NaN after 4 steps, first not finite in step 2; it began at 1."
    )


@pytest.mark.parametrize(
    ("run", "baseline", "wanted"),
    [
        (
            [4.0, 2.5],
            [4.0, 3.0, 2.75],
            "This run ends lower, by 0.25. The loss of this run peaked at 4 and ended at 2.5",
        ),
        ([4.0, 3.5], [4.0, 3.0], "This run ends higher, by 0.5. "),
        ([4.0, 3.0], [4.25, 3.0], "They end alike, within the noise of the loss. "),
        ([4.0, 3.0], [4.3, 3.0], "They end alike, within the noise of the loss, and this run has the lower peak. "),
        ([4.0, 3.0], [5.0, NAN], "This run trains and the baseline does not. "),
        ([4.0, INF], [5.0, 1.0], "The baseline trains and this run does not. "),
        ([4.0, INF], [5.0, NAN], "Neither of them trains. "),
    ],
)
def test_compare(run: list[float], baseline: list[float], wanted: str) -> None:
    assert compare(loss_of(losses(run)), loss_of(losses(baseline))).startswith(wanted)


def test_a_difference_within_the_noise_is_none() -> None:
    noise = np.random.default_rng(0).normal(0, 0.1, (2, 200))
    alike = compare(loss_of(losses([*(2 + noise[0])])), loss_of(losses([*(2 + noise[1])])))
    lower = compare(loss_of(losses([*(1.5 + noise[0])])), loss_of(losses([*(2 + noise[1])])))

    assert alike.startswith("They end alike")
    assert lower.startswith("This run ends lower, by 0.5")


def test_compare_says_which_has_no_loss() -> None:
    known = loss_of(losses([1.0]))
    assert "the baseline has none" in compare(known, None)
    assert "the run has none" in compare(None, known)
    assert "neither has one" in compare(None, None)


def test_total_norms_are_compared_with_norms_of_gradients() -> None:
    run = last_run([Step(n, {"total_norm@group:default": 2.0, "max_abs@error:a": 1.0}) for n in range(2)])
    plain = last_run([Step(n, {"norm@gradient:a": 3.0, "norm@gradient:b": 4.0}) for n in range(3)])

    assert comparable_sizes(run, plain) == ("total norm of the gradients", {0: 2.0, 1: 2.0}, {0: 5.0, 1: 5.0, 2: 5.0})


def test_what_both_have_is_compared() -> None:
    both = {"total_norm@group:a": 3.0, "norm@gradient:a": 1.0}
    run = last_run([Step(0, {**both, "total_norm@group:b": 4.0})])

    assert comparable_sizes(run, last_run([Step(0, both)])) == ("total norm of the gradients", {0: 5.0}, {0: 3.0})
    assert comparable_sizes(run, last_run([Step(0, {"norm@gradient:b": 2.0})])) == (
        "norm of all gradients",
        {0: 1.0},
        {0: 2.0},
    )
    largest = [last_run([Step(0, {"max_abs@error:a": a, "max_abs@error:b": -2.0})]) for a in (1.0, INF)]
    assert comparable_sizes(*largest) == ("largest |error|", {0: 2.0}, {0: INF})
    assert comparable_sizes(run, largest[0]) is None


def test_sizes_that_are_not_finite() -> None:
    rows = [{"norm@gradient:a": NAN}, {"norm@gradient:a": NAN, "nonfinite@gradient:a": 0.0}, {"norm@gradient:a": -INF}]
    run = last_run([Step(n, row) for n, row in enumerate(rows)])

    assert comparable_sizes(run, run) == ("norm of all gradients", *[{0: INF, 1: 0.0, 2: INF}] * 2)
