"""What the clips of a run met, step by step, from their records."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from gradrewrite.history import BACKWARD, Run, Series


@dataclass(frozen=True, slots=True)
class Clip:
    """What one clip met.

    Attributes:
        site: Where it stands.
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
    by_norm = [_norm_clip(run, one) for one in series if one.at.record == "bound"]
    found = [clip for clip in by_norm if clip is not None]
    known = {clip.site for clip in found}
    return found + [_value_clip(run, one) for one in series if one.at.record == "clipped" and one.at.site not in known]


def _norm_clip(run: Run, bound: Series) -> Clip | None:
    """The clip that a bound belongs to: a bound has the number of its norm."""
    site, number = bound.at.site, bound.at.number
    norms = _first_of(run, [f"{name}{n}@{site}" for n in (number, "") for name in ("norm", "total_norm")])
    if norms is None:
        return None
    known = dict(zip(bound.steps, bound.values, strict=True))
    bounds = [known.get(step, math.nan) for step in norms.steps]
    acted = [b < v < math.inf for v, b in zip(norms.values, bounds, strict=True)]
    return Clip(site, norms.at.record, norms.steps, norms.values, bounds, acted)


def _value_clip(run: Run, clipped: Series) -> Clip:
    site, number = clipped.at.site, clipped.at.number
    found = _first_of(run, [f"max_abs{number}@{site}", f"max_abs@{site}"])
    known = dict(zip(found.steps, found.values, strict=True)) if found is not None else {}
    sizes = [known.get(step, math.nan) for step in clipped.steps]
    limit = _first_of(run, [f"limit{number}@{site}", f"limit@{site}"])
    limits = dict(zip(limit.steps, limit.values, strict=True)) if limit is not None else {}
    bounds = [limits.get(step, math.nan) for step in clipped.steps]
    return Clip(site, "max_abs", clipped.steps, sizes, bounds, [v > 0 for v in clipped.values])


def _first_of(run: Run, addresses: Sequence[str]) -> Series | None:
    return next((run.series[address] for address in addresses if address in run.series), None)
