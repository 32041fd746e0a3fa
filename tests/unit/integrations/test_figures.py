"""The four figures that frameworks log by default."""

from __future__ import annotations

import pytest

from gradrewrite import Step
from gradrewrite.integrations._figures import main_figures

pytestmark = pytest.mark.pure


def test_figures_of_the_last_step_and_counts_of_all() -> None:
    first = {"nonfinite@gradient:w": 3.0, "nonfinite@data:mask": 9.0, "total_norm@step:group:default": 1.0}
    last = {"nonfinite@gradient:w": 2.0, "total_norm@step:group:default": 5.0}
    last |= {f"norm@error:cell#{n}" if n else "norm@error:cell": 2.0 ** (6 - n) for n in range(6)}
    rates = {"rate@error:h": 0.25, "rate@step:group:default": 0.75}

    assert main_figures([Step(0, first), Step(1, last)], rates) == {
        "gradrewrite/total_norm": 5.0,
        "gradrewrite/clip_rate:step:group:default": 0.75,
        "gradrewrite/nonfinite": 5.0,
        "gradrewrite/growth:cell": pytest.approx(2.0),
    }


def test_only_what_is_recorded() -> None:
    assert main_figures([Step(0, {"loss@run": 1.0, "norm@error:h": 1.0})], {}) == {}
    norms = {"norm@gradient:a": 3.0, "norm@gradient:b": 4.0}
    assert main_figures([Step(0, norms)], {}) == {"gradrewrite/total_norm": 5.0}


def test_vanishing_is_as_far_from_one_as_growth() -> None:
    layers = {f"norm@error:layers.{n}": 10.0 ** -(5 - n) for n in range(6)}
    calls = {f"norm@error:cell#{n}" if n else "norm@error:cell": 1.5 ** (6 - n) for n in range(6)}
    figures = main_figures([Step(0, layers | calls)], {})

    assert figures == {"gradrewrite/growth:layers": pytest.approx(0.1)}
