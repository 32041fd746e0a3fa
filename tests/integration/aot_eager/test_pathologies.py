"""Planted faults are named: kind, place and line; healthy trainings have none."""

from __future__ import annotations

import inspect
from collections.abc import Iterator
from fnmatch import fnmatchcase

import pytest
import torch

import gradrewrite as gr
from gradrewrite import viz
from gradrewrite.passes import ClipByGlobalNorm, ClipByNorm, Observe

from models import pathologies
from models.pathologies import HEALTHY, SICK, Case

pytestmark = pytest.mark.long
SEEDS = (0, 1, 2)


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def made(name: str, seed: int) -> Case:
    """Make a case; with the seed the size differs."""
    make = {**SICK, **HEALTHY}[name]
    return make(seed, inspect.signature(make).parameters["size"].default + seed)


def diagnosed(case: Case) -> gr.Diagnosis:
    return gr.diagnose(
        case.model,
        case.batches,
        loss=case.loss,
        optimizer=lambda parameters: torch.optim.SGD(parameters, lr=case.rate, momentum=case.momentum),
    )


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("name", SICK)
def test_the_first_cause_is_the_planted_one(name: str, seed: int) -> None:
    case = made(name, seed)
    found = diagnosed(case)

    assert found.causes, found.verdict
    first = found.causes[0]
    assert first.kind == case.kind, found.verdict
    assert not case.site or fnmatchcase(first.site, case.site), first
    assert case.factor is None or first.factor == pytest.approx(case.factor, rel=0.2)
    assert case.source in first.source
    assert first.text in found.verdict
    assert not found.policy or found.policy.startswith("[\n    gr.on(")


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("name", HEALTHY)
def test_healthy_trainings_have_no_cause(name: str, seed: int) -> None:
    case = made(name, seed)
    found = diagnosed(case)

    assert (found.outcome, found.causes, found.policy) == ("learns", (), "")
    assert any(case.remark in remark for remark in found.remarks) or not case.remark


def trained(policy: list[gr.Policy]) -> viz.Report:
    """Train the chaotic recurrence with norms of all errors recorded."""
    case = pathologies.chaotic_recurrence(0)
    model = gr.transform(case.model, [gr.on("error:*", Observe("norm")), *policy])
    return reported(case, model)


def reported(case: Case, model: gr.RewrittenModule) -> viz.Report:
    """Train a rewritten model on the batches of its case."""
    optimizer = torch.optim.SGD(model.parameters(), lr=case.rate)
    for x, y in case.batches:
        optimizer.zero_grad()
        loss = model(x, y)
        loss.backward()
        model.monitor.log("loss", loss)
        optimizer.step()
    return viz.report(model.monitor)


def test_one_network_trained_three_ways() -> None:
    plain = trained([]).health.verdict
    stalled = trained([gr.on("gradient:*", ClipByGlobalNorm(1.0))]).health.verdict
    error = trained([gr.on("error:wh", ClipByNorm(0.1))]).health

    for verdict, outcome in ((plain, "non-finite"), (stalled, "stalls")):
        assert (verdict.outcome, verdict.kind, verdict.site) == (outcome, "exploding", "error:wh")
        assert "by a factor of 1.7" in verdict.text
        assert 'gr.on("error:wh", ClipByNorm(' in verdict.code[0]
    assert "ClipByGlobalNorm at group:default acts after that" in stalled.text
    assert len(stalled.code) == 1  # the run has a clip of its gradients
    assert (error.verdict.outcome, error.verdict.kind, error.verdict.causes) == ("learns", "healthy", ())
    assert error.verdict.remarks[0].startswith("ClipByNorm at error:wh acts in ")
    assert [row.name for row in error.sites if row.action] == ["error:wh x 40"]


def test_a_clip_that_is_too_low_stalls_a_sound_network() -> None:
    case = pathologies.healthy_residual(0)
    model = gr.transform(case.model, gr.on("gradient:*", ClipByGlobalNorm(1e-5)))
    verdict = reported(case, model).health.verdict

    assert (verdict.outcome, verdict.kind, verdict.site) == ("stalls", "clip acts always", "group:default")
    assert [cause.kind for cause in verdict.causes] == ["clip too low"]
    assert verdict.code[0].startswith('gr.on("gradient:*", ClipByGlobalNorm(')


def test_trials_from_one_start() -> None:
    case = pathologies.chaotic_recurrence(0)
    found = gr.diagnose(case.model, case.batches, optimizer=lambda p: torch.optim.SGD(p, lr=case.rate), try_clips=True)
    plain, stalled, learns = found.trials.values()

    assert list(found.trials) == ["as it is", "global clip", "suggested policy"]
    assert plain[0] == stalled[0] == learns[0]
    assert len(plain) < len(stalled) == len(learns) == 50  # it ended with values that are not finite
    assert sum(stalled[-10:]) > 0.97 * sum(stalled[:10])
    assert sum(learns[-10:]) < 0.95 * sum(learns[:10])
