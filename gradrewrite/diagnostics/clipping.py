"""Clips over a run: their bounds, and how often they acted."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import quantiles

from gradrewrite.diagnostics.run_log import BACKWARD, LISTED, Finding, Run, Series, listed
from gradrewrite.ir.record_layout import RecordKey

MIN_CLIP_STEPS, CLIPS_ALWAYS = 20, 0.9  # early steps alone say nothing about a threshold


@dataclass(frozen=True, slots=True)
class _Clip:
    """The effect of one clip over a run.

    Attributes:
        site: The site.
        step: The first step in which it was recorded.
        acted: For each step whether it acted.
        sizes: Norms or largest absolute values before it; finite.
        bound: Its last bound; NaN if that is not known.
    """

    site: str
    step: int
    acted: list[bool]
    sizes: list[float]
    bound: float

    @property
    def share(self) -> float:
        """Share of the steps in which it acted."""
        return sum(self.acted) / len(self.acted)


def clips_always(run: Run) -> Finding | None:
    """Clips that act in nearly every step."""
    found = sorted((c for c in _enough(clips_of(run)) if c.share > CLIPS_ALWAYS), key=lambda clip: -clip.share)
    if not found:
        return None
    worst = found[0]
    figures = {"share": worst.share, "steps": len(worst.acted), "sites": len(found)}
    figures |= {} if math.isnan(worst.bound) else {"bound": worst.bound}
    figures |= {f"share@{clip.site}": clip.share for clip in found[1:LISTED]}
    advice = "Raise the threshold: a clip that always acts sets the length of every update by itself."
    if len(worst.sizes) > 1:
        figures["percentile_90"] = quantiles(worst.sizes, n=10, method="inclusive")[-1]
        advice = (
            f"Raise the threshold to about {figures['percentile_90']:.3g}, which 90 % of the values seen stay below."
        )
    sites = listed([(clip.site, clip.share) for clip in found])
    text = f"A clip acts in nearly every one of {len(worst.acted)} steps, as the share of the steps: {sites}."
    return Finding("clip acts always", worst.site, worst.step, text, figures, advice)


def clips_never(run: Run) -> Finding | None:
    """Clips by norm that act in no step."""
    by_norm = [clip for clip in clips_of(run) if clip.record != "max_abs"]
    idle = [clip for clip in _enough(by_norm) if not any(clip.acted) and 0 < clip.bound < math.inf]
    found = sorted(idle, key=lambda clip: max(clip.sizes) / clip.bound)
    if not found:
        return None
    worst = found[0]
    largest = max(worst.sizes)
    figures = {"largest_norm": largest, "bound": worst.bound, "steps": len(worst.acted), "sites": len(found)}
    figures |= {f"largest_norm@{clip.site}": max(clip.sizes) for clip in found[1:LISTED]}
    sites = listed([(clip.site, max(clip.sizes)) for clip in found])
    text = (
        f"A clip with the bound {worst.bound:.4g} never acts in {len(worst.acted)} steps; largest norms seen: {sites}."
    )
    advice = f"If it is to act at all, set the threshold below {largest:.3g}, the largest norm seen."
    return Finding("clip never acts", worst.site, worst.step, text, figures, advice)


def _enough(clips: Sequence[Clip]) -> list[_Clip]:
    """Those that were recorded in enough steps."""
    found = [_habit(clip) for clip in clips]
    return [clip for clip in found if clip is not None]


def _habit(clip: Clip) -> _Clip | None:
    """Return the effect of a clip; of a clip by norm only steps with a finite norm and a finite bound count."""
    rows = list(zip(clip.steps, clip.sizes, clip.bounds, clip.acted, strict=True))
    if clip.record != "max_abs":
        rows = [row for row in rows if math.isfinite(row[1]) and math.isfinite(row[2])]
    if len(rows) < MIN_CLIP_STEPS:
        return None
    sizes = [size for _, size, _, _ in rows if math.isfinite(size)]
    return _Clip(clip.site, rows[0][0], [acted for *_, acted in rows], sizes, rows[-1][2])


@dataclass(frozen=True, slots=True)
class Clip:
    """The records of one clip over a run.

    Attributes:
        site: The site.
        record: What it was measured by: ``norm`` or ``total_norm`` (clips by norm), ``max_abs`` (clips by value, where
            they log).
        steps: Numbers of the steps that it reported.
        sizes: Norm or largest absolute value before it in each of them; NaN where that was not recorded.
        bounds: Its bound in each of them; NaN where that is not known (clips by value with two bounds).
        acted: Whether it acted in each of them; a size that is not finite is left alone by a clip by norm.
    """

    site: str
    record: str
    steps: list[int]
    sizes: list[float]
    bounds: list[float]
    acted: list[bool]


def clips_of(run: Run) -> list[Clip]:
    """Clips whose doings were recorded, those by norm first; a site with both kinds counts as the first."""
    series = [one for one in run.series.values() if one.at.kind in BACKWARD]
    by_norm = [_norm_clip(run, one) for one in series if one.record == "bound"]
    found = [clip for clip in by_norm if clip is not None]
    known = {clip.site for clip in found}
    return found + [_value_clip(run, one) for one in series if one.record == "clipped" and one.at.site not in known]


def _norm_clip(run: Run, bound: Series) -> Clip | None:
    """The clip that a bound belongs to: a bound has the occurrence of its norm."""
    site = bound.at.site
    keys = [RecordKey(name, n, site) for n in (bound.at.occurrence, 1) for name in ("norm", "total_norm")]
    norms = _first_of(run, keys)
    if norms is None:
        return None
    known = dict(zip(bound.steps, bound.values, strict=True))
    bounds = [known.get(step, math.nan) for step in norms.steps]
    acted = [b < v < math.inf for v, b in zip(norms.values, bounds, strict=True)]
    return Clip(site, norms.record, norms.steps, norms.values, bounds, acted)


def _value_clip(run: Run, clipped: Series) -> Clip:
    site, occurrences = clipped.at.site, (clipped.at.occurrence, 1)
    found = _first_of(run, [RecordKey("max_abs", n, site) for n in occurrences])
    known = dict(zip(found.steps, found.values, strict=True)) if found is not None else {}
    sizes = [known.get(step, math.nan) for step in clipped.steps]
    limit = _first_of(run, [RecordKey("limit", n, site) for n in occurrences])
    limits = dict(zip(limit.steps, limit.values, strict=True)) if limit is not None else {}
    bounds = [limits.get(step, math.nan) for step in clipped.steps]
    return Clip(site, "max_abs", clipped.steps, sizes, bounds, [v > 0 for v in clipped.values])


def _first_of(run: Run, keys: Sequence[RecordKey]) -> Series | None:
    return next((run.series[str(key)] for key in keys if str(key) in run.series), None)
