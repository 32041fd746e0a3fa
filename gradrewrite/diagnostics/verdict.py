"""The verdict on a run, with figures and remedies."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

from gradrewrite.diagnostics.causes import Cause, Kind, Outcome, traits_of, words
from gradrewrite.diagnostics.clipping import MIN_CLIP_STEPS
from gradrewrite.diagnostics.comparison import Loss
from gradrewrite.diagnostics.judge import Evidence, Judge
from gradrewrite.diagnostics.nonfinite_steps import bad_steps, has_counts
from gradrewrite.diagnostics.run_log import Run, is_group
from gradrewrite.diagnostics.site_health import SiteHealth, percent
from gradrewrite.diagnostics.skipped_updates import skipped_updates, skips_text

_SHOW_LAYERS = '; gr.on("error:*", Observe("norm")) shows the layers'
_ADVICE_OF_SKIPS = (
    "Nothing has to be changed as long as few updates are skipped; monitor.culprits() names the rank, the rows and the "
    "layers behind the next one."
)
_ADVICE_UNTRAINED = "Give optimizer= to judge whether it learns."
_LATER = "Judge its bound when the fault above is mended."


@dataclass(frozen=True, slots=True)
class Verdict:
    """The answer to "is the backward pass healthy?"."""

    # ``"healthy"``, ``"too short"`` or ``"no records"``, or the kind of the first fault: of a cause or a finding, or
    # ``"clip sets the values"`` (between bounds that are not known), or ``"stalls"`` or ``"diverges"`` without a cause.
    kind: Kind
    site: str  # where it is worst; ``""`` if nowhere
    text: str  # one sentence with its figures
    advice: str  # what to change
    code: tuple[str, ...] = ()  # lines of code that do it; empty if none
    outcome: Outcome = "unknown"
    causes: tuple[Cause, ...] = ()
    remarks: tuple[str, ...] = ()  # sentences on what is no fault

    @property
    def headline(self) -> str:
        """Two or three words."""
        return traits_of(self.kind).headline or self.kind.capitalize()

    @property
    def is_sound(self) -> bool:
        """Whether nothing is wrong."""
        return traits_of(self.kind).gravity == "sound"


def judge(
    run: Run,
    sites: Sequence[SiteHealth],
    findings: Sequence[Cause],
    loss: Loss | None,
    baseline: Loss | None = None,
    evidence: Evidence | None = None,
) -> tuple[Verdict, tuple[Cause, ...]]:
    """Return the verdict on a run, and its faults.

    Of a run that learns, and ends no higher than its baseline, nothing is a fault but a bad batch or a spike: what the
    doctor found is in the remarks. The faults are a faulty input or learning rate, then the causes, then the
    other findings; the first is the verdict.
    """
    evidence = evidence or Evidence()
    ends = (loss, baseline) if loss is not None and baseline is not None else None
    judged = Judge(run, findings, sites, evidence, is_higher=ends is not None and _ends_higher(*ends))
    causes = judged.causes()
    is_told_first = judged.outcome not in ("non-finite", "diverges")  # a parameter that is not trained makes neither
    causes = (*evidence.audited, *causes) if is_told_first else (*causes, *evidence.audited)
    failure = judged.failure if judged.outcome == "non-finite" else None
    is_replayed = failure is not None and bool(failure.source or failure.is_explained)
    faulty = [] if judged.learns else [one for one in findings if traits_of(one.kind).gravity == "first"]
    faulty = [one for one in faulty if not (is_replayed and one.kind != "faulty learning rate")]
    is_op_told = failure is not None and not faulty
    told = [
        one for one in causes if traits_of(one.kind).told_as is None or (is_op_told and one.kind == "non-finite op")
    ]
    rest = [one for one in findings if one not in faulty and not any(_is_told(one, cause) for cause in told)]
    rest = [one for one in rest if not (is_replayed and traits_of(one.kind).is_non_finite)]
    rest = [] if judged.learns else [one for one in rest if one.site or not told]  # a loss: the outcome tells of it
    faults = [*faulty, *(_with_figures(cause, findings) for cause in told), *rest]
    is_short = len(run.steps) < MIN_CLIP_STEPS
    if not faults and (judged.outcome == "diverges" or (judged.outcome == "stalls" and not is_short)):
        faults = [_unexplained(run, judged)]
    if not faults:
        verdict = _healthy(run, sites, loss, is_trained=judged.outcome != "untrained")
    else:
        alone = ends is not None and math.isfinite(ends[0].last) and not math.isfinite(ends[1].last)
        faults = _of_clips(faults, sites, is_needed=alone)
        first = faults[0]
        text, code = first.text, list(first.rules)
        if told and not faulty:
            text = text if judged.outcome == "unknown" else f"{judged.text} {text}"
            code = list(dict.fromkeys(rule for cause in told for rule in cause.rules))
        verdict = Verdict(first.kind, first.site, text, first.advice, tuple(code))
    remarks = (*evidence.remarks, *(judged.remarks() if judged.learns else ()))
    return replace(verdict, outcome=judged.outcome, causes=causes, remarks=remarks), tuple(faults)


def _unexplained(run: Run, judged: Judge) -> Cause:
    """Return the fault of a run without a known cause."""
    shown = any(one.record == "norm" and one.at.kind == "error" for one in run.series.values())
    advice = f"Look at data, loss and learning rate{'' if shown else _SHOW_LAYERS}."
    return Cause(judged.outcome, "", text=f"{judged.text} Nothing that was recorded tells why.", advice=advice)


def _with_figures(cause: Cause, findings: Sequence[Cause]) -> Cause:
    """Return a cause with its figures, or those of the finding that tells the same."""
    if cause.figures:
        return cause
    figures = {} if math.isnan(cause.factor) else {"factor": cause.factor}
    return replace(cause, figures=next((one.figures for one in findings if _is_told(one, cause)), figures))


def _is_told(finding: Cause, cause: Cause) -> bool:
    """Whether a finding repeats a cause."""
    if finding.kind != (traits_of(cause.kind).told_as or cause.kind):
        return False
    return finding.site == cause.site or (
        traits_of(finding.kind).is_told_once and "growth_per_step" not in finding.figures
    )


def _of_clips(faults: Sequence[Cause], sites: Sequence[SiteHealth], *, is_needed: bool) -> list[Cause]:
    """Return faults with one advice for all clips.

    Behind a graver fault no bound is judged. Else the worst clip comes first, with the rules of all: of those with a
    known bound, or of none. ``is_needed``: the loss of the baseline, without them, became NaN or infinite.
    """
    first, clips = faults[0], [one for one in faults if one.kind == "clip acts always"]
    if first.kind != "clip acts always":
        said = [one for one in clips if one.site == first.site or f" at {one.site} acts after that" in first.text]
        rest = [one for one in faults if one not in said]
        return [replace(one, advice=_LATER, rules=()) if one in clips else one for one in rest]
    low = [one for one in clips if "bound" in one.figures]
    if not low:
        return [replace(first, kind="clip sets the values"), *faults[1:]]
    worst = min(low, key=lambda one: one.figures.get("median_factor", 1.0))
    group = next((one for one in low if is_group(one.site) and one is not worst), None)
    keys, number = {one.key for one in low}, sum(bool(row.action) for row in sites)
    text = (
        f"The bound is too low at {len(low)} of {number} clipped sites, and sets the size of the gradients. "
        f"{worst.text}{'' if group is None else f' {group.text}'}"
    )
    caution = " Raise it little by little: without it, in the baseline, the loss became NaN or infinite."
    advice = f"{worst.advice}{' Raise the others likewise.' * (len(low) > 1)}{caution * is_needed}"
    code = tuple(row.code for row in sites if row.key in keys and row.code)
    lead = replace(worst, text=text, advice=advice, rules=code)
    return [lead, *(one for one in faults if one is not worst)]


def _ends_higher(loss: Loss, baseline: Loss) -> bool:
    """Whether a run ends higher than its baseline, beyond noise."""
    is_alike = loss.last - baseline.last <= 2 * math.hypot(loss.noise, baseline.noise)
    return math.isfinite(baseline.last) and not is_alike


def _healthy(run: Run, sites: Sequence[SiteHealth], loss: Loss | None, *, is_trained: bool) -> Verdict:
    if not any(row.measure for row in sites):
        counted = "; what was counted is finite" if has_counts(run) else ""
        text = f"In {run.length} no norm and no clip was recorded{counted}."
        return Verdict("no records", "", text, 'Record norms: gr.on("gradient:*", Observe("norm")).')
    clips, skips, bad = [row for row in sites if row.action], skipped_updates(run), bad_steps(run)
    what = "exploded or vanished" if skips or bad else "exploded, vanished or was not finite"
    parts = [f"in {run.length} no gradient {what}"]
    if skips:
        were = "was" if len(skips) == 1 else "were"
        parts.append(f"{len(skips)} of {run.num_updates} updates {were} skipped, {skips_text(skips)}")
    elif bad:
        parts.append(f"not everything was finite, first in {run.place(bad[0].step.step)} at {bad[0].sites[0]}")
    if clips:
        most = max(clips, key=lambda row: row.rate)
        factor = f" (median factor x {words(most.median_factor)})" if most.median_factor >= 0 else ""
        often = f"clips acted most often at {most.site}, in {percent(most.rate)} of {most.occasions}{factor}"
        parts.append(often if most.rate > 0 else "no clip ever acted")
    if not is_trained:
        parts.append("nothing was trained (optimizer= was not given), so that learning is not judged")
    elif loss is not None:
        parts.append(f"the loss went from {words(loss.first)} to {words(loss.last)}{loss.of('first and last')}")
    if len(run.steps) >= MIN_CLIP_STEPS:
        advice = _ADVICE_OF_SKIPS if skips else "Nothing has to be changed." if is_trained else _ADVICE_UNTRAINED
        return Verdict("healthy", "", f"Healthy: {'; '.join(parts)}.", advice)
    advice = f"Wait: bounds of clips, and a loss that does not fall, are judged after {MIN_CLIP_STEPS} steps."
    return Verdict("too short", "", f"Nothing wrong so far: {'; '.join(parts)}.", advice)
