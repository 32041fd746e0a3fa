"""The verdict on runs whose faults are known."""

from __future__ import annotations

import ast
import glob
import math
import random
from collections.abc import Callable

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gradrewrite.diagnostics.health import Health, examine
from gradrewrite.diagnostics.run_log import Step
from gradrewrite.diagnostics.site_health import SiteHealth

from models.clips import step_of

pytestmark = pytest.mark.pure

NAN, INF = math.nan, math.inf
LAYERS = 6
Norms = Callable[[int, int], float]


def noisy(level: float, spread: float = 0.2) -> float:
    return level * math.exp(random.gauss(0.0, spread))


def run_of(norm: Norms, *, bound: float = 1.0, steps: int = 60, learns: bool = True) -> list[Step]:
    """Steps of a chain of layers; ``norm`` gives the norm of the error of a layer in a step."""
    random.seed(0)
    rows = []
    for step in range(steps):
        records = {"loss@run": noisy(1.0, 0.01) * (4 - 3 * step * learns / steps)}
        for layer in range(LAYERS):
            records |= {f"norm@error:layers.{layer}": norm(layer, step), f"bound@error:layers.{layer}": bound}
        rows.append(step_of(step, records))
    return rows


def check(health: Health, kind: str, *parts: str) -> None:
    assert health.verdict.kind == kind, health.verdict
    for part in parts:
        assert part in health.verdict.text
    assert health.verdict.text.endswith(".")
    assert health.verdict.advice


def test_healthy() -> None:
    health = examine(run_of(lambda layer, step: noisy(0.5)))

    check(
        health,
        "healthy",
        "in 60 steps no gradient exploded",
        "the loss went from 3.",
        " (mean of the first and last 6 steps).",
    )
    assert health.verdict.headline == "Healthy"
    assert health.verdict.is_sound
    assert health.first_bad_text == "Every recorded value of this run was finite."
    assert {row.cells()[9] for row in health.sites} == {"keep"}
    assert not any(row.code for row in health.sites)
    no_problem = "No problem: the clip at error:layers.5 and 4 more never acted, for all sizes stayed below the bound."
    assert health.findings_text == no_problem
    assert health.faults == ()


def test_a_bound_is_suggested_only_where_a_clip_acts_often() -> None:
    steps = run_of(lambda layer, step: 2.0 if step % 10 < layer else 0.5)
    health = examine([step_of(s.step, s.records | {"norm@gradient:w": 1.0}) for s in steps])

    wanted = {f"error:layers.{n}": "keep" if n <= 2 else "2" for n in range(LAYERS)} | {"gradient:w": "-"}
    assert {row.site: row.cells()[9] for row in health.sites} == wanted


def test_one_clip_that_never_acted_is_no_problem() -> None:
    rows = [step_of(n, {"norm@error:a": 1.0, "bound@error:a": 2.0}) for n in range(20)]
    assert "No problem: the clip at error:a never acted" in examine(rows).findings_text


def test_too_short() -> None:
    check(examine(run_of(lambda layer, step: 2.0, steps=19)), "too short", "Nothing wrong so far: in 19 steps")


def test_no_clip_ever_acted() -> None:
    check(examine(run_of(lambda layer, step: noisy(0.01))), "healthy", "no clip ever acted")


def test_bound_too_low() -> None:
    health = examine(run_of(lambda layer, step: 5.0 if layer == 2 else 0.5, bound=0.005, learns=False))

    worst = "The clip by norm at error:layers.2, with the bound 0.005, acts in 100 % of 60 steps, and leaves 0.1 % of"
    check(health, "clip acts always", "too low at 6 of 6 clipped sites", worst)
    assert health.verdict.advice.startswith("Raise the bound at error:layers.2 from 0.005 to about 5, which 90 %")
    assert "as a first step" in health.verdict.advice
    assert "until the clip acts in about a tenth of the steps" in health.verdict.advice
    assert all("as a first step" in one.suggestion for one in health.findings)
    steps = run_of(lambda layer, step: 5.0 if layer == 2 else 0.5, bound=0.005, learns=False)
    diverged = examine(steps, [step_of(0, {"loss@run": 1.0}), step_of(1, {"loss@run": NAN})])
    assert diverged.verdict.advice.startswith(health.verdict.advice)
    assert "Raise it little by little" in diverged.verdict.advice
    assert examine(steps, steps).verdict.advice == health.verdict.advice
    assert [row.cells()[0] for row in health.sites if row.mark] == ["error:layers.2 (see the verdict)"]
    assert health.verdict.code[3] == 'gr.on("error:layers.2", ClipByNorm(5))'
    assert len(health.verdict.code) == 6
    assert health.verdict.headline == "Clipping bound too low"
    assert not health.verdict.is_sound


