"""Faults that users have reported: outcome, op and line, rows and reason, a remedy that helps; twins have no cause."""

from __future__ import annotations

import pytest

import gradrewrite as gr

from models.reported_faults import REPORTS, STEPS, Report

pytestmark = pytest.mark.long
SEEDS = (0, 1, 2)


def diagnosed(report: Report) -> gr.Diagnosis:
    return gr.diagnose(
        report.model,
        report.batches,
        loss=report.loss,
        compute_loss=report.compute_loss,
        optimizer=report.optimizer,
        steps=STEPS,
        try_clips=True,
    )


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("name", REPORTS)
def test_the_answer_is_right_in_all_its_parts(name: str, seed: int) -> None:
    report = REPORTS[name](seed, False)
    found = diagnosed(report)
    told = str(found)

    assert found.causes, told
    first = found.causes[0]
    assert first.kind == report.kind, told
    assert (found.outcome == "non-finite") == (report.kind != "no gradient"), told
    assert first.step in (report.wake, -1), told
    assert report.line in first.source, told
    assert report.op in first.text, told
    assert report.where in first.indices, told
    assert report.why in first.text, told
    assert report.advice in first.advice, told
    assert report.why in found.verdict, told
    assert any(report.cover in one for one in first.cover) if report.cover else first.cover == (), told
    eps = [trial for name, trial in found.trials.items() if name.startswith("eps=")]
    is_tried = "Tried in a replay of that step" in first.advice or any(not trial.is_bad for trial in eps)
    assert is_tried or report.kind == "no gradient", told


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("name", REPORTS)
def test_the_repaired_twin_has_no_cause(name: str, seed: int) -> None:
    found = diagnosed(REPORTS[name](seed, True))

    assert found.outcome != "non-finite", str(found)
    assert found.causes == (), str(found)
