"""The doctor, on synthetic runs whose figures are known."""

from __future__ import annotations

import json
import math
import random
from collections.abc import Callable
from typing import get_args

import pytest
from hypothesis import given
from hypothesis import strategies as st

import gradrewrite as gr
from gradrewrite.diagnostics.causes import KINDS, Cause, Kind
from gradrewrite.diagnostics.doctor import SkippedRule, diagnose, skipped_rules
from gradrewrite.diagnostics.health import examine
from gradrewrite.diagnostics.run_log import Step, last_run
from gradrewrite.diagnostics.site_health import sites_of, steps_of_clips

from models.clips import step_of

pytestmark = pytest.mark.pure

Records = dict[str, float]
LAYERS = [f"error:layers.{n}" for n in range(8)]
NAN, INF = math.nan, math.inf


def run_of(number: int, records: Callable[[int], Records]) -> list[Step]:
    return [step_of(n, records(n)) for n in range(number)]


def only(steps: list[Step]) -> Cause:
    found = diagnose(steps)
    assert len(found) == 1, [(f.kind, f.text) for f in found]
    return found[0]


def healthy(number: int, seed: int, drift: float = 0.05) -> list[Step]:
    """Magnitudes that walk at random in their logarithms, with noise; shares and clips as of a sound run."""
    rng = random.Random(seed)
    sites = [*LAYERS, "gradient:head.weight", "gradient:head.bias"]
    level = {site: rng.gauss(0.0, 1.0) for site in sites}
    steps = []
    for n in range(number):
        records: Records = {"nonfinite@data:x": 0.0, "nonfinite@outside:0": 0.0}
        for site in sites:
            level[site] += rng.gauss(0.0, drift)
            records[f"norm@{site}"] = math.exp(level[site] + rng.gauss(0.0, 0.2))
            records[f"nonfinite@{site}"] = 0.0
        total = math.exp(rng.gauss(0.0, 0.3))
        records |= {"zeros@activation:relu": rng.uniform(0.3, 0.7), "saturated@activation:tanh": rng.uniform(0.0, 0.2)}
        records |= {"total_norm@group:default": total, "bound@group:default": 1.2, "lr@optimizer:0": 1e-3}
        steps.append(step_of(n, records))
    return steps


@given(seed=st.integers(0, 10**6), number=st.integers(0, 150))
def test_healthy_run_has_no_findings(seed: int, number: int) -> None:
    found = [f for f in diagnose(healthy(number, seed)) if "clip" not in f.kind or number > 60]

    assert found == []


@pytest.mark.broad
@pytest.mark.parametrize("seed", range(5))
def test_long_walk_has_no_findings(seed: int) -> None:
    assert diagnose(healthy(600, seed, drift=0.1)) == ()


def test_non_finite_is_the_first_in_the_order_of_execution() -> None:
    def records(n: int) -> Records:
        bad = n >= 7
        return {
            "nonfinite@activation:a": 0.0,
            "nonfinite@error:a": 9.0 * bad,
            "nonfinite@error:b": 4.0 * bad,
            "nonfinite@error:c": 0.0,
            "max_abs@gradient:w": NAN if bad else 1.0,
            "largest@error:c": NAN,  # a user's own record
        }

    found = only(run_of(10, records))
    assert (found.kind, found.site, found.step) == ("non-finite", "error:b", 7)
    assert found.figures == {"step": 7, "count": 4.0, "bad_sites": 3, "bad_steps": 3, "steps": 10}
    assert "at error:b (4 elements), in step 7" in found.text
    assert "model.monitor.failure(anywhere=True)" in found.suggestion
    assert "CheckFinite" not in found.suggestion  # the run has the counts already
    (found,) = diagnose([step_of(n, {"norm@error:b": NAN if n == 9 else 1.0}) for n in range(10)])
    assert 'gr.on("gradient:*", CheckFinite())' in found.suggestion


