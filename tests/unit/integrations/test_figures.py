"""The four figures that frameworks log by default."""

from __future__ import annotations

import sys
from types import SimpleNamespace
from typing import Any

import pytest

from gradrewrite import Step
from gradrewrite._utils.exponent_counts import ExponentCounts
from gradrewrite.integrations._figures import log_histograms, main_figures

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


COUNTS = {"exponents/error:h": ExponentCounts((1.0, *[0.0] * 61, 2.0, 3.0), zero=4.0, inf=5.0, nan=6.0)}


def test_histograms_of_a_wandb_run(monkeypatch: pytest.MonkeyPatch) -> None:
    logged: list[tuple[Any, bool]] = []
    wandb = SimpleNamespace(
        run=object(),
        Histogram=lambda np_histogram: np_histogram,
        log=lambda data, commit: logged.append((data, commit)),
    )
    monkeypatch.setitem(sys.modules, "wandb", wandb)
    log_histograms(COUNTS)
    ((data, commit),) = logged
    counts, edges = data["exponents/error:h"]

    assert not commit  # they are a part of what the framework logs next
    assert counts == [4.0, 1.0, *[0.0] * 61, 2.0, 3.0]
    assert len(edges) == len(counts) + 1
    assert (edges[0], edges[1], edges[-2], edges[-1]) == (0.0, 2.0**-46, 2.0**17, 2.0**18)

    wandb.run = None
    log_histograms(COUNTS)
    monkeypatch.delitem(sys.modules, "wandb")
    log_histograms(COUNTS)
    assert len(logged) == 1
