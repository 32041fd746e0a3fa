"""The judge on runs of a few numbers: outcomes, causes and rules at their edges."""

from __future__ import annotations

import math
from collections.abc import Sequence

import pytest

from gradrewrite.diagnostics.causes import Cause
from gradrewrite.diagnostics.health import examine
from gradrewrite.diagnostics.judge import Evidence, outcome_of
from gradrewrite.diagnostics.run_log import Step, last_run
from gradrewrite.diagnostics.verdict import Verdict

from models.clips import step_of

pytestmark = pytest.mark.pure

NAN, INF = math.nan, math.inf


def run_of(losses: Sequence[float], sizes: Sequence[float] = ()) -> list[Step]:
    rows = enumerate(zip(losses, sizes or [1.0] * len(losses), strict=True))
    return [step_of(n, {"norm@gradient:w": size, "loss@run": loss}) for n, (loss, size) in rows]


def layers(sizes: dict[str, float]) -> list[Step]:
    records = {f"norm@error:{name}": size for name, size in sizes.items()}
    return [step_of(n, records | {"loss@run": 2.0}) for n in range(10)]


def verdict_on(steps: Sequence[Step], evidence: Evidence | None = None) -> Verdict:
    return examine(steps, evidence=evidence).verdict


@pytest.mark.parametrize(
    ("losses", "outcome"),
    [
        ([10 * 0.5**n + 0.01 for n in range(50)], "learns"),  # a trend is no noise
        ([10 * 0.3**n + 0.01 for n in range(50)], "learns"),
        ([1.0, 0.3, 0.1] + [0.01] * 47, "learns"),
        ([10 * 0.5**n + 5.0 * (n == 4) for n in range(50)], "learns"),  # one value is no noise
        ([-1.0 - 0.1 * n for n in range(50)], "learns"),
        ([2.0 + 0.2 * (-1) ** n for n in range(50)], "stalls"),
        ([2.0] * 50, "stalls"),
        ([0.0] * 50, "stalls"),
        ([1e308] * 25 + [1e300] * 25, "learns"),  # whose sum overflows
        ([1.0 + 0.1 * n for n in range(50)], "diverges"),
        ([1.0] * 49 + [NAN], "non-finite"),
        ([1.0] * 49 + [INF], "non-finite"),
        ([1.0, 0.5, 0.2], "unknown"),
        ([], "unknown"),
    ],
)
def test_outcomes(losses: list[float], outcome: str) -> None:
    assert outcome_of(last_run(run_of(losses))) == outcome


