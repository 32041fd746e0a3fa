"""Metrics of a training run by site, and their colors."""

from __future__ import annotations

import math
import sys
from collections import defaultdict
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Literal, get_args

from gradrewrite.diagnostics.clipping import clips_by_edit
from gradrewrite.diagnostics.growth import judged_steps
from gradrewrite.diagnostics.run_log import COUNTS, Run, Series
from gradrewrite.ir.graph_view import GraphView
from gradrewrite.sites import Site
from gradrewrite.viz._ladder import Ladder
from gradrewrite.viz._scene import ColorSample, LegendEntry
from gradrewrite.viz._theme import LINE, NOT_FINITE, PAPER, STOPS, palette

Metric = Literal["clip strength", "largest error", "not finite"]
_NARROWEST = 10.0  # strongest over weakest value, at least, so that 5 % more is no other color
_STRONGEST = 0.01  # factor


@dataclass(frozen=True, slots=True)
class SiteMetric:
    """One metric by site, with its logarithmic color scale."""

    metric: Metric
    name: str  # what is measured, as text
    # By site the values of the steps that have one, by number of the step; of clips by ``edit_key``.
    by_site: Mapping[str, Mapping[int, float]]
    totals: Mapping[str, float]  # by site its value over the whole run: the median factor, or the largest
    weak: float  # value at the beginning of the scale
    strong: float  # value at its end; less than ``weak`` for factors

    def color(self, value: float) -> str:
        """Return the color of one value."""
        if not math.isfinite(value):
            return NOT_FINITE
        if value == 0 and self.weak < self.strong:
            return PAPER
        return palette()[round(self.position(value) * (STOPS - 1))]

    def position(self, value: float) -> float:
        """Return the place on the scale, 2 if not finite."""
        if not math.isfinite(value):
            return 2.0
        if value <= 0:
            return float(self.strong < self.weak)
        place = (math.log(value) - math.log(self.weak)) / (math.log(self.strong) - math.log(self.weak))
        return min(max(place, 0.0), 1.0)

    def describe(self, value: float) -> str:
        """Return one value as text."""
        return f"{self.name}: {value:.3g}"

    def legend(self) -> list[LegendEntry]:
        """Return the legend of the color scale."""
        values = [*self.totals.values(), *(v for steps in self.by_site.values() for v in steps.values())]
        found = [LegendEntry(PAPER, LINE, self.describe(0.0))] if 0 in values and self.weak < self.strong else []
        found.append(LegendEntry(self.color(self.weak), LINE, self.describe(self.weak)))
        strong = f"{self.describe(self.strong)} (logarithmic between)"
        found.append(LegendEntry(self.color(self.strong), LINE, strong))
        if not all(map(math.isfinite, values)):
            found.append(LegendEntry(NOT_FINITE, NOT_FINITE, "NaN or infinite"))
        return found


def site_metrics(run: Run, graph_view: GraphView) -> list[SiteMetric]:
    """Return the metrics that a run has records for."""
    last = judged_steps(run)[-1].step if run.steps else 0
    found = [
        _clip_strengths(run, graph_view),
        _scaled("largest error", *_largest(run, {str(site) for site in graph_view.sites}), last),
        replace(
            _scaled("not finite", "largest share of elements not finite", _not_finite(run, graph_view.sites)),
            weak=1 / _NARROWEST,
            strong=1.0,
        ),
    ]
    return [one for one in found if one.by_site]


def choose_metric(found: Sequence[SiteMetric], wanted: Metric | None) -> SiteMetric | None:
    """Return the requested metric, or the first one; ValueError without records for it."""
    if wanted is None:
        return found[0] if found else None
    if wanted not in get_args(Metric):
        raise ValueError(f"color_by={wanted!r}: choose one of {', '.join(map(repr, get_args(Metric)))}")
    for one in found:
        if one.metric == wanted:
            return one
    known = ", ".join(repr(one.metric) for one in found) or "nothing"
    raise ValueError(
        f"color_by={wanted!r}: the monitor has no records for that (it has {known}); clips record with log=True, "
        "Observe('max_abs', 'nonfinite') records anywhere"
    )