def test_errors_that_reach_no_parameter_are_a_remark() -> None:
    def records(n: int) -> Records:
        return {"nonfinite@error:b": 4.0 * (n >= 7), "nonfinite@gradient:w": 0.0, "loss@run": 3.0 - 0.1 * n}

    health = examine(run_of(10, records))
    assert (health.verdict.outcome, health.verdict.is_sound) == ("learns", True)
    (remark,) = [text for text in health.verdict.remarks if "error:b" in text]
    assert "in step 7; sites of that step that are not finite: 1; steps: 3 of 10. All recorded gradients, and" in remark
    (found,) = diagnose(run_of(10, records))
    assert found.suggestion.startswith('Use gr.on("error:*", CheckFinite())')

    def reached(n: int) -> Records:
        return records(n) | {"nonfinite@gradient:w": 1.0 * (n >= 7)}

    assert examine(run_of(10, reached)).verdict.outcome == "non-finite"
    # not known to be harmless: no step follows, gradients were not looked at, there is no loss
    assert examine(run_of(8, records)).verdict.outcome == "non-finite"
    for left_out in ("nonfinite@gradient:w", "loss@run"):
        steps = run_of(10, lambda n: {key: value for key, value in records(n).items() if key != left_out})  # noqa: B023
        assert examine(steps).verdict.outcome == "non-finite"
        assert "All recorded gradients" not in str(examine(steps))
    totals = run_of(10, lambda n: {"total_norm@group:default" if "w" in k else k: v for k, v in records(n).items()})
    assert examine(totals).verdict.outcome == "learns"


@pytest.mark.parametrize(
    ("bad", "site", "count"),
    [
        ({"nan@activation:b": 1.0, "inf@activation:b": 2.0, "nonfinite@error:b": 5.0}, "activation:b", 3.0),
        ({"mean_abs@gradient:w": INF, "total_norm@group:default": INF}, "gradient:w", None),
        ({"total_norm@group:default": NAN}, "group:default", None),
        ({"norm@error:b#1": 1.0, "norm.2@error:b#1": NAN}, "error:b#1", None),
    ],
)
def test_non_finite_by_every_record(bad: Records, site: str, count: float | None) -> None:
    found = only(
        [step_of(0, {"norm@error:z": 1.0}), step_of(1, {"norm@error:z": 1.0} | bad), step_of(2, {"norm@error:z": 1.0})]
    )

    assert (found.kind, found.site, found.step) == ("non-finite", site, 1)
    assert found.figures.get("count") == count
    assert "finite again" in found.suggestion


def test_faulty_input() -> None:
    bad = {"nonfinite@data:x": 3.0, "nonfinite@activation:a": 8.0, "nonfinite@error:a": 8.0, "nonfinite@outside:0": 1.0}
    found = only(run_of(9, lambda n: dict.fromkeys(bad, 0.0) if n < 4 else bad))

    assert (found.kind, found.site, found.step) == ("faulty input", "data:x", 4)
    assert found.figures == {"step": 4, "count": 3.0, "bad_sites": 4, "bad_steps": 5, "steps": 9}


def test_faulty_loss() -> None:
    bad = {"nonfinite@activation:a": 0.0, "nonfinite@error:a": 8.0, "nonfinite@outside:0": 1.0}
    found = only(run_of(9, lambda n: dict.fromkeys(bad, 0.0) if n < 4 else bad))
    with_activation = only(run_of(9, lambda n: dict.fromkeys(bad, 0.0) if n < 4 else bad | {"nan@activation:b": 1.0}))

    assert (found.kind, found.site, found.step) == ("faulty loss", "outside:0", 4)
    assert with_activation.kind == "non-finite"
    assert with_activation.site == "activation:b"


@pytest.mark.parametrize("rate", [NAN, INF, -0.1])
def test_faulty_learning_rate(rate: float) -> None:
    def records(n: int) -> Records:
        return {
            "nonfinite@activation:a": 5.0 * (n > 3),
            "lr@optimizer:0": 0.1,
            "lr@optimizer:1": rate if n == 3 else 0.1,
        }

    found = only(run_of(8, records))
    assert (found.kind, found.site, found.step) == ("faulty learning rate", "optimizer:1", 3)
    assert found.figures["learning_rate"] == pytest.approx(rate, nan_ok=True)
    assert found.figures["first_bad_step"] == 4
    assert only(run_of(4, records)).kind == "faulty learning rate"  # nothing is non-finite yet
    assert diagnose(run_of(3, records)) == ()
    late = only(run_of(8, lambda n: {"nonfinite@error:a": 1.0 * (n > 2), "lr@optimizer:0": rate if n > 5 else 0.1}))
    assert late.kind == "non-finite"


@pytest.mark.parametrize("site", ["data:mask", "activation:masked_fill"])
def test_mask_of_infinities_is_meant(site: str) -> None:
    def records(n: int) -> Records:
        return {f"nonfinite@{site}": 6.0, "nonfinite@error:a": 2.0 * (n == 30), "nonfinite@error:b": 0.0}

    assert diagnose(run_of(30, records)) == ()
    assert only(run_of(31, records)).site == "error:a"


