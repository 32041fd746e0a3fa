"""Which updates were skipped, and why, from records with known answers."""

from __future__ import annotations

import math

import pytest

import gradrewrite as gr
from gradrewrite.diagnostics.health import examine
from gradrewrite.diagnostics.run_log import last_run
from gradrewrite.diagnostics.skipped_updates import skipped_updates, skips_text

pytestmark = pytest.mark.pure

MADE, SKIPPED = {"skipped@optimizer:0": 0.0}, {"skipped@optimizer:0": 1.0}
FINITE, BAD = {"nonfinite@gradient:a": 0.0}, {"nonfinite@gradient:a": 3.0}
SPIKE = {"total_norm@step:group:default": 9.0, "spike_limit@step:group:default": 1.5, "spike@step:group:default": 1.0}
AT_A = "not finite, first at gradient:a"


def text_of(*rows: dict[str, float]) -> str:
    return skips_text(skipped_updates(last_run([gr.Step(n, row) for n, row in enumerate(rows)])))


def test_none() -> None:
    assert text_of(FINITE | MADE, BAD) == ""


def test_one() -> None:
    assert text_of(FINITE | MADE, BAD | SKIPPED, FINITE | MADE) == f"in step 1 ({AT_A})"


def test_first_and_last_of_one_reason() -> None:
    assert text_of(BAD | SKIPPED, FINITE | MADE, BAD | SKIPPED) == f"first in step 0, last in step 2 ({AT_A})"


def test_the_reason_is_in_another_micro_batch() -> None:
    assert text_of(BAD, FINITE | SKIPPED, FINITE, FINITE | SKIPPED) == (
        f"first in step 1 ({AT_A}), last in step 3 (a finite check failed)"
    )


def test_spikes() -> None:
    spike = "total_norm@step:group:default was 9, above its limit 1.5"
    assert text_of(FINITE | SPIKE | SKIPPED) == f"in step 0 ({spike})"


def test_what_is_recorded_and_not_checked_is_the_first_value_that_was_not_finite() -> None:
    row = {"max_abs@activation:head": math.inf, "nonfinite@gradient:a": 2.0}
    assert text_of(row | SKIPPED) == "in step 0 (not finite, first at activation:head)"


def test_the_report_has_them() -> None:
    steps = [gr.Step(n, FINITE | MADE | {"norm@gradient:a": 1.0}) for n in range(8)]
    steps[5] = gr.Step(5, BAD | SKIPPED | {"norm@gradient:a": math.nan})

    assert f"1 update was skipped, in step 5 ({AT_A})." in examine(steps).findings_text
