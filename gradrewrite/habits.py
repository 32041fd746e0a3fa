"""Habits of a run: units that saturate or are dead, clips that always or never act."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import median, quantiles

from gradrewrite.clips import Clip, clips_of
from gradrewrite.history import LISTED, MIN_STEPS, Finding, Run, listed

LAST_STEPS = 20  # how units behave now, not at the start
SATURATED = 0.5  # a fresh tanh or sigmoid layer saturates at a few percent
DEAD = 0.95  # a ReLU at rest is zero at about one half
DEAD_ERROR = 0.999  # a model that reads one token of many leaves the errors of all others at exactly 0
MIN_CLIP_STEPS, CLIPS_ALWAYS = 20, 0.9  # early steps alone say nothing about a threshold


def saturated(run: Run) -> Finding | None:
    """Units that sit at the bounds of their tanh or sigmoid."""
    found = _high_shares(run, {("saturated", "activation"): SATURATED})
    advice = "Start from smaller weights or normalise what comes in: a saturated unit passes almost no error on."
    return _share_finding("saturated", "Units sit at the bounds of their tanh or sigmoid", found, advice)


def dead(run: Run) -> Finding | None:
    """Units, or errors, that are almost all 0."""
    found = _high_shares(run, {("zeros", "activation"): DEAD, ("zeros", "error"): DEAD_ERROR})
    advice = "Lower the learning rate or use a unit that leaks (LeakyReLU, GELU): a unit at zero learns nothing."
    return _share_finding("dead", "Almost all elements are exactly 0", found, advice)


@dataclass(frozen=True, slots=True)
class _High:
    """A share that stays high."""

    share: float
    site: str
    step: int
    steps: int


def _high_shares(run: Run, limits: Mapping[tuple[str, str], float]) -> list[_High]:
    """Sites whose median share over the last steps is above a limit, by record and kind; the worst first."""
    found: dict[str, _High] = {}
    for one in run.series.values():
        limit = limits.get((one.at.record, one.at.kind))
        rows = [(step, v) for step, v in zip(one.steps, one.values, strict=True) if math.isfinite(v)]
        late = [v for _, v in rows[-LAST_STEPS:]]
        if limit is None or len(late) < MIN_STEPS or median(late) <= limit:
            continue
        below = max((n for n, (_, v) in enumerate(rows) if v <= limit), default=-1)
        since = rows[min(below + 1, len(rows) - 1)][0]
        found.setdefault(one.at.site, _High(median(late), one.at.site, since, len(late)))
    return sorted(found.values(), key=lambda high: -high.share)


def _share_finding(kind: str, what: str, found: Sequence[_High], suggestion: str) -> Finding | None:
    if not found:
        return None
    worst = found[0]
    sites = listed([(high.site, high.share) for high in found])
    text = f"{what}, as the median share over the last {worst.steps} steps: {sites}."
    figures = {"share": worst.share, "steps": worst.steps, "sites": len(found)}
    figures |= {f"share@{high.site}": high.share for high in found[1:LISTED]}
    return Finding(kind, worst.site, worst.step, text, figures, suggestion)


@dataclass(frozen=True, slots=True)
class _Clip:
    """What one clip did.

    Attributes:
        site: Where it stands.
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
    """Of a clip by norm only steps with a finite norm and a finite bound count."""
    rows = list(zip(clip.steps, clip.sizes, clip.bounds, clip.acted, strict=True))
    if clip.record != "max_abs":
        rows = [row for row in rows if math.isfinite(row[1]) and math.isfinite(row[2])]
    if len(rows) < MIN_CLIP_STEPS:
        return None
    sizes = [size for _, size, _, _ in rows if math.isfinite(size)]
    return _Clip(clip.site, rows[0][0], [acted for *_, acted in rows], sizes, rows[-1][2])
