"""Clips over a run: bounds, rates and factors."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import chain, compress
from statistics import median, quantiles
from typing import Any

from typing_extensions import assert_never

from gradrewrite.diagnostics.run_log import Finding, Run, Series
from gradrewrite.ir.edits import Edit
from gradrewrite.ir.record_key import RecordKey
from gradrewrite.ir.record_layout import ClipRecords
from gradrewrite.ir.reports import NormClip, ValueClip

MIN_CLIP_STEPS, CLIPS_ALWAYS = 20, 0.9  # early steps alone say nothing about a threshold
_LISTS = ("steps", "sizes", "bounds", "acted", "factors")


def clips_always(run: Run) -> list[Finding]:
    """Return a finding for each clip with a high rate."""
    found = [clip for clip in _judged_clips(run) if clip.rate > CLIPS_ALWAYS]
    return [_always(clip) for clip in sorted(found, key=lambda clip: (-clip.rate, clip.strength))]


def _always(clip: ClipHistory) -> Finding:
    number, bound = len(clip.acted), clip.bound
    figures: dict[str, float] = {"share": clip.rate, "steps": number}
    text = f"The clip by {clip.kind} at {clip.label} acts in {sum(clip.acted)} of {number} {clip.unit}"
    if not math.isnan(bound):
        figures["bound"] = bound
        text += f", with the bound {bound:.4g}"
    if factors := _finite(clip.factors):
        figures |= {"median_factor": clip.strength, "smallest_factor": min(factors)}
        text += f"; the median factor is {clip.strength:.3g}"
    advice = "Raise the threshold: a clip that always acts sets the length of every update by itself."
    if len(sizes := _finite(clip.sizes)) > 1:
        figures["percentile_90"] = quantiles(sizes, n=10, method="inclusive")[-1]
        advice = (
            f"Raise the threshold to about {figures['percentile_90']:.3g}, which 90 % of the values seen stay below, "
            "as a first step, and again until the clip acts in about a tenth of the steps."
        )
    if math.isnan(bound):
        advice = "Widen the range of this clip: one that always acts sets the values of every update by itself."
    return Finding("clip acts always", clip.site, clip.steps[0], f"{text}.", figures, advice, str(clip.key))


def clips_never(run: Run) -> list[Finding]:
    """Return a finding for each idle clip by norm."""
    by_norm = [clip for clip in _judged_clips(run) if clip.kind == "norm"]
    found = [clip for clip in by_norm if not any(clip.acted) and 0 < clip.bound < math.inf]
    return [_never(clip) for clip in sorted(found, key=lambda clip: max(clip.sizes) / clip.bound)]


def _never(clip: ClipHistory) -> Finding:
    number, largest = len(clip.acted), max(clip.sizes)
    figures = {"largest_norm": largest, "bound": clip.bound, "steps": number}
    text = (
        f"The clip by norm at {clip.label}, with the bound {clip.bound:.4g}, acts in none of {number} {clip.unit}; "
        f"the largest finite norm is {largest:.4g}."
    )
    advice = f"If it is to act at all, set the threshold below {largest:.3g}, the largest norm seen."
    return Finding("clip never acts", clip.site, clip.steps[0], text, figures, advice, str(clip.key))


def steps_of_clips(run: Run, *, by_norm: bool = False) -> Mapping[str, int]:
    """Return the number of judged steps of each clip."""
    clips = [clip for clip in clips_of(run) if clip.kind == "norm" or not by_norm]
    by_norm_too = {clip.label for clip in clips if clip.kind == "norm"}
    both = [clip.kind == "value" and clip.label in by_norm_too for clip in clips]
    pairs = zip(clips, both, strict=True)
    return {f"{clip.label}{' (by value)' * two}": len(_judged(clip).steps) for clip, two in pairs}


def _judged(clip: ClipHistory) -> ClipHistory:
    """Return a clip with its judged steps."""
    pairs = zip(clip.sizes, clip.bounds, strict=True)
    kept = [clip.kind == "value" or (math.isfinite(size) and math.isfinite(bound)) for size, bound in pairs]
    lists: dict[str, Any] = {name: list(compress(getattr(clip, name), kept)) for name in _LISTS}
    return replace(clip, **lists)


def _judged_clips(run: Run) -> list[ClipHistory]:
    found = [_judged(clip) for clip in clips_of_modules(run)]
    return [clip for clip in found if len(set(clip.steps)) >= MIN_CLIP_STEPS]


def _finite(values: Sequence[float]) -> list[float]:
    return [value for value in values if math.isfinite(value)]


@dataclass(frozen=True, slots=True)
class ClipHistory:
    """The records of one clip over a run."""

    site: str
    # What it was measured by: ``norm`` or ``total_norm`` (clips by norm), ``max_abs`` (clips by value, where they log).
    record: str
    steps: list[int]  # numbers of the steps that it reported
    sizes: list[float]  # norm or largest absolute value before it in each of them; NaN where that was not recorded
    bounds: list[float]  # its bound in each of them; NaN where that is not known (clips by value with two bounds)
    acted: list[bool]  # whether it acted in each of them; a size that is not finite is left alone by a clip by norm
    factors: list[float]  # norm after / norm before in each of them; NaN where that is not known
    key: RecordKey  # record that tells it from other clips of the site: its norm, or whether it acted
    action: str  # name of its class
    rule: str  # pattern of the rule that made it; ``""`` for a callback
    share: RecordKey | None = None  # record of the share of the elements that a clip by value changed
    num_calls: int = 1  # of the module, whose lists are one behind the other

    @property
    def unit(self) -> str:
        """Unit of its lists: ``steps`` or ``calls``."""
        return "calls" if self.num_calls > 1 else "steps"

    @property
    def kind(self) -> str:
        """``norm`` or ``value``."""
        return "value" if self.record == "max_abs" else "norm"

    @property
    def bound(self) -> float:
        """The last finite bound, else infinity (off) or NaN (unknown)."""
        finite = [bound for bound in self.bounds if math.isfinite(bound)]
        return finite[-1] if finite else self.bounds[-1]

    @property
    def rate(self) -> float:
        """Share of the clipped steps."""
        return sum(self.acted) / len(self.acted)

    @property
    def strength(self) -> float:
        """Median factor of all steps; 1 if none is known."""
        factors = _finite(self.factors)
        return median(factors) if factors else 1.0

    @property
    def median_factor(self) -> float:
        """Median factor of the clipped steps; NaN if unknown."""
        pairs = zip(self.factors, self.acted, strict=True)
        factors = [factor for factor, acted in pairs if acted and not math.isnan(factor)]
        return median(factors) if factors else math.nan if any(self.acted) else 1.0

    @property
    def label(self) -> str:
        """The site, with its record unless that is the first."""
        return self.site if self.key.occurrence == 1 else f"{self.site} ({self.key.name})"


def clips_of(run: Run) -> list[ClipHistory]:
    """Return the clips with records, those by norm first."""
    found = [_history_of(run, clip) for clip in run.clips]
    return sorted((clip for clip in found if clip is not None), key=lambda clip: clip.kind)


def clips_of_modules(run: Run) -> list[ClipHistory]:
    """Return the clips with records, one per module."""
    alike: dict[tuple[str, str, str], list[ClipHistory]] = {}
    for clip in clips_of(run):
        alike.setdefault((clip.site.partition("#")[0], clip.action, clip.key.name), []).append(clip)
    found = []
    for (name, *_), clips in alike.items():
        joined: dict[str, Any] = {of: list(chain.from_iterable(getattr(clip, of) for clip in clips)) for of in _LISTS}
        found.append(replace(clips[0], site=name, num_calls=len(clips), **joined) if len(clips) > 1 else clips[0])
    return found


def clips_by_edit(run: Run, edits: Sequence[Edit]) -> dict[int, ClipHistory]:
    """Return the clips with records by number of the edit."""
    clips = {clip.key: clip for clip in clips_of(run)}
    found = {number: [clips[key] for key in edit.records if key in clips] for number, edit in enumerate(edits)}
    return {number: own[0] for number, own in found.items() if own}


def _history_of(run: Run, clip: ClipRecords) -> ClipHistory | None:
    match clip.report:
        case NormClip(record, size, bound):
            key, share = size, None
        case ValueClip(share=share, log=log, limit=bound):
            record, size, key = "max_abs", log.max_abs, log.clipped
        case _:
            assert_never(clip.report)
    of_key = run.series.get(str(key))
    if of_key is None:
        return None

    def values(of: RecordKey | None) -> list[float]:
        return _aligned(None if of is None else run.series.get(str(of)), of_key.steps)

    factors = values(clip.factor)
    acted = [factor != 1 and not math.isnan(factor) for factor in factors]
    if key != size:
        acted = [value > 0 for value in of_key.values]
    action = clip.action.partition("(")[0]
    sizes, bounds = values(size), values(bound)
    return ClipHistory(clip.site, record, of_key.steps, sizes, bounds, acted, factors, key, action, clip.rule, share)


def _aligned(series: Series | None, steps: Sequence[int]) -> list[float]:
    known = {} if series is None else dict(zip(series.steps, series.values, strict=True))
    return [known.get(step, math.nan) for step in steps]