@pytest.mark.parametrize("last", [INF, NAN])
def test_a_bound_that_is_switched_off_at_the_end(last: float) -> None:
    rows = [step_of(n, {"norm@error:a": 5.0, "bound@error:a": last if n == 59 else 0.5}) for n in range(60)]
    health = examine(rows, [step_of(n, {"norm@error:a": 9.0}) for n in range(60)])

    check(health, "clip acts always", "at error:a, with the bound 0.5, acts in 98 % of 60 steps")
    assert "from 0.5 to about 9 (from the baseline)" in health.verdict.advice
    assert [row.bound for row in health.sites] == [0.5]
    assert "(from the baseline)" in health.findings[0].suggestion


def test_findings_belong_to_the_clip_of_their_record() -> None:
    records = {"norm@error:a": 5.0, "bound@error:a": 0.5, "norm.2@error:a": 0.5, "bound.2@error:a": 0.5}
    health = examine([step_of(n, records) for n in range(60)])

    check(health, "clip acts always", "1 of 2 clipped sites", "at error:a, with the bound 0.5, acts in 100 % of")
    assert [one.key for one in health.findings if one.kind == "clip acts always"] == ["norm@error:a"]


def test_the_baseline_suggests_a_higher_bound() -> None:
    steps = run_of(lambda layer, step: 5.0 if layer == 2 else 0.5, bound=0.005, learns=False)
    plain = run_of(
        lambda layer, step: 0.2 if layer == 1 else NAN if layer == 3 and step == 7 else 9.0, bound=INF, learns=False
    )
    health = examine(steps, plain)

    found = {row.site: (row.suggestion, row.from_baseline) for row in health.sites}
    assert found["error:layers.2"] == (9.0, True)
    assert found["error:layers.1"] == (0.5, False)  # smaller in the baseline
    assert found["error:layers.3"] == (0.5, False)  # not finite there
    assert "from 0.005 to about 9 (from the baseline), which 90 % of the sizes there" in health.verdict.advice
    assert "first step" not in health.verdict.advice
    assert 'gr.on("error:layers.2", ClipByNorm(9))' in health.verdict.code
    assert health.sites[3].cells()[9] == "9 (from the baseline)"
    advice = {one.site: one.suggestion for one in health.findings}
    assert "about 9 (from the baseline), which 90 % of the sizes there" in advice["error:layers.2"]
    assert "about 0.5, which 90 % of the sizes seen" in advice["error:layers.1"]


def test_a_baseline_whose_loss_diverged_suggests_no_bound() -> None:
    steps = run_of(lambda layer, step: 0.5, bound=0.005)
    plain = run_of(lambda layer, step: 9.0, bound=INF)
    plain = [step_of(s.step, {**s.records, "loss@run": INF}) for s in plain]

    assert not any(row.from_baseline for row in examine(steps, plain).sites)


def test_the_verdict_names_the_clip_of_all_gradients() -> None:
    group = {"total_norm@step:group:default": 2.0, "bound@step:group:default": 0.1}
    steps = run_of(lambda layer, step: 0.5, bound=0.005, learns=False)
    health = examine([step_of(s.step, s.records | group) for s in steps])

    group = "at step:group:default, with the bound 0.1, acts in 100 % of 60 steps, and leaves 5 % of the size"
    check(health, "clip acts always", "too low at 7 of 7 clipped sites", group)
    assert "from 0.005 to about 0.5, which" in health.verdict.advice
    assert health.verdict.advice.endswith(" Raise the others likewise.")
    assert health.verdict.code[-1] == 'gr.on("step:*", ClipByGlobalNorm(2))'


