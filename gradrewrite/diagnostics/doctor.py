"""Plain answers from the records of a training run: what is wrong, where it begins, and what to try."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

from gradrewrite.diagnostics.activations import dead, saturated
from gradrewrite.diagnostics.clipping import clips_always, clips_never
from gradrewrite.diagnostics.growth import growth_over_layers, growth_over_steps
from gradrewrite.diagnostics.nonfinite_steps import BadStep, bad_steps, expected_infinities
from gradrewrite.diagnostics.run_log import Finding, Run, Step, last_run, words


def diagnose(steps: Sequence[Step]) -> tuple[Finding, ...]:
    """Return what is wrong with a run, the gravest first; ``()`` if nothing is found.

    Where the number of the step falls back, a new run begins: the last run is looked at. Trends need 5 steps, clips
    20. An input or an activation that was infinite in 5 steps whose backward was finite (a mask) is expected to be
    so; so is such an input with NaN. NaN beside a count of 0 or a norm of 0 is an empty tensor.

    Args:
        steps: The steps of a run, oldest first.
    """
    run = last_run(steps)
    found = [rule(run) for rule in _RULES]
    return tuple(finding for finding in found if finding is not None)


def report(findings: Sequence[Finding], steps: Sequence[Step] | None = None) -> str:
    """Plain text for a terminal: a paragraph a finding, or one line if there is none.

    Args:
        findings: What ``diagnose`` returned.
        steps: What it was given, to say how much was looked at.
    """
    if findings:
        return "\n\n".join(_paragraph(finding) for finding in findings)
    if steps is None:
        return "nothing wrong was found"
    run = last_run(steps)
    return f"nothing wrong was found in {len(run.steps)} steps, {len(run.series)} records"


def _paragraph(finding: Finding) -> str:
    figures = ", ".join(f"{name} = {words(value)}" for name, value in finding.figures.items())
    return f"{finding.kind}: {finding.text}\n  figures: {figures}\n  suggestion: {finding.suggestion}"


def _non_finite(run: Run) -> Finding | None:
    bad = _bad_steps(run)
    if not bad:
        return _faulty_rate(run, {}, until=math.inf)
    first = bad[0]
    site, step = first.sites[0], first.step.step
    count = _count(first.step.records, site)
    extent = {"bad_sites": len(first.sites), "bad_steps": len(bad), "steps": len(run.steps)}
    figures = {"step": step} | ({} if count is None else {"count": count}) | extent
    kind, cause, suggestion = _cause(site, recovered=bad[-1].step is not run.steps[-1])
    rate = _faulty_rate(run, figures, until=step) if kind != "faulty input" else None
    if rate is not None:
        return rate
    elements = "" if count is None else f" ({count:.0f} elements)"
    text = (
        f"{cause} {site}{elements}, in step {step}; {len(first.sites)} sites of that step and {len(bad)} of "
        f"{len(run.steps)} steps are not finite."
    )
    return Finding(kind, site, step, text, figures, suggestion)


def _bad_steps(run: Run) -> list[BadStep]:
    """Steps that are not finite, without the sites where infinities are expected."""
    bad = bad_steps(run)
    expected = expected_infinities(run, bad)
    return [BadStep(one.step, rest) for one in bad if (rest := [site for site in one.sites if site not in expected])]


def _count(records: Mapping[str, float], site: str) -> float | None:
    """Return the number of non-finite elements of a site; None if that was not recorded."""
    if f"nonfinite@{site}" in records:
        return records[f"nonfinite@{site}"]
    counts = [records[address] for name in ("nan", "inf") if (address := f"{name}@{site}") in records]
    return sum(counts) if counts else None


def _cause(site: str, *, recovered: bool) -> tuple[str, str, str]:
    if site.startswith("data:"):
        advice = "Look at the batch of that step, and filter such examples before they reach the model."
        return "faulty input", "An input of the model is not finite:", advice
    if site.startswith("outside:"):
        advice = "Look at the loss function: log, sqrt, a division by zero or by an empty mask; clamp its argument."
        return "faulty loss", "The forward is finite and the gradient that comes in from the loss is not:", advice
    advice = (
        'Use gr.on("gradient:*", CheckFinite()): a failed step is replayed, and the error names the op and its line.'
    )
    if site.startswith("output:"):
        return "non-finite", "The forward was not looked at, and what it returns is not finite:", advice
    if recovered:
        advice = "The last step is finite again: with a GradScaler such steps are skipped; otherwise clip by norm."
    return "non-finite", "The first value that is not finite is at", advice


def _faulty_rate(run: Run, figures: Mapping[str, float], *, until: float) -> Finding | None:
    """A learning rate that is not finite or negative, up to a step; ``figures`` are those of the step that is not."""
    rates = [one for one in run.series.values() if one.record == "lr" and one.at.kind == "optimizer"]
    faulty = [
        (step, one.at.site, rate)
        for one in rates
        for step, rate in zip(one.steps, one.values, strict=True)
        if step <= until and not 0 <= rate < math.inf
    ]
    if not faulty:
        return None
    step, site, rate = min(faulty, key=lambda row: row[0])
    after = f", and step {figures['step']} is the first that is not finite" if figures else ""
    text = f"The learning rate of {site} is {words(rate)} in step {step}{after}."
    known = {"learning_rate": rate, "learning_rate_step": step}
    known |= {("first_bad_step" if name == "step" else name): value for name, value in figures.items()}
    advice = "Look at the schedule at that step: a division by zero, or a step beyond its end."
    return Finding("faulty learning rate", site, step, text, known, advice)


_RULES = (_non_finite, growth_over_steps, growth_over_layers, saturated, dead, clips_always, clips_never)