def test_empty_tensor_is_not_non_finite() -> None:
    assert diagnose(run_of(9, lambda n: {"max_abs@error:a": NAN, "norm@error:a": 0.0})) == ()
    assert diagnose(run_of(9, lambda n: {"max_abs@error:a": NAN, "nonfinite@error:a": 0.0})) == ()


@pytest.mark.parametrize("noise", [0.0, 0.2])
def test_exploding_over_steps(noise: float) -> None:
    rng = random.Random(0)

    def records(n: int) -> Records:
        grown = 1.5 ** max(0, n - 20)
        values = {"max_abs@error:a": 0.1 * grown**0.9, "max_abs@error:b": 0.1 * grown, "max_abs@error:c": 0.1}
        values |= {"max_abs@gradient:w": 0.1 * grown**0.8, "total_norm@group:default": 0.3 * grown}
        return {address: value * math.exp(rng.gauss(0.0, noise)) for address, value in values.items()}

    found, *others = diagnose(run_of(50, records))
    assert (found.kind, found.site) == ("exploding", "error:b")
    assert [(one.kind, one.site) for one in others] == [("exploding", "error:a"), ("exploding", "gradient:w")]
    assert found.step == pytest.approx(20, abs=3 if noise else 0)
    assert found.figures["growth_per_step"] == pytest.approx(1.5, rel=noise / 4 + 1e-9)
    assert others[0].figures["growth_per_step"] == pytest.approx(1.5**0.9, rel=noise / 4 + 1e-9)
    if not noise:
        assert found.figures["from"] == pytest.approx(0.1)
        assert found.figures["to"] == pytest.approx(0.1 * 1.5**29)
        assert found.figures["steps"] == 29
        assert "1.5 per step" in found.text


def test_exploding_until_it_is_infinite() -> None:
    found = diagnose(run_of(40, lambda n: {"norm@gradient:w": 10.0**n if n < 30 else INF}))

    assert [f.kind for f in found] == ["non-finite", "exploding"]
    assert (found[0].step, found[1].step) == (30, 0)
    assert found[1].figures["growth_per_step"] == pytest.approx(10.0)


def test_one_jump_and_one_last_value() -> None:
    jump = only(run_of(60, lambda n: {"norm@gradient:w": 1.0 if n < 30 else 1e6 + n % 7}))
    back = only(run_of(20, lambda n: {"norm@gradient:w": 0.5 if n == 19 else 3.0**n}))

    assert [(f.kind, f.step) for f in (jump, back)] == [("exploding", 29), ("exploding", 0)]
    assert back.figures["growth_per_step"] == pytest.approx(3.0)


@pytest.mark.parametrize(
    "value",
    [
        lambda n: 1e-6 * n,  # a layer that starts at zero
        lambda n: 1e-6 * n * n,  # ... under a warm-up
        lambda n: 1e4 if n % 17 == 3 else 1.0,  # single bad batches
        lambda n: 1e4 if n == 1999 else 1.0,
    ],
)
def test_growth_that_is_not_geometric(value: Callable[[int], float]) -> None:
    assert diagnose(run_of(2000, lambda n: {"norm@gradient:w": value(n)})) == ()


NUMBERS = st.sampled_from([0.0, 1.0, 1e-300, 1e300, 5e-324, -1.0, NAN, INF, -INF, 1e3, 1e-3])
ADDRESSES = """
    norm@error:a norm@error:b norm@error:c/op norm@error:d#1 norm@error:e bound@error:a clipped@error:b zeros@error:a
    saturated@activation:t inf@activation:t lr@optimizer:0 nonfinite@data:x max_abs@outside:0 total_norm@group:g
    bound@group:g norm.2@gradient:w x@y
""".split()


@given(st.lists(st.dictionaries(st.sampled_from(ADDRESSES), NUMBERS), max_size=30), st.integers(1, 10))
def test_any_run_has_an_answer_in_strict_json(rows: list[Records], times: int) -> None:
    steps = [step_of(n, row) for n, row in enumerate(rows * times)]
    found = diagnose(steps)

    for finding in found:
        assert finding.figures
        assert finding.text
        assert finding.suggestion
    for fault in (health := examine(steps)).faults:
        assert fault.text
        json.dumps(fault.to_json(), allow_nan=False)
    assert str(health)


