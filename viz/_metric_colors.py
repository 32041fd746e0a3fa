"""Metrics of a training run by site, and their colors: clip rate, largest error, non-finite share."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal, get_args

from gradrewrite.diagnostics.clipping import ClipHistory, clips_by_edit
from gradrewrite.diagnostics.run_log import COUNTS, Run, Series
from gradrewrite.ir.graph_view import GraphView
from gradrewrite.sites import Site
from gradrewrite.viz._ladder import Ladder
from gradrewrite.viz._scene import ColorSample, LegendEntry
from gradrewrite.viz._theme import LINE, NOT_FINITE, PAPER

Metric = Literal["clip strength", "clip rate", "largest error", "not finite"]
METRICS: tuple[Metric, ...] = get_args(Metric)
STOPS = 9
_NARROWEST = math.log(10.0)  # a scale covers at least a factor of ten, so that 5 % more is no other color
_WEAKEST, _STRONGEST = 1.0, 0.01  # factors at the ends of the scale of strengths


@dataclass(frozen=True, slots=True)
class SiteMetric:
    """One metric of a training run, by site, with its color scale.

    Attributes:
        metric: Which.
        by_site: By site the values of the steps that have one, by number of the step; of clips by ``edit_key``.
        totals: By site its value over the whole run: the share of steps, the median factor, or the largest.
        low: Where the scale begins.
        high: Where it ends.
        name: What is measured, as text.
    """

    metric: Metric
    by_site: Mapping[str, Mapping[int, float]]
    totals: Mapping[str, float]
    low: float
    high: float
    name: str = ""

    def color(self, value: float) -> str:
        """Return the color of one value; non-finite values have their own."""
        if not math.isfinite(value):
            return NOT_FINITE
        if self.metric == "not finite" and value <= 0:
            return PAPER
        return palette()[round(self.position(value) * (STOPS - 1))]

    def position(self, value: float) -> float:
        """Return the position of a finite value on the scale, from 0 to 1; the scale of errors is logarithmic."""
        if self.metric == "clip rate":
            return min(max(value, 0.0), 1.0)
        if value <= 0 or self.low <= 0:
            return float(self.metric == "clip strength")
        place = math.log(value / self.low) / max(math.log(self.high / self.low), _NARROWEST)
        return min(max(1.0 - place if self.metric == "clip strength" else place, 0.0), 1.0)

    def bins(self) -> list[float]:
        """Return the thresholds of the colors, rising."""
        places = [(n + 0.5) / (STOPS - 1) for n in range(STOPS - 1)]
        if self.metric == "clip rate":
            return places
        span = max(math.log(self.high / self.low), _NARROWEST) if self.low > 0 else 0.0
        return [self.low * math.exp(min(place * span, 700.0)) for place in places]

    def describe(self, value: float) -> str:
        """Return one value as text."""
        if self.metric == "clip rate":
            return f"clip acted in {value:.0%} of the steps"
        if self.metric == "clip strength":
            return f"median factor of the steps in which the clip acted: {value:.3g}"
        if self.metric == "not finite":
            return f"at most {value:.3%} of the elements not finite"
        return f"{self.name}: {value:.4g}"

    def legend(self) -> list[LegendEntry]:
        """Return the legend of the color scale."""
        if self.metric == "clip rate":
            return [
                LegendEntry(palette()[0], LINE, "clip never acted"),
                LegendEntry(palette()[-1], LINE, "clip acted in every step"),
            ]
        if self.metric == "clip strength":
            strongest = f"clip left {self.low:.0%} of the norm or less (logarithmic between)"
            found = [LegendEntry(palette()[0], LINE, "clip changed nothing (factor 1)")]
            found.append(LegendEntry(self.color(self.low), LINE, strongest))
        elif self.metric == "not finite":
            found = [LegendEntry(PAPER, LINE, "all elements finite")]
            found += [LegendEntry(palette()[0], LINE, f"{self.name}: {self.low:.3g}")] * (self.high > 0)
        else:
            found = [LegendEntry(palette()[0], LINE, f"{self.name}: {self.low:.3g} or less")]
        if self.metric != "clip strength" and self.position(self.high) > 0:
            text = f"{self.name}: {self.high:.3g} (logarithmic between)"
            found.append(LegendEntry(self.color(self.high), LINE, text))
        values = [*self.totals.values(), *(v for steps in self.by_site.values() for v in steps.values())]
        if not all(map(math.isfinite, values)):
            found.append(LegendEntry(NOT_FINITE, NOT_FINITE, "NaN or infinite"))
        return found


def palette() -> list[str]:
    """Return the color scale, from low to high."""
    import matplotlib
    from matplotlib.colors import to_hex

    scale = matplotlib.colormaps["RdPu"]
    return [to_hex(scale(0.05 + 0.4 * n / (STOPS - 1))) for n in range(STOPS)]


def site_metrics(run: Run, graph_view: GraphView) -> list[SiteMetric]:
    """Return the metrics that a run has records for."""
    words, largest = _largest(run, {str(site) for site in graph_view.sites})
    clips = {edit_key(number): clip for number, clip in clips_by_edit(run, graph_view.edits).items()}
    found = [
        _strengths({key: clip for key, clip in clips.items() if clip.median_factor == clip.median_factor}),
        _measured("clip rate", {key: _by_step(clip, map(float, clip.acted)) for key, clip in clips.items()}),
        _measured("largest error", largest, words),
        _measured("not finite", _not_finite(run, graph_view.sites), "largest share of elements not finite"),
    ]
    return [one for one in found if one.by_site]


def choose_metric(found: Sequence[SiteMetric], wanted: Metric | None) -> SiteMetric | None:
    """Return the requested metric, or the first one.

    Raises:
        ValueError: There is no such metric, or the run has no records for it.
    """
    if wanted is None:
        return found[0] if found else None
    if wanted not in METRICS:
        raise ValueError(f"color_by={wanted!r}: choose one of {', '.join(map(repr, METRICS))}")
    for one in found:
        if one.metric == wanted:
            return one
    known = ", ".join(repr(one.metric) for one in found) or "nothing"
    raise ValueError(
        f"color_by={wanted!r}: the monitor has no records for that (it has {known}); clips record with log=True, "
        "Observe('max_abs', 'nonfinite') records anywhere"
    )


def box_colors(ladder: Ladder, metric: SiteMetric) -> dict[str, ColorSample]:
    """Return colors by box: the strongest of its edits' sites, or else of its values'."""
    samples = site_colors(metric)
    view = ladder.graph_view
    edited = {str(edit.site) for edit in view.edits}
    plain = {name: str(site) for site, name in view.anchors.items() if str(site) not in edited}
    found: dict[str, ColorSample] = {}
    for part in (part for row in ladder.rows for part in row):
        sites = [key for n in part.edits for key in (edit_key(n), str(view.edits[n].site))]
        sites = sites or [plain[n] for n in part.nodes if n in plain]
        known = [samples[site] for site in sites if site in samples]
        if known:
            found[part.key] = max(known, key=lambda one: (not math.isfinite(one.value), metric.position(one.value)))
    return found


def site_colors(metric: SiteMetric) -> dict[str, ColorSample]:
    """Return colors by site."""
    found = {}
    for site, value in metric.totals.items():
        where = "" if site.startswith(edit_key("")) else f"{site}: "
        found[site] = ColorSample(metric.color(value), f"{where}{metric.describe(value)}", value)
    return found


def edit_key(number: int | str) -> str:
    """Return the key of an edit's strength; several clips at one site differ in it."""
    return f"edit {number}"