def test_a_layer_that_explodes_behind_a_clip() -> None:
    health = examine(run_of(lambda layer, step: noisy(300.0) if layer == 2 else noisy(0.5), learns=False))

    jump = "on its way back through layers.3 the error grows"
    check(health, "one layer", jump, "the clip at error:layers.2 acts after that, and leaves 0.33 % of it.")
    assert health.verdict.headline == "One layer explodes"
    assert "Until then keep the clip" in health.verdict.advice
    assert health.verdict.advice.startswith("Change layers.3, not the bound")
    assert [row.cells()[0] for row in health.sites if row.mark] == ["error:layers.3 (see the verdict)"]
    assert (health.verdict.site, health.verdict.code) == ("error:layers.3", ())
    assert not any(row.code for row in health.sites)  # a higher bound is no remedy
    assert [one.kind for one in health.faults] == ["one layer"]
    assert health.faults[0].factor == pytest.approx(600, rel=0.1)
    assert health.findings_text == "The rules found nothing else."


@pytest.mark.parametrize(("back", "front"), [("left.2", "right.3"), ("layers.2", "layers.4"), ("left", "right")])
def test_neighbors_in_the_records_may_be_parallel_branches(back: str, front: str) -> None:
    records = {f"{name}@error:{site}": 1.0 for site in ("a", back, front, "b") for name in ("norm", "bound")}
    health = examine([step_of(n, records | {f"norm@error:{back}": 300.0}) for n in range(60)])

    check(health, "large error", f"that at error:{back} is 300 times that at error:{front}")
    assert health.verdict.advice.startswith(f"If {back} feeds {front}, ")
    assert not health.verdict.is_sound
    assert health.verdict.headline == "Large error"
    assert f"Change {front}" not in health.verdict.advice


@given(st.text(st.characters(exclude_categories=["Cs"]), min_size=1))
def test_suggested_code_is_python(name: str) -> None:
    site = f"error:{name}"
    code = SiteHealth(site, "ClipByNorm", "norm", 20, suggestion=2.0).code

    (statement,) = ast.parse(code).body
    assert isinstance(statement, ast.Expr)
    assert isinstance(statement.value, ast.Call)
    assert ast.literal_eval(statement.value.args[0]) == glob.escape(site)


def test_a_named_group_has_words_in_place_of_code() -> None:
    rows = [SiteHealth(f"step:group:{name}", "ClipByGlobalNorm", "total_norm", 20, suggestion=2.0) for name in "x'"]

    assert [row.code for row in rows] == ["", ""]
    assert rows[0].cells()[10] == "raise max_norm of group x to 2"
    row = SiteHealth("step:group:default", "ClipByGlobalNorm", "total_norm", 20, suggestion=2.0)
    assert row.code == 'gr.on("step:*", ClipByGlobalNorm(2))'


@pytest.mark.parametrize("factor", [0.5, 3.0])
def test_a_clip_by_value_with_two_bounds_has_no_suggestion(factor: float) -> None:
    site = "gradient:w"
    records = {"factor": factor, "share": 0.5, "max_abs": 1.0, "mean_abs": 1.0, "clipped": 4.0}
    health = examine([step_of(n, {f"{name}@{site}": value for name, value in records.items()}) for n in range(30)])

    check(health, "clip sets the values", "acts in 100 % of 30 steps")
    assert not health.verdict.code
    assert "about" not in health.verdict.advice
    assert all(math.isnan(row.suggestion) and not row.code for row in health.sites)


def test_what_the_rules_found_beyond_the_verdict() -> None:
    steps = run_of(lambda layer, step: 300.0 if layer == 2 else 5.0 if layer == 0 else 0.5, learns=False)
    health = examine(steps)

    assert health.verdict.kind == "one layer"
    assert health.findings_text.startswith("clip acts always: The clip by norm at error:layers.0")


def test_the_first_value_of_a_baseline_that_is_not_finite() -> None:
    steps = run_of(lambda layer, step: 0.5)
    plain = [step_of(s.step, {**s.records, "norm@error:layers.4": NAN if s.step > 3 else 1.0}) for s in steps]

    text = examine(steps, plain).first_bad_text
    assert text.startswith("Every recorded value of this run was finite. In the baseline, ")
    assert text.endswith("not finite is at error:layers.4, in step 4.")
    assert examine(steps, plain).baseline_bad is not None
    assert examine(steps, steps).baseline_bad is None


