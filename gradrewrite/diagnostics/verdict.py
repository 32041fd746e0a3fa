"""The verdict on a run in one sentence, with figures and remedies."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from statistics import median

from gradrewrite.diagnostics.clipping import MIN_CLIP_STEPS
from gradrewrite.diagnostics.comparison import Loss
from gradrewrite.diagnostics.run_log import Finding, Run, is_group, words
from gradrewrite.diagnostics.site_health import SiteHealth, percent

LARGE_JUMP = 100.0  # between neighboring layers; healthy models keep errors within two orders from end to end
STRONG_CLIP = 0.2  # median factor of a clip that hides such a jump, over that of the clips of other errors
_HEADLINES = {
    "healthy": "Healthy",
    "no records": "Nothing to judge",
    "too short": "Nothing wrong so far",
    "clip acts always": "Clipping bound too low",
    "exploding": "Exploding gradients",
    "vanishing": "Vanishing gradients",
    "non-finite": "Values are not finite",
}
_SOUND = ("healthy", "no records", "too short")
_NON_FINITE = ("non-finite", "faulty input", "faulty loss", "faulty learning rate")
_MILD = ("clip acts always", "clip never acts", "saturated", "dead")


@dataclass(frozen=True, slots=True)
class Verdict:
    """The answer to "is the backward pass healthy?"."""

    # ``"healthy"``, ``"too short"``, ``"no records"``, ``"large error"``, ``"clip sets the values"`` (between bounds
    # that are not known), or the kind of the gravest finding of the doctor.
    kind: str
    site: str  # where it is worst; ``""`` if nowhere
    text: str  # one sentence with its figures
    advice: str  # what to change
    code: tuple[str, ...] = ()  # lines of code that do it; empty if none
    basis: str = ""  # records that it rests on, where no finding of the doctor names them
    mark: str = "see the verdict"  # a note for the site in the table of all sites

    @property
    def headline(self) -> str:
        """Two or three words."""
        return _HEADLINES.get(self.kind, self.kind.capitalize())

    @property
    def is_sound(self) -> bool:
        """Whether nothing is wrong."""
        return self.kind in _SOUND


@dataclass(frozen=True, slots=True)
class Jump:
    """A layer with a far larger error behind it, hidden by a clip."""

    site: str  # clipped site, on the input side of the layer
    layer: str  # site on its output side
    growth: float  # median over the steps of the ratio of the norms
    factor: float  # median factor of the clip
    usual: float  # median of such ratios over all neighbors
    is_chain: bool  # whether the names say that the layer takes what the site returns: ``layers.2``, ``layers.3``


def hidden_jump(run: Run, sites: Sequence[SiteHealth]) -> Jump | None:
    """Return the layer with the largest growth of the error behind a clip.

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
    usual = [row.median_factor if row.rate >= 0.5 else 1.0 for row in judged if row.site.startswith("error:")]
    if growth < LARGE_JUMP or factor > STRONG_CLIP * median(usual or [1.0]):
        return None
    return Jump(site, layer, growth, factor, median(ratio for ratio, *_ in found), _is_chain(site, layer))


def _is_chain(back: str, front: str) -> bool:
    """Whether two sites are neighbors in one list of layers; others, next in the records, may be parallel branches."""
    (parent, _, number), (other, _, following) = (site.partition(":")[2].rpartition(".") for site in (back, front))
    both = number.isdecimal() and following.isdecimal()
    return parent == other and both and int(following) == int(number) + 1