def test_too_few_steps_show_nothing() -> None:
    few = run_of(4, lambda n: {"norm@gradient:w": 1e3**n, "zeros@activation:a": 1.0})

    assert diagnose(few) == diagnose([step_of(0, {})]) == diagnose([]) == ()
    assert examine(few).faults == examine([]).faults == ()


def test_exploding_over_layers() -> None:
    rng = random.Random(1)

    def records(n: int) -> Records:
        unit = math.exp(rng.gauss(0.0, 1.0))
        ops = {f"norm@{site}/relu": unit for site in LAYERS}
        return ops | {f"norm@{site}": unit * 10.0 ** (7 - depth) for depth, site in enumerate(LAYERS)}

    steps = run_of(31, records)
    found = only(steps)
    middle = sorted(s.records["norm@error:layers.7"] for s in steps)[15]
    assert (found.kind, found.site, found.step) == ("exploding", "error:layers.0", 0)
    figures = {"growth_per_layer": 10.0, "at_output_end": middle, "at_input_end": middle * 1e7, "layers": 8}
    assert found.figures == pytest.approx(figures)


def test_vanishing() -> None:
    profile = {f"max_abs@{site}": (1 / 64) ** (7 - depth) for depth, site in enumerate(LAYERS)}
    found = only(run_of(6, lambda n: profile | {"mean_abs@error:layers.7": 1.0}))

    assert (found.kind, found.site, found.step) == ("vanishing", "error:layers.3", 0)
    assert {k: v for k, v in found.figures.items() if "@" not in k} == pytest.approx(
        {"growth_per_layer": 1 / 64, "at_output_end": 1.0, "at_input_end": 64**-7, "layers": 8, "vanished_layers": 4}
    )
    assert found.figures["max_abs@error:layers.3"] == pytest.approx(64**-4)
    assert "error:layers.0 (2.274e-13)" in found.text
    assert "error:layers.4" not in found.text


def test_exact_zeros_have_vanished() -> None:
    found = only(run_of(6, lambda n: {f"norm@{site}": 0.5 * (depth > 2) for depth, site in enumerate(LAYERS)}))

    assert (found.kind, found.site) == ("vanishing", "error:layers.2")
    assert found.figures["vanished_layers"] == 3
    assert "growth_per_layer" not in found.figures
    assert found.figures["at_input_end"] == 0.0


def test_layers_that_differ_are_no_trend() -> None:
    jump = {f"norm@{site}": 1e5 if depth < 4 else 1.0 for depth, site in enumerate(LAYERS)}
    shrinking = {f"norm@{site}": 0.5 ** (7 - depth) for depth, site in enumerate(LAYERS)}
    few = {f"norm@{site}": 1e-3**depth for depth, site in enumerate(LAYERS[:3])}
    negative = {f"norm@{site}": -1.0 for site in LAYERS}  # a user's own record of that name

    assert all(diagnose(run_of(9, lambda n, r=r: r)) == () for r in (jump, shrinking, few, negative))


def test_saturated_and_dead() -> None:
    def records(n: int) -> Records:
        late = n >= 10
        shares = {f"saturated@activation:tanh{k}": (0.6 + k / 100) * late for k in range(7)}
        shares |= {"saturated@activation:fine": 0.3, "zeros@activation:fine": 0.9, "zeros@error:fine": 0.99}
        return shares | {"zeros@activation:relu": 0.99 if late else 0.5, "zeros@error:relu": 1.0}

    saturated, dead = diagnose(run_of(40, records))
    assert (saturated.kind, saturated.site, saturated.step) == ("saturated", "activation:tanh6", 10)
    listed = {f"share@activation:tanh{k}": 0.6 + k / 100 for k in range(2, 6)}
    assert saturated.figures == pytest.approx({"share": 0.66, "steps": 20, "sites": 7} | listed)
    assert saturated.text.endswith("activation:tanh2 (0.62) and 2 more.")
    assert (dead.kind, dead.site, dead.figures["share"]) == ("dead", "error:relu", 1.0)
    assert dead.figures["share@activation:relu"] == 0.99


def test_imprecise_stored_tensors() -> None:
    errors = {"stored_error@saved:fine": 0.05, "stored_error@saved:a": 0.06, "stored_error@saved:b/softmax.1": 0.2}
    (found,) = diagnose(run_of(9, lambda n: {name: value if n > 2 else 0.01 for name, value in errors.items()}))

    assert (found.kind, found.site, found.step) == ("stored error", "saved:b/softmax.1", 3)
    assert found.text.startswith("Stored tensors have a relative error above 5%")
    assert found.text.endswith("as the median over the last 9 steps: saved:b/softmax.1 (0.2), saved:a (0.06).")
    assert "bfloat16" in found.suggestion
    assert found.figures == pytest.approx({"share": 0.2, "steps": 9, "sites": 2, "share@saved:a": 0.06})
    assert diagnose(run_of(4, lambda _: errors)) == ()


