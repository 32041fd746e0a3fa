"""Saturated and dead activations over a run."""

from __future__ import annotations

import math
from collections.abc import Mapping
from statistics import median

from gradrewrite.diagnostics.run_log import LISTED, MIN_STEPS, Finding, Run, listed

LAST_STEPS = 20  # how units behave now, not at the start
SATURATED = 0.5  # a fresh tanh or sigmoid layer saturates at a few percent
DEAD = 0.95  # a ReLU at rest is zero at about one half
DEAD_ERROR = 0.999  # a model that reads one token of many leaves the errors of all others at exactly 0
SATURATED_LIMITS = {("saturated", "activation"): SATURATED}
DEAD_LIMITS = {("zeros", "activation"): DEAD, ("zeros", "error"): DEAD_ERROR}


def saturated(run: Run) -> list[Finding]:
    """Return a finding for units at their bounds."""
    advice = "Start from smaller weights or normalise what comes in: a saturated unit passes almost no error on."
    what = "Units sit at the bounds of their tanh or sigmoid"
    return _high_shares(run, SATURATED_LIMITS, "saturated", what, advice)


def dead(run: Run, limits: Mapping[tuple[str, str], float] = DEAD_LIMITS) -> list[Finding]:
    """Return a finding for zeros; limits by record and kind."""
    advice = "Lower the learning rate or use a unit that leaks (LeakyReLU, GELU): a unit at zero learns nothing."
    return _high_shares(run, limits, "dead", "Almost all elements are exactly 0", advice)


def _high_shares(run: Run, limits: Mapping[tuple[str, str], float], kind: str, what: str, advice: str) -> list[Finding]:
    """Return a finding for high median shares in the end."""
    found: dict[str, tuple[float, int, int]] = {}  # share, first step, number of steps
    for one in run.series.values():
        limit = limits.get((one.record, one.at.kind))
        rows = [(step, v) for step, v in zip(one.steps, one.values, strict=True) if math.isfinite(v)]
        late = [v for _, v in rows[-LAST_STEPS:]]
        if limit is None or len(late) < MIN_STEPS or median(late) <= limit:
            continue
        below = max((n for n, (_, v) in enumerate(rows) if v <= limit), default=-1)
        since = rows[min(below + 1, len(rows) - 1)][0]
        found.setdefault(one.at.site, (median(late), since, len(late)))
    if not found:
        return []
    shares = sorted(((site, share) for site, (share, *_) in found.items()), key=lambda row: -row[1])
    worst, share = shares[0]
    _, step, steps = found[worst]
    text = f"{what}, as the median share over the last {steps} steps: {listed(shares)}."
    figures = {"share": share, "steps": steps, "sites": len(found)}
    figures |= {f"share@{site}": value for site, value in shares[1:LISTED]}
    return [Finding(kind, worst, step, text, figures, advice)]
