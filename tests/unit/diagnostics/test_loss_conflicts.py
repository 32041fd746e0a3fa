"""Remarks of the doctor on losses with opposite gradients, from records with known answers."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from pathlib import Path

import pytest

import gradrewrite as gr
from gradrewrite import viz
from gradrewrite.cli import main
from gradrewrite.diagnostics.doctor import skipped_rules
from gradrewrite.diagnostics.health import examine
from gradrewrite.diagnostics.loss_conflicts import conflicts_in
from gradrewrite.diagnostics.run_file import read_jsonl
from gradrewrite.diagnostics.run_log import last_run
from gradrewrite.integrations._figures import main_figures

pytestmark = pytest.mark.pure

ADVICE = (
    'gr.on("gradient:trunk.*", gr.passes.WeighLosses(gr.passes.UPGrad())) '
    "weighs the losses so that none undoes another."
)


def steps_of(records: Mapping[str, Sequence[float]]) -> list[gr.Step]:
    """Steps with one value of each record, and a healthy norm and loss."""
    number = max(map(len, records.values()))
    rows = [{name: values[n] for name, values in records.items() if n < len(values)} for n in range(number)]
    return [gr.Step(n, {"norm@gradient:a": 1.0, "loss@run": 2.0 / (n + 1), **row}) for n, row in enumerate(rows)]


def remarks(records: Mapping[str, Sequence[float]]) -> list[str]:
    return conflicts_in(last_run(steps_of(records)))


def mixed(negative: int, value: float = -0.41, steps: int = 50) -> list[float]:
    """Cosines with some negative ones in front."""
    return [value] * negative + [0.3] * (steps - negative)


def test_two_losses_by_layer() -> None:
    found = remarks(
        {
            "loss_cosine@gradient:trunk.0.weight": mixed(2),
            "loss_cosine@gradient:trunk.1.weight": mixed(0),
            "loss_cosine@gradient:trunk.2.weight": mixed(20, -0.2),
            "loss_cosine@gradient:trunk.3.bias": mixed(25),
            "loss_cosine@gradient:trunk.3.weight": mixed(31),
            "loss_norm_0@gradient:trunk.3.weight": [1.0] * 50,
        }
    )

    assert found == [
        "Losses 0 and 1 conflict (cosine < 0) in 62 % of 50 steps at gradient:trunk.3.weight (median of these -0.41); "
        "also in trunk.2 (40 %); rarely or never in 2 other places.",
        ADVICE,
    ]


def test_pairs_of_three_losses_the_worst_first() -> None:
    site = "gradient:trunk.0.weight"
    found = remarks(
        {
            f"loss_cosine@{site}": mixed(50, -0.9),  # the smallest of each step: that of no pair
            f"loss_cosine_0_1@{site}": mixed(5),
            f"loss_cosine_0_2@{site}": mixed(15, -0.1),
            f"loss_cosine_1_2@{site}": mixed(45, -0.9),
            "loss_cosine_1_2@gradient:trunk.2.weight": mixed(10),
            "loss_cosine_0_1@gradient:trunk.2.weight": mixed(0),
        }
    )

    assert found == [
        f"Losses 1 and 2 conflict (cosine < 0) in 90 % of 50 steps at {site} (median of these -0.9); also in trunk.2 "
        "(20 %).",
        f"Losses 0 and 2 conflict (cosine < 0) in 30 % of 50 steps at {site} (median of these -0.1).",
        ADVICE,
    ]


def test_many_pairs_are_few_lines() -> None:
    pairs = [(i, j) for j in range(6) for i in range(j)]
    found = remarks({f"loss_cosine_{i}_{j}@error:h": mixed(20 + j) for i, j in pairs})

    assert len(found) == 5
    assert found[0].startswith("Losses 0 and 5 conflict (cosine < 0) in 50 %")
    assert found[3] == "12 further pairs of losses conflict less often."
    assert found[4].startswith('gr.on("error:h", gr.passes.WeighLosses(gr.passes.UPGrad())) ')


def test_weighted_runs_are_advised_nothing() -> None:
    found = remarks(
        {
            "loss_cosine@group:default": mixed(30),
            "loss_cosine@gradient:trunk.1.weight": mixed(35),
            "loss_weight_0@group:default": [0.5] * 50,
            "loss_weight_1@group:default": [0.5] * 50,
        }
    )

    assert found == [
        "Losses 0 and 1 conflict (cosine < 0) in 70 % of 50 steps at gradient:trunk.1.weight (median of these -0.41); "
        "also in group:default (60 %).",
    ]


def test_sound_runs_have_one_calm_remark() -> None:
    names = [f"loss_cosine@gradient:trunk.{n}.weight" for n in range(3)]
    assert remarks({name: mixed(0) for name in names}) == ["No losses conflict: every cosine of 50 steps is >= 0."]
    assert remarks({names[0]: mixed(0), names[1]: mixed(3, -0.25)}) == [
        "No losses conflict often: losses 0 and 1 have a cosine < 0 in 6 % of 50 steps at gradient:trunk.1.weight "
        "(median of these -0.25), which is the most."
    ]


def test_orthogonal_losses_are_no_conflict() -> None:
    found = remarks({"loss_cosine@gradient:a.weight": [0.01, -0.01] * 25})

    assert found == [
        "No losses conflict often: losses 0 and 1 have a cosine < 0 in 50 % of 50 steps at gradient:a.weight (median "
        "of these -0.01), which is the most."
    ]


def test_a_weak_site_hides_no_conflict_of_its_module() -> None:
    found = remarks({"loss_cosine@gradient:a.bias": [0.01, -0.01] * 25, "loss_cosine@gradient:a.weight": mixed(20)})

    assert found[0] == (
        "Losses 0 and 1 conflict (cosine < 0) in 40 % of 50 steps at gradient:a.weight (median of these -0.41)."
    )


def test_nan_is_no_conflict() -> None:
    assert remarks({"loss_cosine@gradient:a.weight": [math.nan] * 50}) == []
    known = [-0.5] * 4 + [0.5] * 6
    (text, _) = remarks({"loss_cosine@gradient:a.weight": [*known, *[math.nan] * 40]})
    assert "in 40 % of 10 steps" in text


def test_too_few_steps_are_not_judged() -> None:
    few = {"loss_cosine@gradient:a.weight": mixed(4, steps=4)}

    assert remarks(few) == []
    assert "conflicting losses" in [rule.kind for rule in skipped_rules(steps_of(few))]
    assert remarks({"norm@gradient:b": [1.0] * 50}) == []


def test_advice_names_what_the_losses_share() -> None:
    roots = remarks({"loss_cosine@gradient:a.weight": mixed(40), "loss_cosine@gradient:b.weight": mixed(30)})
    assert 'gr.on("gradient:*", ' in roots[-1]
    scale = remarks({"loss_cosine@gradient:scale": mixed(40)})
    assert 'gr.on("gradient:*", ' in scale[-1]
    deep = remarks({f"loss_cosine@gradient:net.trunk.{n}.weight": mixed(40) for n in range(2)})
    assert 'gr.on("gradient:net.trunk.*", ' in deep[-1]
    errors = remarks({"loss_cosine@error:trunk.0#1": mixed(40), "loss_cosine@error:trunk.1/relu": mixed(30)})
    assert 'gr.on("error:trunk.1/relu", ' in errors[-1]  # the last in the forward: what is upstream is there once
    assert "also in trunk.1 (60 %)" in errors[0]


def test_losses_without_weight() -> None:
    weights = {f"loss_weight_{k}@group:trunk": [0.5] * 50 for k in range(4)}
    found = remarks(
        {
            "loss_cosine@group:trunk": mixed(0),
            **weights,
            "loss_weight_1@group:trunk": [0.0] * 40 + [0.1] * 10,
            "loss_weight_2@group:trunk": [0.0] * 40 + [0.1] * 10,
            "loss_norm_2@group:trunk": [0.0] * 50,
            "loss_weight_3@group:trunk": [math.nan] * 20 + [0.1] * 30,
        }
    )

    assert found == [
        "No losses conflict: every cosine of 50 steps is >= 0.",
        "Loss 1 has the weight 0 in 80 % of 50 steps in group:trunk, and teaches it nothing then; UPGrad gives each "
        "loss a weight > 0.",
        "Loss 2 has the gradient 0 in 100 % of 50 steps in group:trunk, which counts in the weights of all: these "
        "parameters are not reached, backward was called without the loss, or a metric was not detached.",
        "Loss 3 has a gradient that is not finite in 40 % of 50 steps in group:trunk, and so all weights are NaN; "
        'gr.on("gradient:*", CheckFinite()) names the op and its line.',
    ]


def test_a_loss_without_a_gradient_that_has_all_the_weight_is_the_cause() -> None:
    """As MGDA weighs a metric that is not detached."""
    weights = {f"loss_weight_{k}@group:trunk": [float(k == 2)] * 50 for k in range(3)}
    norms = {f"loss_norm_{k}@group:trunk": [float(k != 2)] * 50 for k in range(3)}
    (text,) = remarks({**weights, **norms})

    assert text.startswith("Loss 2 has the gradient 0 in 100 % of 50 steps")


def test_the_loss_that_is_not_finite_is_named() -> None:
    weights = {f"loss_weight_{k}@group:trunk": [math.nan] * 50 for k in range(2)}
    (text,) = remarks({**weights, "loss_norm_0@group:trunk": [1.0] * 50, "loss_norm_1@group:trunk": [math.nan] * 50})

    assert text.startswith("Loss 1 has a gradient that is not finite in 100 % of 50 steps")


def test_losses_without_weight_together() -> None:
    nan = {f"loss_weight_{k}@group:default": [math.nan] * 50 for k in range(3)}
    (text,) = remarks({**nan, "nonfinite@gradient:a": [1.0] * 50})

    assert text == (
        "Losses 0, 1, 2 have a gradient that is not finite in 100 % of 50 steps in group:default, and so all weights "
        "are NaN."
    )


def test_second_records_at_a_site_and_names_of_users() -> None:
    (text, _) = remarks({"loss_cosine@gradient:a.w": mixed(10), "loss_cosine.2@gradient:a.w": mixed(20)})
    assert "in 40 % of 50 steps at gradient:a.w" in text
    assert remarks({"loss_cosine_of_mine@run": [-1.0] * 50, "loss_weight_decay@run": [0.0] * 50}) == []


def test_they_are_no_fault_and_break_nothing(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    records = {
        "loss_cosine@gradient:trunk.0.weight": [math.nan, *mixed(40)],
        "loss_cosine@group:default": [-0.5] * 51,
        "loss_norm_0@gradient:trunk.0.weight": [1e9] * 51,
        "loss_norm_1@group:default": [0.0] * 51,
        "loss_weight_0@group:default": [1.0] * 51,
    }
    path = tmp_path / "run.jsonl"
    steps = steps_of(records)
    lines = [
        {"step": s.step, "records": {k: v if math.isfinite(v) else "NaN" for k, v in s.records.items()}} for s in steps
    ]
    path.write_text("".join(f"{json.dumps(line)}\n" for line in lines))
    health = examine(read_jsonl(path))

    assert health.verdict.kind == "healthy"
    assert health.faults == ()
    assert health.first_bad is None
    assert main(["doctor", str(path)]) == 0
    text = capsys.readouterr().out
    assert text.count("remark: Losses 0 and 1 conflict (cosine < 0) in 100 % of 51 steps at group:default") == 1
    assert main(["doctor", "--json", str(path)]) == 0
    assert json.loads(capsys.readouterr().out) == []
    page = Path(viz.report(steps).render(tmp_path / "page")).read_text()
    assert "Losses 0 and 1 conflict (cosine &lt; 0) in 100 % of 51 steps at group:default" in page
    assert set(main_figures(steps, {})) == {"gradrewrite/total_norm"}
    shown = last_run(steps)._repr_html_()
    assert all(name in shown for name in records)


def test_a_norm_of_a_loss_that_is_not_finite_is_where_it_begins() -> None:
    """The loss itself is NaN a step later."""
    steps = steps_of(
        {
            "loss@run": [1.5, *[math.nan] * 49],
            "loss_norm_0@group:default": [1.0] * 50,
            "loss_norm_1@group:default": [math.nan] * 50,
            "loss_weight_1@group:default": [math.nan] * 50,
        }
    )
    verdict = examine(steps).verdict

    assert verdict.outcome == "non-finite"
    assert "group:default" in f"{verdict.text} {verdict.site}"