def test_a_jump_where_every_clip_is_as_strong_is_a_bound_too_low() -> None:
    steps = run_of(lambda layer, step: 50.0 if layer == 2 else 0.5, bound=0.005, learns=False)
    quiet = {"norm@error:layers.2": 0.5, "norm@error:layers.3": 0.001}
    rows = [step_of(s.step, {k: v for k, v in (s.records | quiet).items() if "factor" not in k}) for s in steps]
    check(examine(rows), "clip acts always", "at 5 of 6 clipped sites")


def test_a_jump_that_no_clip_hides_is_left_to_the_doctor() -> None:
    check(examine(run_of(lambda layer, step: 300.0 if layer < 3 else 0.5, bound=INF)), "healthy")


def test_exploding_over_steps() -> None:
    health = examine(run_of(lambda layer, step: 0.01 * 1.3**step, bound=INF, learns=False))

    check(health, "exploding", "grows by a factor of 1.3 per step")


def test_vanishing() -> None:
    health = examine(run_of(lambda layer, step: noisy(0.5, 0.01) * 0.02 ** (LAYERS - 1 - layer), learns=False))

    check(health, "vanishing", "by a factor of 0.02 per layer: median norm is 0.49", "and 1.5", "over 6 layers")
    assert "No clip is a remedy" in health.verdict.advice


def test_not_finite_comes_first() -> None:
    steps = run_of(lambda layer, step: NAN if step >= 40 and layer == 1 else 300.0 if layer == 2 else 0.5, learns=False)
    rows = [step_of(s.step, {**s.records, "nonfinite@error:layers.1": 7.0 * (s.step >= 40)}) for s in steps]
    health = examine(rows)

    check(health, "non-finite", "error:layers.1 (7 elements), in step 40")
    assert health.first_bad == ("error:layers.1", 40, 7.0)
    assert health.first_bad_text == "First at error:layers.1 in step 40, 7 elements."


@pytest.mark.parametrize("value", [NAN, INF, -INF])
@pytest.mark.parametrize("at", [0, 30, 59])
@pytest.mark.parametrize("address", ["loss@run", "max@activation:loss"])
def test_a_loss_that_is_not_finite_is_never_sound(value: float, at: int, address: str) -> None:
    rows = [step_of(n, {"norm@gradient:w": 1.0, address: value if n == at else 1.0}) for n in range(60)]
    health = examine(rows)

    check(health, "non-finite", f"({address}) is not finite, first in step {at};")
    assert not health.verdict.is_sound
    assert health.first_bad_text == f"First at {address} in step {at}."
    check(examine([step_of(0, {address: value})]), "non-finite")
    assert f"is at {address}, in step {at}" in examine(rows[:at], rows).first_bad_text


def test_a_site_that_is_not_finite_in_the_step_of_the_loss_is_named_first() -> None:
    rows = [step_of(n, {"norm@error:a": NAN if n > 5 else 1.0, "loss@run": NAN if n > 5 else 1.0}) for n in range(9)]
    assert examine(rows).first_bad_text == "First at error:a in step 6."


def test_an_expected_infinity_is_not_the_first_bad_value() -> None:
    rows = [step_of(n, {"inf@data:mask": 8.0, "norm@gradient:w": 1.0}) for n in range(8)]

    assert examine(rows).first_bad is None


def test_nothing_recorded() -> None:
    check(examine([]), "no records", "In 0 steps no norm")
    check(examine([step_of(0, {"loss@run": 1.0})]), "no records", "In 1 step no norm")


def test_baseline() -> None:
    run = run_of(lambda layer, step: noisy(0.5))
    health = examine(run, [step_of(n, {"loss@run": 5.0}) for n in range(10)])

    assert health.loss.startswith("Compared up to step 9, where the baseline ends: this run ends lower, by ")
    assert examine(run).loss.startswith("The loss peaked at ")
    assert "(mean of the last 6 steps) after 60 steps; it began at 3.8" in examine(run).loss
    assert examine(run).loss.endswith(" (mean of the first 6 steps).")
    assert "the baseline has none" in examine(run, []).loss


def losses(values: list[float]) -> list[Step]:
    return [step_of(n, {"norm@gradient:w": 1.0, "loss@run": value}) for n, value in enumerate(values)]