def test_clip_acts_always() -> None:
    def records(n: int) -> Records:
        clip = {"clipped@error:a": 1.0, "max_abs@error:a": 5.0, "total_norm@group:all": n + 1.0, "bound@group:all": 3.5}
        return clip | {"norm@error:b": 2.0 + n % 2, "norm.2@error:b": 2.0 + n % 2, "bound@error:b": 2.5}

    value, norms = diagnose(run_of(40, records))
    assert (value.kind, value.site, value.step) == ("clip acts always", "error:a", 0)
    assert value.figures == {"share": 1.0, "steps": 40, "percentile_90": 5.0}
    assert (norms.kind, norms.site, norms.step) == ("clip acts always", "group:all", 0)
    figures = {"share": 0.925, "steps": 40, "bound": 3.5, "percentile_90": 36.1}
    assert norms.figures == pytest.approx(figures | {"median_factor": 3.5 / 22, "smallest_factor": 3.5 / 40}, rel=0.01)
    assert norms.text.startswith("The clip by norm at group:all, with the bound 3.5, acts in 92 % of 40 steps")
    assert "from 3.5 to about 36, which" in norms.suggestion
    assert diagnose(run_of(19, records)) == ()


def test_a_clip_by_norm_and_one_by_value_at_one_site_are_counted_apart() -> None:
    by_norm = {"norm@error:a": 1.0, "bound@error:a": 2.0, "factor@error:a": 1.0}
    by_value = {f"{name}@error:a": 1.0 for name in ("factor.2", "share", "max_abs", "mean_abs", "clipped")}
    run = last_run(run_of(9, lambda n: by_norm | (by_value if n < 4 else {})))

    assert steps_of_clips(sites_of(run)) == {"error:a": 9, "error:a (by value)": 4}


def test_a_site_with_both_kinds_of_clip_is_judged_by_each() -> None:
    def records(n: int) -> Records:
        by_norm = {"norm@error:a": 2.0, "factor@error:a": 1.0, "bound@error:a": 50.0}
        by_value = {"factor.2@error:a": 0.25, "share@error:a": 0.5, "max_abs@error:a": 1.0 + n, "mean_abs@error:a": 0.1}
        return by_norm | by_value | {"clipped@error:a": 1.0, "limit@error:a": 0.5}

    always = only(run_of(30, records))
    assert (always.kind, always.figures["bound"], always.figures["median_factor"]) == ("clip acts always", 0.5, 0.25)
    assert [row.rate for row in sites_of(last_run(run_of(30, records)))] == [0.0, 1.0]


def test_a_clip_by_norm_that_logs_is_one_clip() -> None:
    log = {"max_abs@error:a": 3.0, "mean_abs@error:a": 1.0, "clipped@error:a": 1.0}
    records = {"norm@error:a": 4.0, "factor@error:a": 0.5, **log, "bound@error:a": 2.0}
    steps = [step_of(n, records, logged=log) for n in range(30)]
    assert only(steps).figures["percentile_90"] == 4.0
    both = {"factor.2@error:a": 1.0, "share@error:a": 0.0, "max_abs.2@error:a": 2.0, "mean_abs.2@error:a": 1.0}
    both |= {"clipped.2@error:a": 0.0, "limit.2@error:a": 9.0}
    steps = [step_of(n, records | both, logged=log) for n in range(30)]
    assert only(steps).figures["percentile_90"] == 4.0


def test_size_of_a_clip_by_value_is_that_before_it() -> None:
    """Not what was observed before another action, which is smaller."""

    def records(n: int) -> Records:
        clip = {"factor@error:a": 0.1, "share@error:a": 1.0, "max_abs.2@error:a": 50.0, "mean_abs@error:a": 20.0}
        return {"max_abs@error:a": 0.5} | clip | {"clipped@error:a": 1.0, "limit@error:a": 5.0}

    found = only(run_of(30, records))
    assert (found.figures["percentile_90"], found.figures["bound"]) == (50.0, 5.0)