def test_several_backwards_of_an_update_are_clipped_at_the_step() -> None:
    errors = {f"norm@error:layers.{n}": 3.0 ** (9 - n) for n in range(10)}
    one = [Step(n, errors | {"loss@run": 2.0}) for n in range(20)]
    four = [Step(n, step.records, update=n // 4, micro_batch=n % 4) for n, step in enumerate(one)]
    for steps, rule in ((one, "gradient:*"), (four, "step:*")):
        verdict = verdict_on(steps)
        assert verdict.kind == "exploding"
        assert verdict.code[-1] == f'gr.on("{rule}", ClipByGlobalNorm(1.0))'


def test_an_update_that_made_something_non_finite_comes_first() -> None:
    cause = Cause("update", "param:w", step=1, text="step 1: step() made w NaN.", advice="Use eps=1e-4.")
    verdict = verdict_on(run_of([2.0, 1.9]), Evidence(update=cause))
    assert (verdict.outcome, verdict.kind, verdict.causes, verdict.code) == ("non-finite", "update", (cause,), ())
    assert "in 2 steps. step 1: step() made w NaN." in verdict.text
    assert "in 1 step." in verdict_on(run_of([2.0]), Evidence(update=cause)).text


def test_an_explosion_comes_before_the_update_that_overflows() -> None:
    errors = {f"norm@error:layers.{n}": 9.0 ** (9 - n) for n in range(10)}
    cause = Cause("update", "param:w", step=1, text="step 1: step() made w infinite.", figures={"limit": 3.4e38})
    steps = [Step(n, errors | {"loss@run": 2.0}) for n in range(2)]
    assert verdict_on(steps, Evidence(update=cause)).kind == "exploding"
    assert verdict_on(run_of([2.0, 1.9]), Evidence(update=cause)).causes == (cause,)


def test_a_batch_is_blamed_only_with_evidence() -> None:
    falling = [2.0 - 0.03 * n for n in range(50)]

    def causes(batches: dict[int, float], sizes: Sequence[float] = ()) -> list[tuple[str, int]]:
        found = verdict_on(run_of(falling, sizes), Evidence(batches=batches))
        return [(cause.kind, cause.step) for cause in found.causes]

    usual = dict.fromkeys(range(50), 1.0)
    assert causes(usual | {0: 20.0}) == []  # its step goes well
    assert causes(dict.fromkeys(range(50), 0.0) | {0: 3.0}) == []
    assert causes({0: 1.0, 1: NAN}) == []
    grows = [1.0] * 20 + [100.0] + [1.0] * 29
    assert causes(usual | {20: 50.0}, grows) == [("bad batch", 20)]
    assert causes(usual | {20: NAN}, [1.0] * 20 + [NAN] + [1.0] * 29) == [("bad batch", 20)]
    assert causes(usual, grows) == [("spike", 20)]
    assert causes(usual, [100.0] + [1.0] * 49) == []  # an ordinary start
    assert causes(usual, [1.0] * 49 + [100.0]) == []  # perhaps the beginning of growth


def test_findings_come_before_a_spike_where_no_loss_is_known() -> None:
    steps = [Step(n, {"norm@gradient:w": INF if n == 10 else 100.0 if n == 20 else 1.0}) for n in range(40)]

    assert examine(steps).verdict.kind == "non-finite"
    assert examine([step for step in steps if step.step != 10]).verdict.kind == "spike"


def test_a_likelihood_that_falls_without_end_is_no_growth() -> None:
    found = verdict_on(run_of([-1.0, -10.0, -100.0, NAN]))

    assert [cause.kind for cause in found.causes] == ["non-finite op"]


def test_a_layer_that_is_known_by_its_second_call_alone() -> None:
    found = verdict_on(layers({"a": 300.0, "b": 300.0, "c#1": 0.1, "d": 0.1, "e": 0.1}))

    assert [(cause.kind, cause.site) for cause in found.causes] == [("one layer", "error:c#1")]
    assert found.code == ('gr.on("error:b", ClipByNorm(0.2))',)


def test_names_with_quotes_and_globs_are_literal_in_rules() -> None:
    found = verdict_on(layers({f"m['{n}'].x": 10.0 ** (4 - n) for n in range(5)}))

    assert found.causes[0].kind == "exploding"
    assert found.code[0] == "gr.on(\"error:m[[]'0'].x\", ClipByNorm(2))"


def test_a_clip_that_is_too_low_has_the_rule_of_its_site() -> None:
    records = {"total_norm@group:default": 100.0, "bound@group:default": 1.0, "loss@run": 2.0}

    found = verdict_on([step_of(n, records) for n in range(30)])
    assert [cause.kind for cause in found.causes] == ["clip too low"]
    assert found.causes[0].factor == pytest.approx(0.01)
    assert found.causes[0].rules == found.code == ('gr.on("gradient:*", ClipByGlobalNorm(100))',)


def test_many_calls_in_few_steps_are_no_habit() -> None:
    calls = [f"error:c{f'#{n}' if n else ''}" for n in range(40)]
    records = {f"{name}@{site}": size for site in calls for name, size in (("norm", 5.0), ("bound", 1.0))}
    short, long = (examine([step_of(n, records) for n in range(count)]) for count in (3, 20))

    assert short.findings == ()
    assert [one.text.partition(", and")[0] for one in long.findings] == [
        "The clip by norm at error:c x 40, with the bound 1, acts in 100 % of its 40 calls a step, in 20 steps"
    ]


@pytest.mark.parametrize(
    ("losses", "outcome", "noise"),
    [
        ([2.0 + 1.5 * (-1) ** n for n in range(25)] + [0.9 + 1.5 * (-1) ** n for n in range(25)], "learns", True),
        ([2.0 + 1.5 * (-1) ** n for n in range(25)] + [1.6 + 1.5 * (-1) ** n for n in range(25)], "stalls", True),
        ([2.0 - 0.03 * n for n in range(50)], "learns", False),
        ([2.0] * 50, "stalls", False),
    ],
)
def test_noise_is_said_as_noise(losses: list[float], outcome: str, noise: bool) -> None:
    found = verdict_on(run_of(losses))

    assert found.outcome == outcome
    if outcome == "stalls":
        assert ("within the noise of" in found.text) == noise


def test_a_fall_to_the_loss_of_a_constant_answer_is_said() -> None:
    steps = [
        step_of(
            n,
            {f"norm@error:{layer}": 10.0 ** (layer - 8) for layer in range(9)} | {"loss@run": 1.4 - 0.01 * min(n, 40)},
        )
        for n in range(50)
    ]
    found, other = (verdict_on(steps, Evidence(constant_loss=constant)) for constant in (1.0, 1.2))

    assert [cause.kind for cause in found.causes] == ["vanishing"]
    assert found.text.startswith("It learns no more than the best constant answer, whose loss is 1: loss 1.38 -> 1")
    assert (other.outcome, other.kind) == ("learns", "vanishing")
    assert other.text.startswith("It learns: loss ")


def test_errors_that_are_zero_on_purpose_are_no_fault_where_a_run_learns() -> None:
    steps = [
        step_of(n, {f"norm@error:{layer}": float(layer < 3) for layer in range(6)} | {"loss@run": 2.0 - 0.03 * n})
        for n in range(50)
    ]
    assert verdict_on(steps).kind == "healthy"
