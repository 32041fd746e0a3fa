"""The verdicts on four real trainings are what they were made for."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from gradrewrite import viz

from models import health_runs

pytestmark = pytest.mark.slow


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.mark.parametrize("kind", sorted(health_runs.KINDS.values()))
def test_verdict(tmp_path: Path, kind: str) -> None:
    run = health_runs.train(kind, tmp_path / "run.jsonl", clips=True)
    plain = health_runs.train(kind, tmp_path / "plain.jsonl", clips=False)
    health = viz.report(run, baseline=plain).health

    told = ("clip acts always", "vanishing")  # a fault though the loss falls; all others learn
    assert health.verdict.kind == (kind if kind in told else "healthy")
    remarks = health.verdict.remarks
    factors = {row.site: row.median_factor for row in health.sites if row.action}
    if kind == "exploding":  # layers.3 was made too large, so the error of layers.2 is clipped
        assert any(text.startswith("One layer explodes: on its way back through layers.3") for text in remarks)
        assert health.loss.startswith("This run trains and the baseline does not.")
        assert "In the baseline, the first value that was not finite" in health.first_bad_text
    if kind == "vanishing":  # the layers before do not learn, and the loss falls all the same
        assert set(factors.values()) == {1.0}
        assert "Errors vanish on the way back" in health.verdict.text
    if kind == "clip acts always":
        assert max(factors.values()) < 0.1
        assert len(health.verdict.code) == len(factors)
        assert health.loss.startswith("This run ends higher")
        assert "step:group:default" in health.verdict.text
        raised = {row.site: row for row in health.sites if row.action}
        assert raised["step:group:default"].from_baseline  # the clipped errors make small gradients
        assert raised["step:group:default"].suggestion > raised["step:group:default"].p90
    if kind == "healthy":
        assert not any(row.code for row in health.sites)