def edit_key(number: int) -> str:
    """Return the key of an edit, different for clips of a site."""
    return f"edit {number}"


def sites_of(ladder: Ladder) -> dict[str, list[str]]:
    """Return the sites and the edit keys of each box."""
    view = ladder.graph_view
    edited = {edit.site for edit in view.edits}
    held: dict[str, list[str]] = defaultdict(list)
    for site, name in view.anchors.items():
        if site not in edited:
            held[name].append(str(site))
    found = {}
    for part in (part for row in ladder.rows for part in row):
        sites = [key for number in part.edits for key in (edit_key(number), *view.edits[number].record_sites)]
        found[part.key] = list(dict.fromkeys(sites or [site for name in part.nodes for site in held[name]]))
    return found


def box_colors(ladder: Ladder, metric: SiteMetric) -> dict[str, ColorSample]:
    """Return colors by box: the strongest of its sites."""
    found = {}
    for key, sites in sites_of(ladder).items():
        known = [(site, metric.totals[site]) for site in sites if site in metric.totals]
        if known:
            site, value = max(known, key=lambda one: metric.position(one[1]))
            where = f"{site}: " if ":" in site else ""
            found[key] = ColorSample(metric.color(value), f"{where}{metric.describe(value)}")
    return found


def _clip_strengths(run: Run, graph_view: GraphView) -> SiteMetric:
    clips = {edit_key(number): clip for number, clip in clips_by_edit(run, graph_view.edits).items()}
    totals = {key: clip.median_factor for key, clip in clips.items() if not math.isnan(clip.median_factor)}
    rows = {key: zip(clips[key].steps, clips[key].factors, strict=True) for key in totals}
    by_site = {key: {n: factor for n, factor in pairs if not math.isnan(factor)} for key, pairs in rows.items()}
    strong = max(min([1 / _NARROWEST, *totals.values()]), _STRONGEST)
    return SiteMetric("clip strength", "median factor", by_site, totals, 1.0, strong)


def _scaled(
    metric: Metric, name: str, by_site: Mapping[str, Mapping[int, float]], last: float = math.inf
) -> SiteMetric:
    """Return a metric with the largest values up to a step, or else of all steps, as totals."""
    totals = {}  # the first non-finite value, if there is one
    for site, steps in by_site.items():
        values = [value for step, value in steps.items() if step <= last] or [*steps.values()]
        totals[site] = next((value for value in values if not math.isfinite(value)), max(values))
    judged = [v for steps in by_site.values() for step, v in steps.items() if step <= last]
    positive = [v for v in judged if 0 < v < math.inf]
    weak = min([*positive, sys.float_info.max / _NARROWEST]) if positive else 1.0
    return SiteMetric(metric, name, by_site, totals, weak, max([*positive, weak * _NARROWEST]))


def _largest(run: Run, sites: Collection[str]) -> tuple[str, dict[str, dict[int, float]]]:
    """Return one measure for all sites and its values; of several clips at a site the first counts."""
    for record, words in (("max_abs", "largest absolute value"), ("norm", "largest norm")):
        found: dict[str, Series] = {}
        for one in sorted(run.series.values(), key=lambda one: one.at.occurrence):
            if one.record == record and one.at.site in sites and one.at.kind in ("error", "gradient", "input"):
                found.setdefault(one.at.site, one)
        if found:
            return words, {site: dict(zip(one.steps, one.values, strict=True)) for site, one in found.items()}
    return "", {}


def _not_finite(run: Run, sites: Sequence[Site]) -> dict[str, dict[int, float]]:
    # A symbolic size counts as 1: the share is then an upper bound.
    sizes = {str(site): max(math.prod(size or 1 for size in site.shape), 1) for site in sites}
    found: dict[str, dict[int, float]] = defaultdict(dict)
    for one in run.series.values():
        if one.record in COUNTS and one.at.site in sizes:
            for step, count in zip(one.steps, one.values, strict=True):
                share = min(count / sizes[one.at.site], 1.0)
                found[one.at.site][step] = max(share, found[one.at.site].get(step, 0.0))
    return dict(found)
