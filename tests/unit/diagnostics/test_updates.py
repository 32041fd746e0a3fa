"""Updates that made something non-finite, from records."""

from __future__ import annotations

import math

import pytest

from gradrewrite.diagnostics.doctor import diagnose
from gradrewrite.diagnostics.health import examine
from gradrewrite.diagnostics.run_log import Step, last_run
from gradrewrite.diagnostics.updates import update_in

pytestmark = pytest.mark.pure

NAN, INF = math.nan, math.inf
FINE = {
    "nonfinite@gradient:w": 0.0,
    "nonfinite@gradient:v": 0.0,
    "norm@param:w": 1.0,
    "norm@param:v": 1.0,
    "max@state:w.exp_avg_sq": 1e-3,
    "loss@run": 1.0,
}


def steps(*changes: dict[str, float], before: int = 3) -> list[Step]:
    """Some steps of a sound run, then one for each change."""
    rows = [FINE] * before + [{**FINE, **change} for change in changes]
    return [Step(n, row) for n, row in enumerate(rows)]


@pytest.mark.parametrize(
    ("change", "site", "text"),
    [
        (
            {"norm@param:w": NAN},
            "param:w",
            "step 3: every gradient was finite; step() made w NaN: exp_avg_sq is at most 0.001",
        ),
        ({"norm@param:w": NAN, "nonfinite@param:w": 7.0}, "param:w", "w NaN (7 elements are not finite): exp_avg_sq"),
        ({"nonfinite@param:v": 7.0}, "param:v", "v not finite (7 elements are not finite)."),
        ({"max@state:w.exp_avg_sq": INF, "norm@param:v": NAN}, "param:v", "step() made v NaN."),
        ({"max@state:w.exp_avg_sq": INF}, "state:w.exp_avg_sq", "the square of a gradient is beyond its dtype"),
        ({"max@state:w.exp_avg": NAN}, "state:w.exp_avg", "step() made w.exp_avg NaN."),
        (
            {"norm@param:w": NAN, "norm@param:v": NAN},
            "param:w",
            "w NaN, also v: exp_avg_sq is at most 0.001 there, and where it is 0 step() divides by eps alone.",
        ),
    ],
)
def test_the_first_update_is_told(change: dict[str, float], site: str, text: str) -> None:
    bad = {"nonfinite@gradient:w": 3.0, "norm@param:w": NAN, "loss@run": NAN}
    run = last_run(steps(change, *([] if site == "state:w.exp_avg_sq" else [bad])))
    found = update_in(run)
    assert found is not None
    assert (found.kind, found.site, found.step) == ("update", site, 3)
    assert text in found.text
    verdict = examine(run.steps).verdict
    assert (verdict.kind, verdict.code) == ("update", ())
    assert [one.kind for one in diagnose(run.steps)].count("non-finite") == 0


@pytest.mark.parametrize(
    "change",
    [
        {},
        {"nonfinite@gradient:w": 1.0, "norm@param:w": NAN},  # the gradient was bad already
        {"nonfinite@gradient:v": 1.0, "norm@param:w": NAN, "loss@run": NAN},
        {"loss@run": NAN, "norm@param:w": NAN},
        {"norm@param:mask": INF},  # nothing trains it
        {"norm@param:empty": NAN, "nonfinite@param:empty": 0.0},
    ],
)
def test_what_no_update_did(change: dict[str, float]) -> None:
    assert update_in(last_run(steps(change))) is None


def test_a_state_before_an_explosion_is_no_cause() -> None:
    """The square of a large gradient, and then what made it large."""
    bad = {"nonfinite@gradient:w": 3.0, "loss@run": NAN}
    assert update_in(last_run(steps({"max@state:w.exp_avg_sq": INF}, {"max@state:w.exp_avg_sq": INF} | bad))) is None


def test_without_records_of_gradients_nothing_is_known() -> None:
    rows = [{"norm@param:w": 1.0}, {"norm@param:w": NAN}]
    assert update_in(last_run([Step(n, row) for n, row in enumerate(rows)])) is None


def test_infinite_parameters_of_a_run_that_stays_finite_may_be_meant() -> None:
    lowest = {"max@state:w.lowest_loss": INF}  # of an optimizer of the user's
    assert update_in(last_run(steps(*[lowest] * 9))) is None
    assert update_in(last_run(steps(*[{"max@state:w.exp_avg_sq": INF}] * 9))) is not None
    change = {"norm@param:w": INF, "nonfinite@param:w": 2.0}
    assert update_in(last_run(steps(*[change] * 9))) is None
    assert update_in(last_run(steps(*[change] * 9, {**change, "loss@run": NAN}))) is not None


def test_a_skipped_update_is_no_end() -> None:
    skipped = {"nonfinite@gradient:w": 1.0, "skipped@optimizer:0": 1.0}
    found = update_in(last_run(steps(skipped, {}, {"norm@param:w": NAN})))
    assert found is not None
    assert found.step == 5
    by_scaler = update_in(
        last_run(steps({"nonfinite@gradient:w": 1.0}, {"norm@param:w": NAN}))
    )  # w was finite after it
    assert by_scaler is not None
    assert by_scaler.step == 4
    unseen = [Step(0, {"nonfinite@gradient:w": 1.0}), Step(1, {"nonfinite@gradient:w": 0.0, "norm@param:w": NAN})]
    assert update_in(last_run(unseen)) is None


def test_a_rate_that_is_not_finite_is_the_cause() -> None:
    found = diagnose(steps({"lr@optimizer:0": INF, "norm@param:w": NAN}))
    assert [one.kind for one in found] == ["faulty learning rate"]


def test_updates_of_several_backwards() -> None:
    """A gradient of the first micro-batch spoils the update that the last one tells of."""
    rows = []
    for update in range(4):
        rows += [Step(2 * update, {"nonfinite@gradient:w": 0.0}, update=update)]
        state = {"norm@param:w": NAN if update == 3 else 1.0}
        rows += [Step(2 * update + 1, {"nonfinite@gradient:w": 0.0} | state, update=update, micro_batch=1)]
    found = update_in(last_run(rows))
    assert found is not None
    assert (found.step, found.text) == (7, "update 3: every gradient was finite; step() made w NaN.")
    spoilt = [*rows[:-2], Step(6, {"nonfinite@gradient:w": 1.0}, update=3), rows[-1]]
    assert update_in(last_run(spoilt)) is None