def judge(
    run: Run,
    sites: Sequence[SiteHealth],
    findings: Sequence[Finding],
    loss: Loss | None,
    baseline: Loss | None = None,
) -> Verdict:
    """Return the verdict on a run, from the figures of its sites and the doctor's findings, the gravest first."""
    if loss is not None and loss.bad_step >= 0 and not any(one.kind in _NON_FINITE for one in findings):
        return _of_loss(loss)
    if not findings and not any(row.measure for row in sites):
        text = f"The {len(run.steps)} steps of this run have no norm and no clip."
        advice = 'Record norms: gr.on("gradient:*", Observe("norm")), and monitor.to_jsonl(path).'
        return Verdict("no records", "", text, advice)
    grave = next((one for one in findings if one.kind not in _MILD), None)
    jump = hidden_jump(run, sites)
    if jump is not None and (grave is None or grave.kind == "vanishing"):
        return _of_jump(jump, len(run.steps))
    if grave is not None:
        return _of_vanishing(grave) if grave.kind == "vanishing" else _of_finding(grave)
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


def _of_loss(loss: Loss) -> Verdict:
    end = "not finite" if not math.isfinite(loss.last) else f"finite again: {words(loss.last)}{loss.of('last')}"
    text = (
        f"The loss ({loss.address}) is not finite, first in step {loss.bad_step}; no other recorded value shows it. At "
        f"the end it is {end}."
    )
    advice = (
        'Record the backward of that step: gr.on("gradient:*", CheckFinite()) names the op and its line. In the loss, '
        "look at log, sqrt and divisions by zero or by an empty mask."
    )
    return Verdict("non-finite", "", text, advice)


def _of_vanishing(finding: Finding) -> Verdict:
    figures = finding.figures
    fall = f"from {words(figures['at_output_end'])} at the last layer to {words(figures['at_input_end'])} at the first"
    rate = f", by a factor of {words(figures['growth_per_layer'])} per layer" if "growth_per_layer" in figures else ""
    text = (
        f"Gradients vanish: on the way back through {words(figures['layers'])} layers the error falls {fall}{rate}; "
        f"from {finding.site} on nothing is left, so the layers before it do not learn."
    )
    advice = f"{finding.suggestion} A clip is no remedy: it only makes gradients smaller."
    return Verdict(finding.kind, finding.site, text, advice)


def _of_jump(jump: Jump, steps: int) -> Verdict:
    basis = f"the norms of {jump.layer} and {jump.site} before clipping, in {steps} steps, and the factors of the clip"
    layer, name = jump.layer.partition(":")[2], jump.site.partition(":")[2]
    if not jump.is_chain:
        text = (
            f"One error is far larger than its neighbor: that at {jump.site} is {words(jump.growth)} times that at "
            f"{jump.layer} (median of {steps} steps; between neighbors in the records {words(jump.usual)} is typical), "
            f"and its clip cuts it to {percent(jump.factor)} of its norm."
        )
        advice = (
            f"If {name} feeds {layer}, the error explodes on its way back through {layer}: start its weights smaller, "
            "lower its learning rate, or normalize its input (LayerNorm). If they are parallel branches, look at "
            f"what follows {name}. Until then keep the clip."
        )
        return Verdict("large error", jump.site, text, advice, basis=basis)
    text = (
        f"One layer explodes: on its way back through {layer} the error grows {words(jump.growth)}-fold (median of "
        f"{steps} steps; a typical layer multiplies it by {words(jump.usual)}). The error behind {layer}, at "
        f"{jump.site} (what comes back through {layer}), is cut by its clip to {percent(jump.factor)} of its norm."
    )
    advice = (
        f"Change {layer}, not the bound: its weights are too large. Start them smaller, lower its learning rate, or "
        "normalize its input (LayerNorm). Until then keep the clip: it makes that error small again, so that the "
        "layers before it can learn."
    )
    return Verdict("exploding", jump.site, text, advice, basis=basis, mark=f"the error behind {layer}")


def _of_bound(findings: Sequence[Finding], sites: Sequence[SiteHealth]) -> Verdict:
    clips = [row for row in sites if row.action]
    known = {one.key for one in findings}
    found = [row for row in clips if row.key in known]
    worst = min(found, key=lambda row: row.median_factor if row.median_factor >= 0 else 1.0)
    where = worst.site if len(found) == 1 else f"{len(found)} of {len(clips)} clipped sites, most at {worst.site},"
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
