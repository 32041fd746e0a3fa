"""Findings on a training run: faults, origins and remedies."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import median

from gradrewrite._utils.grouping import grouped
from gradrewrite.diagnostics.causes import KINDS, Cause, Kind, words
from gradrewrite.diagnostics.clipping import MIN_CLIP_STEPS
from gradrewrite.diagnostics.comparison import loss_of
from gradrewrite.diagnostics.growth import growth_over_layers, growth_over_steps, measured_over_steps
from gradrewrite.diagnostics.loss_conflicts import cosines_of
from gradrewrite.diagnostics.nonfinite_steps import bad_steps, count_of, harmful_steps, has_counts, skips_updates
from gradrewrite.diagnostics.run_log import (
    LISTED,
    MIN_STEPS,
    Run,
    Series,
    Step,
    last_run,
    listed,
    listed_values,
)
from gradrewrite.diagnostics.site_health import SiteHealth, clips_always, sites_of, steps_of_clips
from gradrewrite.diagnostics.updates import update_in

_DROPPED = (
    " All recorded gradients, and the loss after it, are finite: something on the way back drops these values (a mask, "
    "padding_idx)."
)

Limits = Mapping[tuple[str, str], float]  # of a share, by record and kind of site

LAST_STEPS = 20  # how units behave now, not at the start
SATURATED = 0.5  # a fresh tanh or sigmoid layer saturates at a few percent
DEAD = 0.95  # a ReLU at rest is zero at about one half
DEAD_ERROR = 0.999  # a model that reads one token of many leaves the errors of all others at exactly 0
IMPRECISE = 0.05  # of a stored tensor; int8 rows of activations have errors of 0.005 to 0.02
SATURATED_LIMITS = {("saturated", "activation"): SATURATED}
DEAD_LIMITS = {("zeros", "activation"): DEAD, ("zeros", "error"): DEAD_ERROR}
IMPRECISE_LIMITS = {("stored_error", "saved"): IMPRECISE}


@dataclass(frozen=True, slots=True)
class SkippedRule:
    """A rule with too few steps for some records."""

    kind: str  # kind of finding that it would have
    needed: int  # how many steps it needs
    steps: int  # in how many steps these sites were recorded, at most; steps that say nothing are not counted
    sites: tuple[str, ...]  # sites that it did not judge, in the order of the records

    def __str__(self) -> str:
        return f"{self.kind}: needs {self.needed} steps, at most {self.steps} were recorded at {listed(self.sites)}"

    def to_json(self) -> dict[str, object]:
        """As a finding of the kind ``"not judged"``."""
        figures = {"needed": self.needed, "steps": self.steps, "sites": len(self.sites)}
        advice = f"Record at least {self.needed} steps."
        return Cause("not judged", "", text=f"{self}.", advice=advice, figures=figures).to_json()


def diagnose(steps: Sequence[Step]) -> tuple[Cause, ...]:
    """Return the findings on a run, the gravest first.

    Each clip and each site that grows has a finding of its own, the worst of a kind first.

    Where the number of the step falls back, a new run begins: the last run is looked at. Trends need 5 steps, clips
    20. An input or an activation that was infinite in 5 steps whose backward was finite (a mask) is expected to be
    so; so is such an input with NaN. NaN beside a count of 0 or a norm of 0 is an empty tensor.
    """
    run = last_run(steps)
    return findings_on(run, sites_of(run))


def findings_on(run: Run, sites: Sequence[SiteHealth]) -> tuple[Cause, ...]:
    """Return the findings, with bounds as of the sites."""
    rules = (_non_finite, growth_over_steps, growth_over_layers, saturated, dead, imprecise)
    return (*(finding for rule in rules for finding in rule(run)), *clips_always(sites))


def skipped_rules(steps: Sequence[Step]) -> tuple[SkippedRule, ...]:
    """Return the rules with too few steps for some records."""
    run = last_run(steps)
    judged = {
        "exploding": (MIN_STEPS, _longest(measured_over_steps(run))),
        "saturated": (MIN_STEPS, _longest(shares_of(run, SATURATED_LIMITS))),
        "dead": (MIN_STEPS, _longest(shares_of(run, DEAD_LIMITS))),
        "stored error": (MIN_STEPS, _longest(shares_of(run, IMPRECISE_LIMITS))),
        "conflicting losses": (MIN_STEPS, _longest(cosines_of(run))),
        "clip acts always": (MIN_CLIP_STEPS, steps_of_clips(sites_of(run))),
    }
    found = []
    for kind, (needed, steps_at) in judged.items():
        few = {site: number for site, number in steps_at.items() if number < needed}
        if few:
            found.append(SkippedRule(kind, needed, max(few.values()), tuple(few)))
    return tuple(found)


def sentences(findings: Sequence[Cause], rule_of: Mapping[str, str]) -> list[str]:
    """Return a line for each kind of findings.

    Findings on clips have one for each rule; rules are by the keys of findings.
    """
    groups = grouped(((one.kind, rule_of.get(one.key, ""), *list(one.figures)[:1]), one) for one in findings)
    found = []
    for first, *rest in groups.values():
        also = f" So also at {listed([*dict.fromkeys(one.site for one in rest)])}." if rest else ""
        found.append(f"{first.kind}: {first.text} {first.advice}{also}")  # the rules are in the policy of all causes
    return found


def _non_finite(run: Run) -> list[Cause]:
    update = update_in(run)
    if update is not None:
        rate = _faulty_rate(run, update.figures, until=update.step)
        return [update if rate is None else rate]
    bad = bad_steps(run)
    if not bad:
        faulty = _faulty_rate(run, {}, until=math.inf) or _non_finite_loss(run)
        return [] if faulty is None else [faulty]
    first = bad[0]
    site, step = first.sites[0], first.step.step
    count = count_of(first.step.records, site)
    extent = {"bad_sites": len(first.sites), "bad_steps": len(bad), "steps": len(run.steps)}
    figures = {"step": step} | ({} if count is None else {"count": count}) | extent
    dropped = not harmful_steps(run)
    kind, cause, suggestion = _cause(run, site, recovered=bad[-1].step is not run.steps[-1], dropped=dropped)
    rate = _faulty_rate(run, figures, until=step) if kind != "faulty input" else None
    if rate is not None:
        return [rate]
    elements = "" if count is None else f" ({count:.0f} elements)"
    times = f"steps: {len(bad)} of {len(run.steps)}"
    if run.has_micro_batches:
        times = f"updates: {len({run.update(one.step.step) for one in bad})} of {run.num_updates}"
    text = (
        f"{cause} {site}{elements}, in {run.place(step)}; sites of that step that are not finite: {len(first.sites)}; "
        f"{times}.{_DROPPED if dropped else ''}"
    )
    return [Cause(kind, site, step=step, text=text, advice=suggestion, figures=figures)]


def _cause(run: Run, site: str, *, recovered: bool, dropped: bool) -> tuple[Kind, str, str]:
    if site.startswith("data:"):
        return "faulty input", "An input of the model is not finite:", KINDS["faulty input"].advice
    if site.startswith("outside:"):
        text = "The forward is finite and the gradient that comes in from the loss is not:"
        return "faulty loss", text, KINDS["faulty loss"].advice
    checked = ("error:*/*" if "/" in site else "error:*") if dropped else "gradient:*"
    advice = f'Use gr.on("{checked}", CheckFinite()): a failed step is replayed; its error names the op and its line.'
    if has_counts(run) and not dropped:
        advice = (
            "Right after such a step model.monitor.failure(anywhere=True) replays it, and names the op and its line."
        )
    if site.startswith("output:"):
        return "non-finite", "The forward was not looked at, and what it returns is not finite:", advice
    if recovered and not dropped:
        advice = (
            "The last step is finite again: such updates are skipped already."
            if skips_updates(run)
            else "The last step is finite again: a GradScaler skips such updates, and so does "
            'gr.on("gradient:*", CheckFinite("skip")) with gr.guard(optimizer, model).'
        )
    return "non-finite", "The first value that is not finite is at", advice


def _non_finite_loss(run: Run) -> Cause | None:
    """Return the finding on a non-finite loss."""
    loss = loss_of(run)
    if loss is None or loss.bad_step < 0:
        return None
    end = "not finite" if not math.isfinite(loss.last) else f"finite again: {words(loss.last)}{loss.of('last')}"
    text = (
        f"The loss ({loss.address}) is not finite, first in {loss.bad_place}; no other recorded value shows it. At "
        f"the end it is {end}."
    )
    advice = "In the loss, look at log, sqrt and divisions by zero or by an empty mask."
    if not has_counts(run):
        checks = 'gr.on("gradient:*", CheckFinite()) names the op and its line.'
        advice = f"Record the backward of that step: {checks} {advice}"
    figures = {"step": loss.bad_step, "last": loss.last}
    return Cause("non-finite", "", step=loss.bad_step, text=text, advice=advice, figures=figures)


def _faulty_rate(run: Run, figures: Mapping[str, float], *, until: float) -> Cause | None:
    """Return the finding on a negative or non-finite learning rate."""
    rates = [(*row, one.at.site) for one in run.select(("lr",), ("optimizer",)) for row in one.by_step.items()]
    faulty = [row for row in rates if row[0] <= until and not 0 <= row[1] < math.inf]
    if not faulty:
        return None
    step, rate, site = min(faulty, key=lambda row: row[0])
    after = f", and {run.place(int(figures['step']))} is the first that is not finite" if figures else ""
    text = f"The learning rate of {site} is {words(rate)} in {run.place(step)}{after}."
    known = {"learning_rate": rate, "learning_rate_step": step}
    known |= {("first_bad_step" if name == "step" else name): value for name, value in figures.items()}
    return _of_kind("faulty learning rate", site, step, text, known)


def _longest(series: Sequence[Series]) -> dict[str, int]:
    found: dict[str, int] = {}
    for one in series:
        found[one.at.site] = max(len(one.steps), found.get(one.at.site, 0))
    return found


def saturated(run: Run) -> list[Cause]:
    """Return a finding for units at their bounds."""
    what = "Units sit at the bounds of their tanh or sigmoid"
    return _high_shares(run, SATURATED_LIMITS, "saturated", what)


def dead(run: Run, limits: Limits = DEAD_LIMITS) -> list[Cause]:
    """Return a finding for zeros; limits by record and kind."""
    return _high_shares(run, limits, "dead", "Almost all elements are exactly 0")


def imprecise(run: Run) -> list[Cause]:
    """Return a finding for stored tensors with large errors."""
    what = f"Stored tensors have a relative error above {IMPRECISE:.0%} (in bfloat16 about 0.2%)"
    return _high_shares(run, IMPRECISE_LIMITS, "stored error", what)


def shares_of(run: Run, limits: Limits) -> list[Series]:
    """Return the records with a limit."""
    return [one for one in run.series.values() if (one.record, one.at.kind) in limits]


def _high_shares(run: Run, limits: Limits, kind: Kind, what: str) -> list[Cause]:
    """Return a finding for high median shares in the end."""
    found: dict[str, tuple[float, int, int]] = {}  # share, first step, number of steps
    for one in shares_of(run, limits):
        limit = limits[one.record, one.at.kind]
        rows = [(step, v) for step, v in one.by_step.items() if math.isfinite(v)]
        late = [v for _, v in rows[-LAST_STEPS:]]
        if len(late) < MIN_STEPS or median(late) <= limit:
            continue
        below = max((n for n, (_, v) in enumerate(rows) if v <= limit), default=-1)
        since = rows[min(below + 1, len(rows) - 1)][0]
        found.setdefault(one.at.site, (median(late), since, len(late)))
    if not found:
        return []
    shares = sorted(((site, share) for site, (share, *_) in found.items()), key=lambda row: -row[1])
    worst, share = shares[0]
    _, step, steps = found[worst]
    text = f"{what}, as the median over the last {steps} steps: {listed_values(shares)}."
    figures = {"share": share, "steps": steps, "sites": len(found)}
    figures |= {f"share@{site}": value for site, value in shares[1:LISTED]}
    return [_of_kind(kind, worst, step, text, figures)]


def _of_kind(kind: Kind, site: str, step: int, text: str, figures: Mapping[str, float]) -> Cause:
    return Cause(kind, site, step=step, text=text, advice=KINDS[kind].advice, figures=figures)
