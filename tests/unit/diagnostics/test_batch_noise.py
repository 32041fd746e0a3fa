"""Remarks on the noise scale, from records with known answers."""

from __future__ import annotations

import math
from collections.abc import Sequence

import pytest

import gradrewrite as gr
from gradrewrite.diagnostics.batch_noise import noise_in
from gradrewrite.diagnostics.health import examine
from gradrewrite.diagnostics.run_log import last_run

pytestmark = pytest.mark.pure


def steps_of(values: Sequence[float], site: str = "group:default") -> list[gr.Step]:
    address = f"noise_scale@{site}"
    return [gr.Step(n, {"loss@run": 2.0 / (n + 1), address: value}) for n, value in enumerate(values)]


def test_the_median_of_the_last_half() -> None:
    steps = steps_of([math.nan, *[5.0] * 19, *[400.0] * 20])
    text = "The noise scale of group:default is 400 examples (median of the last 20 steps): "
    text += "a batch of that size has as much noise as signal."

    assert noise_in(last_run(steps)) == [text]
    assert text in examine(steps).verdict.remarks


def test_what_is_noise_itself() -> None:
    (text,) = noise_in(last_run(steps_of([-3.0] * 40)))

    assert "is not known yet" in text


def test_few_steps_and_single_parameters_have_none() -> None:
    assert noise_in(last_run(steps_of([3.0] * 2))) == []
    assert noise_in(last_run(steps_of([3.0] * 40, "gradient:head.weight"))) == []
