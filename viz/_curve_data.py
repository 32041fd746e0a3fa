"""Arrays that the curves of a training run are drawn from."""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from gradrewrite.diagnostics.clipping import clips_of
from gradrewrite.diagnostics.nonfinite_steps import bad_steps, expected_infinities, is_bad
from gradrewrite.diagnostics.run_log import Run, Series, as_executed

Array = npt.NDArray[np.float64]
Steps = npt.NDArray[np.int64]

MAX_SITES = 30  # sites of events that are drawn
_MAX_GROUPS = 4  # of parameters, in one panel


@dataclass(frozen=True, eq=False, slots=True)
class Line:
    """One record as a curve over the steps; values may be NaN or infinite."""

    label: str
    steps: Steps
    values: Array


@dataclass(frozen=True, eq=False, slots=True)
class Events:
    """Non-finite records and skipped updates, by step.

    Attributes:
        sites: The first sites in the order of execution, each with its steps.
        num_sites: How many there are in all.
        expected: Those of ``sites`` whose infinities are expected (a mask).
        steps: Steps with a site whose infinities are not expected.
        skipped: Steps whose update was skipped.
    """

    sites: list[tuple[str, Steps]]
    num_sites: int
    expected: frozenset[str]
    steps: Steps
    skipped: Steps


@dataclass(frozen=True, eq=False, slots=True)
class Ratios:
    """Update ratios over the layers.

    Attributes:
        num_layers: How many parameters were metric.
        steps: Steps in which one was.
        median: NaN where no ratio is a number.
        low: The smallest that is positive and finite; NaN where there is none.
        high: The largest of these.
        is_infinite: Steps in which a ratio is infinite or NaN.
    """

    num_layers: int
    steps: Steps
    median: Array
    low: Array
    high: Array
    is_infinite: npt.NDArray[np.bool_]


def losses(run: Run, label: str = "") -> list[Line]:
    """Return the records named ``loss``, else ``max`` of the value that ``gr.tap(loss, "loss")`` named."""
    found = [one for one in run.series.values() if one.record == "loss"]
    if not found:
        found = [one for one in run.series.values() if one.record == "max" and one.at.site == "activation:loss"]
    return [Line(label or f"{one.at.name}@{one.at.site}", _ints(one.steps), np.array(one.values)) for one in found]


def levels(run: Run, record: str, site: str, steps: Sequence[int], values: Sequence[float]) -> Array:
    """Return magnitudes: inf where a value is not finite, NaN for an empty tensor."""
    sizes = np.abs(np.array(values, dtype=np.float64))
    for n in np.flatnonzero(np.isnan(sizes)).tolist():
        row = run.steps[bisect_left(run.steps, steps[n], key=lambda step: step.step)]
        if is_bad(record, site, math.nan, row.records):
            sizes[n] = math.inf
    return sizes


def total_norms(run: Run) -> list[Line]:
    """Return the total norms of at most 4 groups before clipping, inf where not finite, each with its finite bounds."""
    found: list[Line] = []
    for clip in [clip for clip in clips_of(run) if clip.record == "total_norm"][:_MAX_GROUPS]:
        steps, bounds = _ints(clip.steps), np.array(clip.bounds)
        found.append(Line(clip.site, steps, levels(run, clip.record, clip.site, clip.steps, clip.sizes)))
        known = np.isfinite(bounds)
        found += [Line(f"bound of {clip.site}", steps[known], bounds[known])] if known.any() else []
    return found


def events(run: Run) -> Events:
    """Return the non-finite sites and the skipped updates of a run."""
    bad = bad_steps(run)
    expected = frozenset(expected_infinities(run, bad))
    by_site: dict[str, list[int]] = {}
    for one in bad:
        for site in one.sites:
            by_site.setdefault(site, []).append(one.step.step)
    first = _in_order(run, by_site)[:MAX_SITES]
    steps = [one.step.step for one in bad if any(site not in expected for site in one.sites)]
    skipped = {
        step
        for one in run.series.values()
        if one.record == "skipped" and one.at.kind == "optimizer"
        for step, value in zip(one.steps, one.values, strict=True)
        if value > 0
    }
    return Events(
        [(site, _ints(by_site[site])) for site in first], len(by_site), expected, _ints(steps), _ints(sorted(skipped))
    )


def _in_order(run: Run, sites: dict[str, list[int]]) -> list[str]:
    """Sort sites by the order of execution."""
    return as_executed(site for site in dict.fromkeys(one.at.site for one in run.series.values()) if site in sites)


def update_ratios(run: Run) -> Ratios | None:
    """Return the update ratios (``gr.guard(..., update_ratios=True)``); None without records."""
    found: list[Series] = [one for one in run.series.values() if one.record == "update_ratio"]
    if not found:
        return None
    steps = _ints(sorted({step for one in found for step in one.steps}))
    table = np.full((len(found), len(steps)), math.nan)
    is_infinite = np.zeros(len(steps), dtype=np.bool_)
    for row, one in enumerate(found):
        at = np.searchsorted(steps, one.steps)
        table[row, at] = one.values
        is_infinite[at] |= ~np.isfinite(one.values)
    median = np.full(len(steps), math.nan)
    known = ~np.isnan(table).all(axis=0)
    median[known] = np.nanmedian(table[:, known], axis=0)
    positive = np.where((table > 0) & np.isfinite(table), table, math.nan)
    low, high = np.fmin.reduce(positive, axis=0), np.fmax.reduce(positive, axis=0)
    return Ratios(len(found), steps, median, low, high, is_infinite)


def _ints(steps: Sequence[int]) -> Steps:
    return np.array(steps, dtype=np.int64)
