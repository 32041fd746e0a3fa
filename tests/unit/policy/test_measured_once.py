"""Statistics of one value that several actions record."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest

import gradrewrite as gr
import gradrewrite.passes as P
from gradrewrite.policy.insertions import MeasureTensor, Omitted, ReplaceTensor
from gradrewrite.policy.rules import ask_in_order
from gradrewrite.policy.sampling import sampled
from gradrewrite.sites import Site

pytestmark = pytest.mark.pure


@pytest.mark.parametrize(
    ("actions", "wanted"),
    [
        ([P.Observe("norm", "zeros"), P.ClipByNorm(1.0)], [["zeros"]]),
        ([P.Observe("norm", every=5), P.ClipByNorm(1.0)], [[]]),
        ([P.Observe("norm"), P.Observe("norm", "max_abs"), P.ClipByNorm(1.0, log=True)], [[], []]),
        ([P.Observe("max_abs", "min"), P.ClipByValue(1.0, log=True)], [["min"]]),
        ([P.Observe("max_abs", "min"), P.ClipByValue(1.0)], [["max_abs", "min"]]),
        ([P.Observe("nonfinite", "nan"), P.CheckFinite("record")], [["nan"], ["nonfinite"]]),
        ([P.Observe("norm", every=5), P.Observe("norm")], [[], ["norm"]]),
        ([P.Observe("norm"), P.Observe("norm", every=5)], [["norm"], ["norm"]]),
        ([P.Observe("norm"), P.ClipByNorm(1.0, norm_type=1)], [["norm"]]),
        ([P.Observe("norm"), P.NanToNum(), P.ClipByNorm(1.0)], [["norm"]]),
        ([P.ClipByNorm(1.0), P.Observe("norm")], [["norm"]]),
        ([P.Observe("norm"), P.ClipByGlobalNorm(1.0), P.ClipByNorm(1.0)], [[]]),  # groups come last
        (
            [P.Observe("kurtosis", "norm"), P.Observe("std", "norm")],
            [["mean", "std", "skewness", "kurtosis"], ["mean", "std", "norm"]],
        ),
        ([P.Observe("std"), P.Observe("kurtosis")], [[], ["mean", "std", "skewness", "kurtosis"]]),
        ([P.Observe("norm"), P.WeighLosses(P.UPGrad()), P.ClipByNorm(1.0)], [["norm"]]),
    ],
)
@pytest.mark.parametrize("is_left_out", [False, True])
def test_what_is_recorded_twice_is_measured_once(
    actions: Sequence[Any], wanted: list[list[str]], is_left_out: bool
) -> None:
    answers = ask_in_order([gr.on("gradient:*", action) for action in actions], Site("gradient", "w"))
    if is_left_out:  # names of records do not depend on what a step measures
        answers = sampled(answers, "nothing") or tuple(answered.omitted() for answered in answers)
    effects = [answered.insertion.effect for answered in answers]
    found = [
        list(effect.names if isinstance(effect, Omitted) else effect.statistics)
        for effect in effects
        if isinstance(effect, MeasureTensor | Omitted)
    ]

    assert found == wanted
    given = {name for action in actions if isinstance(action, P.Observe) for name in action.statistics}
    if isinstance(last := effects[-1], ReplaceTensor):
        assert last.observed == given.difference(*found)


@pytest.mark.parametrize("action", [P.ClipByValue(1.0, log=True), P.Observe("mean_abs")])
def test_the_weight_of_a_symbolic_size_stays_with_its_statistic(action: Any) -> None:
    site = Site("error", "h", shape=(None, 3))
    answers = ask_in_order(gr.on("error:*", [P.Observe("mean_abs", "norm", every=2), action]), site)
    effects = [answered.insertion.effect for answered in answers]
    found = [list(effect.statistics) for effect in effects if isinstance(effect, MeasureTensor)]

    is_clip = isinstance(action, P.ClipByValue)
    assert found == ([["mean_abs", "norm", "numel"]] if is_clip else [["norm"], ["mean_abs", "numel"]])


def test_what_measures_nothing_has_no_interval() -> None:
    answers = ask_in_order(gr.on("gradient:*", [P.Observe("norm", every=3), P.ClipByNorm(1.0)]), Site("gradient", "w"))

    assert [answered.insertion.every for answered in answers] == [None, None]
