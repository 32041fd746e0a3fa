"""Metrics of a training run by site, and their colors."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Literal, get_args

from gradrewrite._utils.grouping import grouped
from gradrewrite.diagnostics.clipping import clips_by_edit
from gradrewrite.diagnostics.growth import judged_steps
from gradrewrite.diagnostics.run_log import COUNTS, Run
from gradrewrite.sites import Site
from gradrewrite.viz._graph_view import GraphView
from gradrewrite.viz._ladder import Ladder
from gradrewrite.viz._norms import values_by_site
from gradrewrite.viz._scale import NARROWEST, LogScale
from gradrewrite.viz._scene import ColorSample, LegendEntry
from gradrewrite.viz._theme import LINE, NOT_FINITE, PAPER

Metric = Literal["clip strength", "largest error", "not finite"]
_STRONGEST = 0.01  # factor


@dataclass(frozen=True, slots=True)
class SiteMetric:
    """One metric by site, with its logarithmic color scale."""

    metric: Metric
    name: str  # what is measured, as text
    # By site the values of the steps that have one, by number of the step; of clips by ``edit_key``.
    by_site: Mapping[str, Mapping[int, float]]
    totals: Mapping[str, float]  # by site its value over the whole run: the median factor, or the largest
    scale: LogScale

    @property
    def has_zero(self) -> bool:
        """Whether zero has no color: of sizes, not of factors."""
        return self.scale.weak < self.scale.strong

    def color(self, value: float) -> str:
        """Return the color of one value."""
        return PAPER if value == 0 and self.has_zero else self.scale.color(value)

    def describe(self, value: float) -> str:
        """Return one value as text."""
        return f"{self.name}: {value:.3g}"

    def legend(self) -> list[LegendEntry]:
        """Return the legend of the color scale."""
        values = [*self.totals.values(), *(v for steps in self.by_site.values() for v in steps.values())]
        found = [LegendEntry(PAPER, LINE, self.describe(0.0))] if 0 in values and self.has_zero else []
        weak, strong = self.scale.weak, self.scale.strong
        found.append(LegendEntry(self.color(weak), LINE, self.describe(weak)))
        found.append(LegendEntry(self.color(strong), LINE, f"{self.describe(strong)} (logarithmic between)"))
        if not all(map(math.isfinite, values)):
            found.append(LegendEntry(NOT_FINITE, NOT_FINITE, "NaN or infinite"))
        return found


def site_metrics(run: Run, graph_view: GraphView) -> list[SiteMetric]:
    """Return the metrics that a run has records for."""
    last = judged_steps(run)[-1].step if run.steps else 0
    shares = _scaled("not finite", "largest share of elements not finite", _not_finite(run, graph_view.sites))
    found = [
        _clip_strengths(run, graph_view),
        _scaled("largest error", *_largest(run, graph_view), last),
        replace(shares, scale=LogScale(1 / NARROWEST, 1.0)),
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
    held = grouped((name, str(site)) for site, name in view.anchors.items() if site not in edited)
    found = {}
    for part in ladder.parts:
        sites = [key for number in part.edits for key in (edit_key(number), *view.edits[number].record_sites)]
        found[part.key] = list(dict.fromkeys(sites or [site for name in part.nodes for site in held.get(name, ())]))
    return found


def box_colors(ladder: Ladder, metric: SiteMetric) -> dict[str, ColorSample]:
    """Return colors by box: the strongest of its sites."""
    found = {}
    for key, sites in sites_of(ladder).items():
        known = [(site, metric.totals[site]) for site in sites if site in metric.totals]
        if known:
            site, value = max(known, key=lambda one: (not math.isfinite(one[1]), metric.scale.position(one[1])))
            where = f"{site}: " if ":" in site else ""
            found[key] = ColorSample(metric.color(value), f"{where}{metric.describe(value)}")
    return found


def _clip_strengths(run: Run, graph_view: GraphView) -> SiteMetric:
    clips = {edit_key(number): clip for number, clip in clips_by_edit(run, graph_view.edits).items()}
    totals = {key: clip.median_factor for key, clip in clips.items() if not math.isnan(clip.median_factor)}
    rows = {key: zip(clips[key].steps, clips[key].factors, strict=True) for key in totals}
    by_site = {key: {n: factor for n, factor in pairs if not math.isnan(factor)} for key, pairs in rows.items()}
    strong = max(min([1 / NARROWEST, *totals.values()]), _STRONGEST)
    return SiteMetric("clip strength", "median factor", by_site, totals, LogScale(1.0, strong))


def _scaled(
    metric: Metric, name: str, by_site: Mapping[str, Mapping[int, float]], last: float = math.inf
) -> SiteMetric:
    """Return a metric with the largest values up to a step, or else of all steps, as totals."""
    totals = {}  # the first non-finite value, if there is one
    for site, steps in by_site.items():
        values = [value for step, value in steps.items() if step <= last] or [*steps.values()]
        totals[site] = next((value for value in values if not math.isfinite(value)), max(values))
    judged = (value for steps in by_site.values() for step, value in steps.items() if step <= last)
    return SiteMetric(metric, name, by_site, totals, LogScale.around(judged))


def _largest(run: Run, graph_view: GraphView) -> tuple[str, dict[str, dict[int, float]]]:
    """Return one measure for all sites and its values."""
    for record, words in (("max_abs", "largest absolute value"), ("norm", "largest norm")):
        found = values_by_site(run, graph_view, record)
        if found:
            return words, found
    return "", {}


def _not_finite(run: Run, sites: Sequence[Site]) -> dict[str, dict[int, float]]:
    # A symbolic size counts as 1: the share is then an upper bound.
    sizes = {str(site): max(math.prod(size or 1 for size in site.shape), 1) for site in sites}
    found: dict[str, dict[int, float]] = defaultdict(dict)
    for one in run.series.values():
        if one.record in COUNTS and one.at.site in sizes:
            for step, count in one.by_step.items():
                share = min(count / sizes[one.at.site], 1.0)
                found[one.at.site][step] = max(share, found[one.at.site].get(step, 0.0))
    return dict(found)