def test_runs_of_other_lengths_are_compared_over_the_steps_of_both() -> None:
    long, short = losses([4 - 0.04 * n for n in range(100)]), losses([4 - 0.04 * n for n in range(50)])

    assert examine(long, short).loss.startswith(
        "Compared up to step 49, where the baseline ends: they end alike, within the noise of the loss."
    )
    assert examine(short, long).loss.startswith("Compared up to step 49, where this run ends: they end alike")
    assert "after 50 steps" in examine(long, short).loss
    assert examine(long, long).loss.startswith("They end alike")
    later = [step_of(s.step + 100, s.records) for s in short]
    assert examine(later, short).loss.startswith("This run and the baseline have no step in common")


@pytest.mark.parametrize("offset", [0.0, -10.0, 1e6])
def test_a_lower_peak_does_not_depend_on_an_offset_of_the_loss(offset: float) -> None:
    low, high = ([top + offset] + [1.0 + offset] * 39 for top in (3.0, 9.0))

    assert "this run has the lower peak" in examine(losses(low), losses(high)).loss
    assert "lower peak" not in examine(losses(high), losses(low)).loss
    assert "lower peak" not in examine(losses(high), losses(high)).loss


ADDRESS = st.sampled_from(
    "norm@error:a bound@error:a norm@error:b max_abs@gradient:c clipped@gradient:c limit@gradient:c factor@gradient:c "
    "share@gradient:c norm_share@gradient:d total_norm@group:default bound@group:default nonfinite@error:a "
    "saturated@activation:t update_ratio@gradient:c own@error:a loss@run".split()
)
VALUE = st.floats() | st.sampled_from([0.0, 1.0, NAN, INF, -INF])


@given(st.lists(st.dictionaries(ADDRESS, VALUE, max_size=8), max_size=30), st.integers(1, 2))
def test_any_run_has_a_verdict(rows: list[dict[str, float]], times: int) -> None:
    steps = [step_of(n, row) for n, row in enumerate(rows * times)]
    health = examine(steps, steps[:5])

    assert health.verdict.headline
    assert health.verdict.text
    assert health.loss
    assert all(len(row.cells()) == 11 for row in health.sites)


def test_nothing_is_a_fault_where_the_loss_falls() -> None:
    always = examine(run_of(lambda layer, step: 5.0 if layer == 2 else 0.5, bound=0.005))
    behind = examine(run_of(lambda layer, step: noisy(300.0) if layer == 2 else noisy(0.5)))

    for health in (always, behind):
        assert (health.verdict.kind, health.verdict.outcome, health.verdict.causes) == ("healthy", "learns", ())
    assert (
        "ClipByNorm at error:layers.2 acts in 100 % of the steps, and leaves 0.001 of the size (median)"
        in always.verdict.remarks[3]
    )
    assert any(
        text.startswith("One layer explodes: on its way back through layers.3") for text in behind.verdict.remarks
    )


def recurrence(step: int, *, finite: bool = True, **further: float) -> Step:
    """A step of a recurrence with 20 calls, whose error doubles at each on its way back."""
    calls = {f"norm@error:cell{f'#{n}' if n else ''}": noisy(2.0 ** (19 - n)) for n in range(20)}
    grads = {
        "norm@gradient:cell.weight": noisy(1e5) if finite else NAN,
        "nonfinite@gradient:cell.weight": 0.0 + (not finite),
    }
    return step_of(step, {**calls, **grads, **further})


def test_a_recurrence_that_explodes() -> None:
    steps = [recurrence(n, finite=n < 24, **{"loss@run": noisy(2.0, 0.01)}) for n in range(25)]
    first, *others = examine(steps).faults

    assert (first.kind, first.site, first.source, first.step) == ("exploding", "error:cell", "", 0)
    assert first.factor == pytest.approx(2.0, rel=0.1)
    assert first.figures["growth_per_call"] == first.factor
    assert first.text.startswith("Errors grow by a factor of ")
    assert first.suggestion.splitlines()[1].startswith('gr.on("error:cell", ClipByNorm(')
    assert [(one.kind, one.site) for one in others] == [("non-finite", "gradient:cell.weight")]  # no finding twice
    text = str(examine(steps))
    assert text.startswith("Exploding gradients\n\nIt ends with values that are not finite: loss ")
    assert text.count("Errors grow by a factor") == 1
    assert '\n    gr.on("gradient:*", ClipByGlobalNorm(1.0)),\n]\n\nnon-finite: ' in text


