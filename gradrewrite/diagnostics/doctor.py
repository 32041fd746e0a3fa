"""Findings from the records of a training run: faults, origins and remedies."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from gradrewrite.diagnostics.activations import DEAD_LIMITS, SATURATED_LIMITS, dead, saturated
from gradrewrite.diagnostics.clipping import MIN_CLIP_STEPS, clips_always, clips_never, steps_of_clips
from gradrewrite.diagnostics.growth import growth_over_layers, growth_over_steps, measured_over_steps
from gradrewrite.diagnostics.nonfinite_steps import bad_steps
from gradrewrite.diagnostics.run_log import LISTED, MIN_STEPS, Finding, Run, Series, Step, last_run, words


@dataclass(frozen=True, slots=True)
class SkippedRule:
    """A rule with too few steps to judge all its records."""

    kind: str  # kind of finding that it would have
    needed: int  # how many steps it needs
    steps: int  # in how many steps these sites were recorded, at most; steps that say nothing are not counted
    sites: tuple[str, ...]  # sites that it did not judge, in the order of the records

    def __str__(self) -> str:
        more = f" and {len(self.sites) - LISTED} more" if len(self.sites) > LISTED else ""
        sites = ", ".join(self.sites[:LISTED])
        return f"{self.kind}: needs {self.needed} steps, at most {self.steps} were recorded at {sites}{more}"

    def to_json(self) -> dict[str, object]:
        """With the keys of ``Finding.to_json``; the kind is ``"not judged"``."""
        return {
            "kind": "not judged",
            "site": "",
            "step": -1,
            "text": f"{self}.",
            "figures": {"needed": self.needed, "steps": self.steps, "sites": len(self.sites)},
            "suggestion": f"Record at least {self.needed} steps.",
        }


def diagnose(steps: Sequence[Step]) -> tuple[Finding, ...]:
    """Return the findings on a run, the gravest first; ``()`` if none.

    Each clip and each site that grows has a finding of its own, the worst of a kind first.

    Where the number of the step falls back, a new run begins: the last run is looked at. Trends need 5 steps, clips
    20. An input or an activation that was infinite in 5 steps whose backward was finite (a mask) is expected to be
    so; so is such an input with NaN. NaN beside a count of 0 or a norm of 0 is an empty tensor.
    """
    run = last_run(steps)
    return tuple(finding for rule in _RULES for finding in rule.find(run))


def skipped_rules(steps: Sequence[Step]) -> tuple[SkippedRule, ...]:
    """Return the rules with too few steps for some of their records."""
    run = last_run(steps)
    found = []
    for rule in _RULES:
        few = {site: number for site, number in rule.judged(run).items() if number < rule.needed}
        if few:
            found.append(SkippedRule(rule.kind, rule.needed, max(few.values()), tuple(few)))
    return tuple(found)


def report(findings: Sequence[Finding], steps: Sequence[Step] | None = None) -> str:
    """Return text for a terminal: a paragraph for the first finding of a kind, a line for each further one.

    Steps say how much was looked at, and which rules had too few of them.
    """
    kinds: dict[tuple[str, tuple[str, ...]], list[Finding]] = defaultdict(list)
    for finding in findings:
        kinds[finding.kind, tuple(finding.figures)[:1]].append(finding)
    parts = [_paragraph(alike) for alike in kinds.values()]
    if steps is None:
        return "\n\n".join(parts) or "nothing wrong was found"
    run = last_run(steps)
    parts = parts or [
        f"nothing wrong was found in {len(run.steps)} steps; each has up to {len(run.series)} recorded values"
    ]
    skipped = skipped_rules(steps)
    if skipped:
        parts.append("\n".join(["not judged, for too few steps:", *(f"  {rule}" for rule in skipped)]))
    return "\n\n".join(parts)


def _paragraph(findings: Sequence[Finding]) -> str:
    """The first finding of a kind in full, and its further sites with their figures."""
    first, *rest = findings
    lines = [f"{first.kind}: {first.text}", f"  figures: {_figures(first)}", f"  suggestion: {first.suggestion}"]
    lines += [f"  also {finding.site}: {_figures(finding)}" for finding in rest[:LISTED]]
    lines += [f"  and {len(rest) - LISTED} more"] if len(rest) > LISTED else []
    return "\n".join(lines)


def _figures(finding: Finding) -> str:
    return ", ".join(f"{name} = {words(value)}" for name, value in finding.figures.items())


def _non_finite(run: Run) -> list[Finding]:
    bad = bad_steps(run)
    if not bad:
        faulty = _faulty_rate(run, {}, until=math.inf)
        return [] if faulty is None else [faulty]
    first = bad[0]
    site, step = first.sites[0], first.step.step
    count = _count(first.step.records, site)
    extent = {"bad_sites": len(first.sites), "bad_steps": len(bad), "steps": len(run.steps)}
    figures = {"step": step} | ({} if count is None else {"count": count}) | extent
    kind, cause, suggestion = _cause(site, recovered=bad[-1].step is not run.steps[-1])
    rate = _faulty_rate(run, figures, until=step) if kind != "faulty input" else None
    if rate is not None:
        return [rate]
    elements = "" if count is None else f" ({count:.0f} elements)"
    text = (
        f"{cause} {site}{elements}, in step {step}; {len(first.sites)} sites of that step and {len(bad)} of "
        f"{len(run.steps)} steps are not finite."
    )
    return [Finding(kind, site, step, text, figures, suggestion)]


def _count(records: Mapping[str, float], site: str) -> float | None:
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


@dataclass(frozen=True, slots=True)
class _Rule:
    kind: str  # kind of its findings
    find: Callable[[Run], Sequence[Finding]]  # returns them
    needed: int = 1  # how many steps it needs
    # Returns for each site that it judges in how many steps it was recorded.
    judged: Callable[[Run], Mapping[str, int]] = lambda _: {}


def _longest(series: Sequence[Series]) -> dict[str, int]:
    found: dict[str, int] = {}
    for one in series:
        found[one.at.site] = max(len(one.steps), found.get(one.at.site, 0))
    return found


def _with_shares(limits: Mapping[tuple[str, str], float]) -> Callable[[Run], Mapping[str, int]]:
    return lambda run: _longest([one for one in run.series.values() if (one.record, one.at.kind) in limits])


_RULES = (
    _Rule("non-finite", _non_finite),
    _Rule("exploding", growth_over_steps, MIN_STEPS, lambda run: _longest(measured_over_steps(run))),
    _Rule("exploding", growth_over_layers),
    _Rule("saturated", saturated, MIN_STEPS, _with_shares(SATURATED_LIMITS)),
    _Rule("dead", dead, MIN_STEPS, _with_shares(DEAD_LIMITS)),
    _Rule("clip acts always", clips_always, MIN_CLIP_STEPS, steps_of_clips),
    _Rule("clip never acts", clips_never, MIN_CLIP_STEPS, lambda run: steps_of_clips(run, by_norm=True)),
)