def _by_step(clip: ClipHistory, values: Iterable[float]) -> dict[int, float]:
    return {step: value for step, value in zip(clip.steps, values, strict=True) if not math.isnan(value)}


def _strengths(clips: Mapping[str, ClipHistory]) -> SiteMetric:
    totals = {key: clip.median_factor for key, clip in clips.items()}
    low = max(min([_STRONGEST * 10, *totals.values()]), _STRONGEST)
    by_step = {key: _by_step(clip, clip.factors) for key, clip in clips.items()}
    return SiteMetric("clip strength", by_step, totals, low, _WEAKEST)


def _measured(metric: Metric, by_site: Mapping[str, Mapping[int, float]], name: str = "") -> SiteMetric:
    totals = {site: _total(metric, list(values.values())) for site, values in by_site.items()}
    positive = [v for values in by_site.values() for v in values.values() if 0 < v < math.inf]
    return SiteMetric(metric, by_site, totals, min(positive, default=0.0), max(positive, default=0.0), name)


def _total(metric: Metric, values: Sequence[float]) -> float:
    if metric == "clip rate":
        return sum(values) / len(values)
    bad = [v for v in values if not math.isfinite(v)]
    return bad[0] if bad else max(values)


def _largest(run: Run, sites: Collection[str]) -> tuple[str, dict[str, dict[int, float]]]:
    """Return one measure for all sites and its values; of several clips at a site the first counts."""
    for record, words in (("max_abs", "largest absolute value"), ("norm", "largest norm")):
        found: dict[str, Series] = {}
        for one in run.series.values():
            if one.record == record and one.at.site in sites and one.at.kind in ("error", "gradient", "input"):
                known = found.get(one.at.site)
                if known is None or one.at.occurrence < known.at.occurrence:
                    found[one.at.site] = one
        if found:
            return words, {site: dict(zip(one.steps, one.values, strict=True)) for site, one in found.items()}
    return "", {}


def _not_finite(run: Run, sites: Sequence[Site]) -> dict[str, dict[int, float]]:
    sizes = {str(site): _size(site) for site in sites}
    found: dict[str, dict[int, float]] = defaultdict(dict)
    for one in run.series.values():
        if one.record in COUNTS and one.at.site in sizes:
            for step, count in zip(one.steps, one.values, strict=True):
                share = min(count / sizes[one.at.site], 1.0)
                found[one.at.site][step] = max(share, found[one.at.site].get(step, 0.0))
    return dict(found)


def _size(site: Site) -> float:
    """Return the number of elements, a symbolic size counted as 1: the share is then an upper bound."""
    return float(max(math.prod(size or 1 for size in site.shape), 1))