def test_rules_that_had_too_few_steps() -> None:
    def records(n: int) -> Records:
        clips = {"norm@error:a": 1.0, "bound@error:a": 2.0, "clipped@error:b": 0.0, "max_abs@error:b": 1.0}
        late = {"norm@gradient:w": 1.0, "zeros@activation:r": 0.5} if n > 9 else {}
        return clips | late | {"norm@error:c": NAN if n > 9 else 1.0, "bound@error:c": 2.0}

    growing, dead, always = skipped_rules(run_of(13, records))
    assert growing == SkippedRule("exploding", 5, 3, ("gradient:w",))
    assert dead == SkippedRule("dead", 5, 3, ("activation:r",))
    assert always == SkippedRule("clip acts always", 20, 13, ("error:c", "error:b", "error:a"))
    assert skipped_rules(run_of(23, records)) == ()
    assert skipped_rules([]) == skipped_rules([step_of(0, {"lr@optimizer:0": 0.1})]) == ()
    json.dumps([rule.to_json() for rule in skipped_rules(run_of(3, records))], allow_nan=False)
    assert list(always.to_json()) == list(Cause("", "").to_json())


def test_text_says_what_was_not_judged() -> None:
    steps = run_of(
        7, lambda n: {f"norm@error:{k}": 1.0 for k in range(7)} | {f"bound@error:{k}": 2.0 for k in range(7)}
    )
    text = str(examine(steps))

    assert text.startswith("Nothing wrong so far: in 7 steps no gradient exploded")
    sites = "error:6, error:5, error:4, error:3, error:2 and 2 more"
    assert (
        f"\n\nNot judged, for too few steps:\n  clip acts always: needs 20 steps, at most 7 were recorded at {sites}"
        in text
    )
    assert "exploding:" not in text


def test_text_is_sentences_grouped_by_rule() -> None:
    def records(n: int) -> Records:
        fast = {f"norm@gradient:{k}": (3.0 + 0.1 * k) ** n for k in range(9)}
        return fast | {"norm@error:a": 2.0, "bound@error:a": 1.0, "nonfinite@error:z": float(n == 24)}

    text = str(examine(run_of(25, records)))
    assert text.startswith(
        "Learning rate too high\n\nIt ends with values that are not finite. The norm of the gradients"
    )
    assert "\nWhat to change: Lower the learning rate, " in text
    assert '\n[\n    gr.on("step:*", ClipByGlobalNorm(6)),\n]\n\nnon-finite: The first value' in text
    assert "\nexploding: gradient:8 grows by a factor of 3.8 per step" in text
    assert "also at gradient:7, gradient:6, gradient:5, gradient:4, gradient:3 and 3 more.\n" in text
    assert "\nclip acts always: The clip by norm at error:a, with the bound 1, acts in 100 % of 25 steps" in text
    assert "Raise the bound" not in text  # while the run is not sound
    assert not any(word in text for word in ("figures", "share =", "suggestion", "also error"))


def test_the_gravest_comes_first() -> None:
    def records(n: int) -> Records:
        vanishing = {f"norm@{site}": 0.01 ** (7 - depth) for depth, site in enumerate(LAYERS)}
        shares = {"zeros@activation:r": 1.0, "saturated@activation:t": 1.0, "norm@gradient:w": 2.0**n}
        clips = {"bound@gradient:w": 1e-3}
        return clips | shares | vanishing | {"nonfinite@error:z": float(n > 30)}

    kinds = ["non-finite", "exploding", "vanishing", "saturated", "dead", "clip acts always"]
    assert [f.kind for f in diagnose(run_of(40, records))] == kinds


def test_last_run_of_a_file_counts() -> None:
    bad, good = run_of(9, lambda n: {"nonfinite@error:a": 1.0}), run_of(9, lambda n: {"nonfinite@error:a": 0.0})

    assert diagnose(bad + good) == ()
    assert examine(bad + good).faults == ()
    assert only(good + bad).figures["steps"] == 9


def test_the_old_name_of_a_cause_warns() -> None:
    with pytest.warns(gr.RewriteWarning, match=r"gr.Finding is gr.Cause; the old name goes in 0.3"):
        assert gr.Finding is gr.Cause


def test_kinds_have_advice_where_it_is_the_same_for_all() -> None:
    assert all(traits.advice.endswith(".") for traits in KINDS.values() if traits.advice)
    assert {kind for kind, traits in KINDS.items() if traits.gravity == "first"} == {
        "faulty input",
        "faulty learning rate",
    }
    assert {kind for kind, traits in KINDS.items() if traits.gravity == "sound"} == {
        "no records",
        "too short",
        "healthy",
    }
    assert set(KINDS) <= set(get_args(Kind))