def test_nothing_is_advised_that_the_run_has() -> None:
    last = {"loss@run": NAN, "skipped@optimizer:0": 1.0}
    checked = [step_of(n, {"nonfinite@gradient:w": 0.0, "norm@gradient:w": 1.0, "loss@run": 2.0}) for n in range(24)]
    (fault,) = examine([*checked, step_of(24, {"nonfinite@gradient:w": 3.0, **last})]).faults
    (loss,) = examine([*checked, step_of(24, {"nonfinite@gradient:w": 0.0, **last})]).faults
    (again,) = examine(
        [*checked, step_of(24, {"nonfinite@gradient:w": 3.0, **last}), step_of(25, {"loss@run": 2.0})]
    ).faults

    assert fault.kind == loss.kind == again.kind == "non-finite"
    assert "such updates are skipped already" in again.suggestion
    assert not any("CheckFinite" in one.suggestion for one in (fault, loss, again))
    group = {"total_norm@group:default": 0.5, "bound@group:default": 1.0, "factor@group:default": 1.0}
    stalling = {"loss@run": 2.0}
    assert len(examine([recurrence(n, **stalling) for n in range(24)]).verdict.code) == 2
    (rule,) = examine([recurrence(n, **stalling, **group) for n in range(24)]).verdict.code
    assert rule.startswith('gr.on("error:cell", ClipByNorm(')
    stalls = [step_of(n, {"norm@error:a": 1.0, "loss@run": 2.0}) for n in range(24)]
    assert "Observe" not in examine(stalls).verdict.advice


def test_a_fault_that_is_no_finding_of_the_doctor() -> None:
    (stalls,) = examine(run_of(lambda layer, step: noisy(0.5), bound=INF, learns=False)).faults

    assert (stalls.kind, stalls.site, stalls.figures) == ("stalls", "", {})
    assert stalls.suggestion.startswith("Look at data, loss and learning rate")


def test_a_faulty_input_is_graver_than_growth() -> None:
    steps = [recurrence(n, finite=n < 24, **{"nonfinite@data:x": 8.0 * (n == 24)}) for n in range(25)]

    assert [one.kind for one in examine(steps).faults] == ["faulty input", "exploding"]
    assert "\nexploding: Errors grow" in str(examine(steps))


def test_what_is_no_fault_is_a_remark() -> None:
    steps = run_of(lambda layer, step: 5.0 if layer == 2 else 0.5, bound=0.005)
    steps = [step_of(s.step, s.records | {"saturated@activation:t": 0.9}) for s in steps]
    health = examine(steps)

    assert health.faults == ()
    text = str(health)
    assert text.startswith("Healthy: in 60 steps no gradient exploded")
    assert "\nNothing has to be changed.\n\nThe rules found nothing else.\n\nremark: ClipByNorm at error:layers" in text
    assert "\nremark: Units sit at the bounds of their tanh or sigmoid" in text


def test_a_loss_is_no_fault_by_itself_in_a_short_run() -> None:
    def steps(losses: list[float]) -> list[Step]:
        return [step_of(n, {"norm@error:a": 1.0, "loss@run": loss}) for n, loss in enumerate(losses)]

    noisy_losses = [1.498, 1.71, 1.55, 1.66, 1.58, 1.49, 1.7, 1.6, 1.57, 1.63] * 2
    rising = [1.5 * 1.3**n for n in range(10)]
    short, long, diverges = (examine(steps(run)).verdict for run in (noisy_losses[:19], noisy_losses, rising))
    assert (short.outcome, short.headline, short.is_sound) == ("stalls", "Nothing wrong so far", True)
    assert (long.outcome, long.headline, long.is_sound) == ("stalls", "It does not learn", False)
    assert (diverges.outcome, diverges.is_sound) == ("diverges", False)


def test_a_run_that_neither_learns_nor_tells_why_is_not_healthy() -> None:
    verdict = examine(run_of(lambda layer, step: noisy(0.5), learns=False)).verdict

    assert (verdict.kind, verdict.headline, verdict.is_sound) == ("stalls", "It does not learn", False)
    assert verdict.text.endswith(" in 60 steps. Nothing that was recorded tells why.")
