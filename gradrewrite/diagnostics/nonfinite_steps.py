"""Non-finite steps of a run, without expected infinities."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from gradrewrite.diagnostics.causes import Cause
from gradrewrite.diagnostics.run_log import (
    BACKWARD,
    COUNTS,
    MAGNITUDES,
    MIN_STEPS,
    Run,
    Step,
    as_executed,
    kind_of,
    loss_series,
)


@dataclass(frozen=True, slots=True)
class BadStep:
    """A non-finite step."""

    step: Step
    sites: list[str]  # its non-finite sites, in the order of execution


def bad_steps(run: Run) -> list[BadStep]:
    """Return the non-finite steps, without expected infinities."""
    bad = [BadStep(step, sites) for step in run.steps if (sites := _bad_sites(run, step))]
    expected = _expected_infinities(run, bad)
    rest = [BadStep(one.step, left) for one in bad if (left := [site for site in one.sites if site not in expected])]
    return [one for one in rest if not _is_in_inputs_alone(run, one)]


def harmful_steps(run: Run) -> list[BadStep]:
    """Return the non-finite steps without dropped errors.

    Errors are dropped on the way back (by a mask, by ``padding_idx``) where they alone are not finite, gradients were
    measured, and a later loss is finite; once that was seen, so they are at these sites.
    """
    loss = loss_series(run)
    finite = [] if loss is None else [step for step, value in loss.by_step.items() if math.isfinite(value)]
    last, known, found = max(finite, default=-1), set[str](), []
    for one in bad_steps(run):
        if is_in_errors_alone(run, one) and (one.step.step < last or known.issuperset(one.sites)):
            known.update(one.sites)
        else:
            found.append(one)
    return found


def first_bad_step(run: Run, *, skips: bool = False) -> Step | None:
    """Return the first non-finite step, by records or loss.

    Where such updates are skipped (``skips``, or by the records) it is the first of the last such steps in a row.
    """
    begins = _bad_beginnings(run)
    return None if not begins else begins[-1] if skips or skips_updates(run) else begins[0]


def failure_in(run: Run) -> Cause | None:
    """Return the recorded failure of the first non-finite step, never that of a later one.

    A step that was explained before others were finite has harmed nothing (a loss scale, an error that was caught).
    """
    explained = [step for step in run.steps if step.failure is not None]
    if not explained:
        return None
    begins = _bad_beginnings(run) or explained
    is_over = skips_updates(run) or (begins[0].failure is not None and begins[-1].failure is not None)
    return begins[-1 if is_over else 0].failure


def _bad_beginnings(run: Run) -> list[Step]:
    """Return the non-finite steps behind a finite one, or none."""
    loss, bad = loss_series(run), {one.step.step for one in harmful_steps(run)}
    bad.update(step for step, value in (loss.by_step.items() if loss else ()) if not math.isfinite(value))
    is_bad = [step.step in bad for step in run.steps]
    return [step for step, own, before in zip(run.steps, is_bad, [False, *is_bad], strict=False) if own and not before]


def is_in_errors_alone(run: Run, bad: BadStep) -> bool:
    """Whether errors are not finite, and measured gradients are."""
    found = [run.series[address] for address in bad.step.records]
    kinds = {one.at.kind for one in found if one.record in (*COUNTS, *MAGNITUDES)}
    return bool(kinds & {"gradient", "group", "step"}) and all(kind_of(site) == "error" for site in bad.sites)


def count_of(records: Mapping[str, float], site: str) -> float | None:
    """Return the number of non-finite elements; None if not counted."""
    if f"nonfinite@{site}" in records:
        return records[f"nonfinite@{site}"]
    counts = [records[address] for name in ("nan", "inf") if (address := f"{name}@{site}") in records]
    return sum(counts) if counts else None


def has_counts(run: Run) -> bool:
    """Whether non-finite elements are counted, as by ``CheckFinite``."""
    return bool(run.select(COUNTS, BACKWARD))


def skips_updates(run: Run) -> bool:
    """Whether a guard has skipped an update."""
    return any(one.record == "skipped" and any(value > 0 for value in one.values) for one in run.series.values())


def _expected_infinities(run: Run, bad: Sequence[BadStep]) -> set[str]:
    """Return the sites of infinities in 5 harmless steps."""
    harmless = [(one.step.records, site) for one in bad if _is_harmless(run, one) for site in one.sites]
    times = Counter(site for records, site in harmless if site.startswith("data:") or not _has_nan(records, site))
    return {site for site, number in times.items() if number >= MIN_STEPS}


def is_bad(record: str, site: str, value: float, records: Mapping[str, float]) -> bool:
    """Whether a value shows a site with non-finite elements."""
    if record in COUNTS:
        return value > 0
    is_norm = record in MAGNITUDES or record.startswith("loss_norm_")  # of the gradient of one loss
    if not is_norm or math.isfinite(value):
        return False
    # of an empty tensor the largest value is NaN, and counts and norm are 0; squares of a norm may overflow
    is_counted = records.get(f"nonfinite@{site}") == 0
    is_empty = any(records.get(f"{name}@{site}") == 0 for name in ("nan", "norm"))
    return not (is_counted or (math.isnan(value) and is_empty))


def _bad_sites(run: Run, step: Step) -> list[str]:
    pairs = ((run.series[address], value) for address, value in step.records.items())
    return as_executed(one.at.site for one, value in pairs if is_bad(one.record, one.at.site, value, step.records))


def _is_harmless(run: Run, bad: BadStep) -> bool:
    """Whether the backward was recorded and is finite."""
    found = [run.series[address] for address in bad.step.records]
    is_recorded = any(one.at.kind in BACKWARD and one.record in (*COUNTS, *MAGNITUDES) for one in found)
    return is_recorded and not any(kind_of(site) in BACKWARD for site in bad.sites)


def _is_in_inputs_alone(run: Run, bad: BadStep) -> bool:
    """Whether inputs alone are not finite, as the records tell."""
    loss = loss_series(run)
    is_finite = loss is None or math.isfinite(loss.by_step.get(bad.step.step, 0.0))
    return is_finite and all(site.startswith("data:") for site in bad.sites) and _is_harmless(run, bad)


def _has_nan(records: Mapping[str, float], site: str) -> bool:
    values = (records.get(f"{name}@{site}", 0.0) for name in MAGNITUDES)
    return records.get(f"nan@{site}", 0.0) > 0 or any(math.isnan(v) for v in values)
