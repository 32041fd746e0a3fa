"""Trials: what is told of them, and which is better."""

from __future__ import annotations

import copy
import math
import pickle

import pytest

from gradrewrite.diagnostics.trials import Trial

pytestmark = pytest.mark.pure
PLAIN = Trial([2.0, 1.5, 1.25, math.nan], is_bad=True)


def test_text_of_a_trial() -> None:
    assert Trial([3.0, 2.0, 1.0]).text() == "3 steps; loss 3 -> 1, mean 2, mean at the end 1"
    assert (
        PLAIN.text() == "4 steps; loss 2 -> NaN, mean 1.583, mean at the end 1.25; stops in step 3, which is not finite"
    )


def test_text_of_a_trial_that_stops_where_the_training_does() -> None:
    alike = Trial([2.0, 1.6, 1.3, math.nan], is_bad=True)
    later = Trial([2.0, 1.6, 1.3, 1.0, math.nan], is_bad=True)

    assert alike.text(PLAIN).endswith("stops in step 3, as without it: a clip does not mend NaN")
    assert later.text(PLAIN).endswith("stops in step 4, which is not finite")


def test_text_of_skips() -> None:
    assert Trial([2.0, math.nan, 1.0], skipped=1).text(PLAIN) == (
        "3 steps; loss 2 -> 1, mean 1.5, mean at the end 1; skipped 1 of 3"
    )
    assert Trial([math.nan], is_bad=True).text() == "1 step; stops in step 0, which is not finite"


@pytest.mark.parametrize(
    ("trial", "plain", "is_better"),
    [
        (Trial([2.0, 1.0, 1.0, 1.0, 1.0], skipped=1), PLAIN, True),
        (Trial([2.0, 1.5, 1.2, math.nan], is_bad=True), PLAIN, False),
        (Trial([math.nan, math.nan, math.nan, math.nan, math.nan], skipped=5), PLAIN, False),
        (Trial([2.0, 1.0]), Trial([2.0, 1.5]), True),
        (Trial([2.0, 1.5]), Trial([2.0, 1.5]), False),
        (Trial([2.0, math.nan], is_bad=True), Trial([2.0, 1.5]), False),
    ],
)
def test_better(trial: Trial, plain: Trial, is_better: bool) -> None:
    assert trial.is_better_than(plain) == is_better


def test_a_trial_far_above_a_clip_is_of_no_help() -> None:
    clipped = Trial([2.0, 1.0])
    assert Trial([2.0, 1.5, 1.2, 1.1, 1.0], skipped=1).is_of_help(PLAIN, clipped)
    assert not Trial([2e9, 1e9, 1e9, 1e9, 1e9], skipped=1).is_of_help(PLAIN, clipped)
    assert Trial([2e9, 1e9, 1e9, 1e9, 1e9], skipped=1).is_of_help(PLAIN, PLAIN)


def test_copies_keep_the_attributes() -> None:
    trial = Trial([1.0, 2.0], skipped=1, is_bad=True)
    for other in (copy.deepcopy(trial), pickle.loads(pickle.dumps(trial))):
        assert (other, other.skipped, other.is_bad) == (trial, 1, True)
    assert trial == (1.0, 2.0)
