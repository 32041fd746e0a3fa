"""The verdict on a run, with figures and remedies."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from statistics import median

from gradrewrite.diagnostics.causes import Cause, Outcome
from gradrewrite.diagnostics.clipping import MIN_CLIP_STEPS
from gradrewrite.diagnostics.comparison import Loss
from gradrewrite.diagnostics.growth import LARGE_JUMP
from gradrewrite.diagnostics.judge import Evidence, judge_run
from gradrewrite.diagnostics.nonfinite_steps import has_counts
from gradrewrite.diagnostics.run_log import Finding, Run, is_group, words
from gradrewrite.diagnostics.site_health import SiteHealth, percent

_SHOW_LAYERS = '; gr.on("error:*", Observe("norm")) shows the layers'
STRONG_CLIP = 0.2  # median factor of a clip that hides such a jump, over that of the clips of other errors
_HEADLINES = {
    "healthy": "Healthy",
    "no records": "Nothing to judge",
    "too short": "Nothing wrong so far",
    "clip acts always": "Clipping bound too low",
    "clip too low": "Clipping bound too low",
    "exploding": "Exploding gradients",
    "one layer": "One layer explodes",
    "vanishing": "Vanishing gradients",
    "stalls": "It does not learn",
    "diverges": "It diverges",
    "non-finite op": "Values are not finite",
    "learning rate": "Learning rate too high",
    "dead": "Dead units",
    "saturated": "Saturated units",
    "non-finite": "Values are not finite",
}
_SOUND = ("healthy", "no records", "too short")
NON_FINITE = ("non-finite", "faulty input", "faulty loss", "faulty learning rate")
_MILD = ("clip acts always", "clip never acts", "saturated", "dead")


@dataclass(frozen=True, slots=True)
class Verdict:
    """The answer to "is the backward pass healthy?"."""

    # ``"healthy"``, ``"too short"``, ``"no records"``, ``"large error"``, ``"clip sets the values"`` (between bounds
    # that are not known), ``"stalls"`` or ``"diverges"`` without a known cause, or the kind of the gravest cause, or of
    # the gravest finding of the doctor where no loss tells the outcome.
    kind: str
    site: str  # where it is worst; ``""`` if nowhere
    text: str  # one sentence with its figures
    advice: str  # what to change
    code: tuple[str, ...] = ()  # lines of code that do it; empty if none
    basis: str = ""  # records that it rests on, where no finding of the doctor names them
    mark: str = "see the verdict"  # a note for the site in the table of all sites
    outcome: Outcome = "unknown"
    causes: tuple[Cause, ...] = ()
    remarks: tuple[str, ...] = ()  # sentences on what is no fault

    @property
    def headline(self) -> str:
        """Two or three words."""
        return _HEADLINES.get(self.kind, self.kind.capitalize())

    @property
    def is_sound(self) -> bool:
        """Whether nothing is wrong."""
        return self.kind in _SOUND


def _hidden_jump(run: Run, sites: Sequence[SiteHealth]) -> Verdict | None:
    """Return the verdict on the largest jump behind a clip.

    The doctor looks for growth over many layers or steps; one layer alone shows in neither, and its clip acts always.
    """
    norms = [
        one for one in run.series.values() if one.record == "norm" and one.at.kind == "error" and one.at.occurrence == 1
    ]
    found = []
    for back, front in pairwise(norms):  # neighbors, in the order of the forward
        known = dict(zip(front.steps, front.values, strict=True))
        ratios = [
            value / known[step]
            for step, value in zip(back.steps, back.values, strict=True)
            if math.isfinite(value) and 0 < known.get(step, 0.0) < math.inf
        ]
        if ratios:
            found.append((median(ratios), back.at.site, front.at.site))
    growth, site, layer = max(found, default=(0.0, "", ""))
    judged = [row for row in sites if row.median_factor >= 0]
    factor = min((row.median_factor for row in judged if row.site == site and row.rate >= 0.5), default=1.0)
    others = [row.median_factor if row.rate >= 0.5 else 1.0 for row in judged if row.site.startswith("error:")]
    if growth < LARGE_JUMP or factor > STRONG_CLIP * median(others or [1.0]):
        return None
    return _of_jump(site, layer, words(growth), words(median(ratio for ratio, *_ in found)), len(run.steps), factor)


def _is_chain(back: str, front: str) -> bool:
    """Whether two sites are neighbors in one list of layers."""  # others may be parallel branches
    (parent, _, number), (other, _, following) = (site.partition(":")[2].rpartition(".") for site in (back, front))
    both = number.isdecimal() and following.isdecimal()
    return parent == other and both and int(following) == int(number) + 1


def judge(
    run: Run,
    sites: Sequence[SiteHealth],
    findings: Sequence[Finding],
    loss: Loss | None,
    baseline: Loss | None = None,
    evidence: Evidence | None = None,
) -> Verdict:
    """Return the verdict on a run: outcome, cause, clips.

    Of a run that learns, and ends no higher than its baseline, nothing is a fault but a bad batch or a spike: what the
    doctor found is in the remarks.
    """
    judged = judge_run(run, evidence)
    remarks = judged.remarks
    first = judged.causes[0] if judged.causes else None
    jump = _hidden_jump(run, sites)
    learns = judged.outcome == "learns" and not _ends_higher(loss, baseline)
    if learns:
        remarks += () if loss is None or loss.bad_step < 0 else (_of_loss(run, loss).text,)
        remarks += () if jump is None else (jump.text,)
        remarks += tuple(one.text for one in findings if one.kind not in ("clip acts always", "clip never acts"))
    if first is not None and (learns or not _says_more(first, findings, jump, evidence)):
        verdict = Verdict(first.kind, first.site, judged.text, first.advice, judged.rules)
    elif learns:
        verdict = _healthy(run, sites, loss)
    else:
        verdict = _of_findings(run, sites, findings, jump, loss, baseline)
        if verdict.is_sound and judged.outcome in ("stalls", "diverges"):
            text = f"{judged.text} Nothing that was recorded tells why."
            shown = any(one.record == "norm" and one.at.kind == "error" for one in run.series.values())
            advice = f"Look at data, loss and learning rate{'' if shown else _SHOW_LAYERS}."
            verdict = Verdict(judged.outcome, "", text, advice)
    return replace(verdict, outcome=judged.outcome, causes=judged.causes, remarks=remarks)


def _ends_higher(loss: Loss | None, baseline: Loss | None) -> bool:
    """Whether a run ends higher than its baseline, beyond noise."""
    if loss is None or baseline is None or not math.isfinite(baseline.last):
        return False
    return not loss.last - baseline.last <= 2 * math.hypot(loss.noise, baseline.noise)


def _says_more(cause: Cause, findings: Sequence[Finding], jump: Verdict | None, evidence: Evidence | None) -> bool:
    """Whether a finding says more than a cause."""
    if cause.kind == "spike":
        return any(one.kind not in _MILD for one in findings)
    if any(one.kind in ("faulty input", "faulty learning rate") for one in findings):
        return True
    if cause.kind == "non-finite op":
        return evidence is None or evidence.failure is None
    return (cause.kind == "one layer" and jump is not None) or (
        cause.kind == "clip too low" and any("bound" in one.figures for one in findings)
    )


def _of_findings(
    run: Run,
    sites: Sequence[SiteHealth],
    findings: Sequence[Finding],
    jump: Verdict | None,
    loss: Loss | None,
    baseline: Loss | None,
) -> Verdict:
    """Return the verdict of the gravest finding."""
    if loss is not None and loss.bad_step >= 0 and not any(one.kind in NON_FINITE for one in findings):
        return _of_loss(run, loss)
    if not findings and not any(row.measure for row in sites):
        counted = "; what was counted is finite" if has_counts(run) else ""
        text = f"The {len(run.steps)} steps of this run have no norm and no clip{counted}."
        advice = 'Record norms: gr.on("gradient:*", Observe("norm")).'
        return Verdict("no records", "", text, advice)
    grave = next((one for one in findings if one.kind not in _MILD), None)
    if jump is not None and (grave is None or grave.kind == "vanishing"):
        return jump
    if grave is not None:
        return _of_finding(grave)
    always = [one for one in findings if one.kind == "clip acts always"]
    low = [one for one in always if "bound" in one.figures]
    if always and not low:
        return replace(_of_finding(always[0]), kind="clip sets the values")
    if low:
        verdict = _of_bound(low, sites)
        if loss is None or baseline is None or not math.isfinite(loss.last) or math.isfinite(baseline.last):
            return verdict
        caution = "Raise it little by little: without this clip, in the baseline, the loss became NaN or infinite."
        return replace(verdict, advice=f"{verdict.advice} {caution}")
    rest = next((one for one in findings if one.kind in ("saturated", "dead")), None)
    return _of_finding(rest) if rest is not None else _healthy(run, sites, loss)


def _of_finding(finding: Finding) -> Verdict:
    return Verdict(finding.kind, finding.site, finding.text, finding.suggestion)


def _of_loss(run: Run, loss: Loss) -> Verdict:
    end = "not finite" if not math.isfinite(loss.last) else f"finite again: {words(loss.last)}{loss.of('last')}"
    text = (
        f"The loss ({loss.address}) is not finite, first in step {loss.bad_step}; no other recorded value shows it. At "
        f"the end it is {end}."
    )
    advice = "In the loss, look at log, sqrt and divisions by zero or by an empty mask."
    if not has_counts(run):
        checks = 'gr.on("gradient:*", CheckFinite()) names the op and its line.'
        advice = f"Record the backward of that step: {checks} {advice}"
    return Verdict("non-finite", "", text, advice)


def _of_jump(site: str, front: str, growth: str, usual: str, steps: int, factor: float) -> Verdict:
    basis = f"the norms of {front} and {site} before clipping, in {steps} steps, and the factors of the clip"
    layer, name = front.partition(":")[2], site.partition(":")[2]
    if not _is_chain(site, front):
        text = (
            f"One error is far larger than its neighbor: that at {site} is {growth} times that at {front} (median of "
            f"{steps} steps; between neighbors in the records {usual} is typical), and its clip cuts it to "
            f"{percent(factor)} of its norm."
        )
        advice = (
            f"If {name} feeds {layer}, the error explodes on its way back through {layer}: start its weights smaller, "
            "lower its learning rate, or normalize its input (LayerNorm). If they are parallel branches, look at "
            f"what follows {name}. Until then keep the clip."
        )
        return Verdict("large error", site, text, advice, basis=basis)
    text = (
        f"One layer explodes: on its way back through {layer} the error grows {growth}-fold (median of {steps} steps; "
        f"a typical layer multiplies it by {usual}). The error behind {layer}, at {site} (what comes back through "
        f"{layer}), is cut by its clip to {percent(factor)} of its norm."
    )
    advice = (
        f"Change {layer}, not the bound: its weights are too large. Start them smaller, lower its learning rate, or "
        "normalize its input (LayerNorm). Until then keep the clip: it makes that error small again, so that the "
        "layers before it can learn."
    )
    return Verdict("exploding", site, text, advice, basis=basis, mark=f"the error behind {layer}")


def _of_bound(findings: Sequence[Finding], sites: Sequence[SiteHealth]) -> Verdict:
    clips = [row for row in sites if row.action]
    known = {one.key for one in findings}
    found = [row for row in clips if row.key in known]
    worst = min(found, key=lambda row: row.median_factor if row.median_factor >= 0 else 1.0)
    where = worst.name if len(found) == 1 else f"{len(found)} of {len(clips)} clipped sites, most at {worst.name},"
    group = next((row for row in found if is_group(row.site) and row is not worst), None)
    also = "" if group is None else f", and that on gradients together, {group.site}, {_effect(group)}"
    text = (
        f"The bound is too low: at {where} the clip {_effect(worst)}{also}, so the bound, not the loss, sets the size "
        "of the gradients."
    )
    raised = [row for row in (worst, group) if row is not None and row.suggestion > row.bound]
    advice = f"Raise {'; and '.join(map(_raise, raised))}." if raised else findings[0].suggestion
    if raised and all(row.from_baseline for row in raised):
        advice += " 90 % of the sizes in the baseline stay below such a bound, so that the clip acts on outliers alone."
    elif raised:
        advice += (
            " 90 % of the sizes seen stay below such a bound. It is a first step, for this run was shaped by its "
            "clips: train again, and raise it again until the clip acts in about a tenth of the steps."
        )
    return Verdict("clip acts always", worst.site, text, advice, tuple(row.code for row in found if row.code))


def _effect(row: SiteHealth) -> str:
    left = f" and leaves {percent(row.median_factor)} of the size (median)" if row.median_factor >= 0 else ""
    return f"acts in {percent(row.rate)} of {row.steps} steps{left}"


def _raise(row: SiteHealth) -> str:
    origin = " (from the baseline)" if row.from_baseline else ""
    return f"the bound at {row.site} from {words(row.bound)} to about {words(row.suggestion)}{origin}"


def _healthy(run: Run, sites: Sequence[SiteHealth], loss: Loss | None) -> Verdict:
    clips = [row for row in sites if row.action]
    parts = [f"in {len(run.steps)} steps no gradient exploded, vanished or was not finite"]
    if clips:
        most = max(clips, key=lambda row: row.rate)
        factor = f" (median factor x {words(most.median_factor)})" if most.median_factor >= 0 else ""
        often = f"clips acted most often at {most.site}, in {percent(most.rate)} of the steps{factor}"
        parts.append(often if most.rate > 0 else "no clip ever acted")
    if loss is not None:
        parts.append(f"the loss went from {words(loss.first)} to {words(loss.last)}{loss.of('first and last')}")
    if len(run.steps) >= MIN_CLIP_STEPS:
        return Verdict("healthy", "", f"Healthy: {'; '.join(parts)}.", "Nothing has to be changed.")
    advice = f"Wait: bounds of clips are judged after {MIN_CLIP_STEPS} steps."
    return Verdict("too short", "", f"Nothing wrong so far: {'; '.join(parts)}.", advice)
