"""Saturated and dead activations over a run."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import median

from gradrewrite.diagnostics.run_log import LISTED, MIN_STEPS, Finding, Run, listed

LAST_STEPS = 20  # how units behave now, not at the start
SATURATED = 0.5  # a fresh tanh or sigmoid layer saturates at a few percent
DEAD = 0.95  # a ReLU at rest is zero at about one half
DEAD_ERROR = 0.999  # a model that reads one token of many leaves the errors of all others at exactly 0
SATURATED_LIMITS = {("saturated", "activation"): SATURATED}
DEAD_LIMITS = {("zeros", "activation"): DEAD, ("zeros", "error"): DEAD_ERROR}


def saturated(run: Run) -> list[Finding]:
    """Return a finding for units at the bounds of their tanh or sigmoid."""
    found = _high_shares(run, SATURATED_LIMITS)
    advice = "Start from smaller weights or normalise what comes in: a saturated unit passes almost no error on."
    return _share_finding("saturated", "Units sit at the bounds of their tanh or sigmoid", found, advice)


def dead(run: Run, limits: Mapping[tuple[str, str], float] = DEAD_LIMITS) -> list[Finding]:
    """Return a finding for units, or errors, with almost only zeros; limits are by record and kind."""
    found = _high_shares(run, limits)
    advice = "Lower the learning rate or use a unit that leaks (LeakyReLU, GELU): a unit at zero learns nothing."
    return _share_finding("dead", "Almost all elements are exactly 0", found, advice)


@dataclass(frozen=True, slots=True)
class _High:
    """A persistently high share."""

    share: float
    site: str
    step: int
    steps: int


def _high_shares(run: Run, limits: Mapping[tuple[str, str], float]) -> list[_High]:
    """Return sites with a median share of the last steps above its limit (by record and kind), worst first."""
    found: dict[str, _High] = {}
    for one in run.series.values():
        limit = limits.get((one.record, one.at.kind))
        rows = [(step, v) for step, v in zip(one.steps, one.values, strict=True) if math.isfinite(v)]
        late = [v for _, v in rows[-LAST_STEPS:]]
        if limit is None or len(late) < MIN_STEPS or median(late) <= limit:
            continue
        below = max((n for n, (_, v) in enumerate(rows) if v <= limit), default=-1)
        since = rows[min(below + 1, len(rows) - 1)][0]
        found.setdefault(one.at.site, _High(median(late), one.at.site, since, len(late)))
    return sorted(found.values(), key=lambda high: -high.share)


def _share_finding(kind: str, what: str, found: Sequence[_High], suggestion: str) -> list[Finding]:
    if not found:
        return []
    worst = found[0]
    sites = listed([(high.site, high.share) for high in found])
    text = f"{what}, as the median share over the last {worst.steps} steps: {sites}."
    figures = {"share": worst.share, "steps": worst.steps, "sites": len(found)}
    figures |= {f"share@{high.site}": high.share for high in found[1:LISTED]}
    return [Finding(kind, worst.site, worst.step, text, figures, suggestion)]
