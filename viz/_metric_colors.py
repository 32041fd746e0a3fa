"""Metrics of a training run by site, and their colors: clip rate, largest error, non-finite share."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal, get_args

from gradrewrite.diagnostics.clipping import clips_of
from gradrewrite.diagnostics.run_log import COUNTS, Run, Series
from gradrewrite.policy.actions import GroupAction
from gradrewrite.sites import Site
from gradrewrite.viz._graph_view import GraphView
from gradrewrite.viz._scene import ColorSample, LegendEntry
from gradrewrite.viz._theme import LINE, NOT_FINITE, PAPER

Metric = Literal["clip rate", "largest error", "not finite"]
METRICS: tuple[Metric, ...] = get_args(Metric)
STOPS = 9


@dataclass(frozen=True, slots=True)
class SiteMetric:
    """One metric of a training run, by site, with its color scale.

    Attributes:
        metric: Which.
        by_site: By site the values of the steps that have one, by number of the step.
        totals: By site its value over the whole run: the share of steps, or the largest.
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
            return 0.0
        if self.high <= self.low:
            return 1.0
        return min(max(math.log(value / self.low) / math.log(self.high / self.low), 0.0), 1.0)

    def describe(self, value: float) -> str:
        """Return one value as text."""
        if self.metric == "clip rate":
            return f"clip acted in {value:.0%} of the steps"
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
        if self.metric == "not finite":
            found = [LegendEntry(PAPER, LINE, "all elements finite")]
            if self.high > 0:
                found.append(LegendEntry(palette()[0], LINE, f"{self.name}: {self.low:.3g}"))
        else:
            found = [LegendEntry(palette()[0], LINE, f"{self.name}: {self.low:.3g} or less")]
        if self.high > self.low:
            found.append(LegendEntry(palette()[-1], LINE, f"{self.name}: {self.high:.3g} (logarithmic between)"))
        if any(not math.isfinite(v) for v in self.totals.values()):
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
    words, largest = _largest(run)
    found = (_clip_rates(run, graph_view), largest, _not_finite(run, graph_view.sites))
    names = ("", words, "largest share of elements not finite")
    triples = zip(METRICS, found, names, strict=True)
    return [_measured(metric, by_site, name) for metric, by_site, name in triples if by_site]


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


def node_colors(graph_view: GraphView, metric: SiteMetric) -> dict[str, ColorSample]:
    """Return colors by node: the nodes inserted at a site, else the node that holds its value."""
    samples = site_colors(metric)
    found = nodes_of_sites(graph_view)
    colored = {name: samples[site] for site, names in found.items() if site in samples for name in names[1:] or names}
    empty = {f"edit {n}": str(edit.site) for n, edit in enumerate(graph_view.edits) if not edit.nodes}
    return colored | {key: samples[site] for key, site in empty.items() if site in samples}


def site_colors(metric: SiteMetric) -> dict[str, ColorSample]:
    """Return colors by site."""
    return {
        site: ColorSample(metric.color(value), f"{site}: {metric.describe(value)}", value)
        for site, value in metric.totals.items()
    }


def nodes_of_sites(graph_view: GraphView) -> dict[str, list[str]]:
    """Return the nodes of each site: first the one that holds its value, then those that its edits inserted."""
    found: dict[str, list[str]] = {str(site): [name] for site, name in graph_view.anchors.items()}
    for edit in graph_view.edits:
        found[str(edit.site)] += edit.nodes
    return found


def _measured(metric: Metric, by_site: Mapping[str, Mapping[int, float]], name: str) -> SiteMetric:
    totals = {site: _total(metric, list(values.values())) for site, values in by_site.items()}
    positive = [v for values in by_site.values() for v in values.values() if 0 < v < math.inf]
    return SiteMetric(metric, by_site, totals, min(positive, default=0.0), max(positive, default=0.0), name)


def _total(metric: Metric, values: Sequence[float]) -> float:
    if metric == "clip rate":
        return sum(values) / len(values)
    bad = [v for v in values if not math.isfinite(v)]
    return bad[0] if bad else max(values)


def _clip_rates(run: Run, graph_view: GraphView) -> dict[str, dict[int, float]]:
    members: dict[str, list[str]] = defaultdict(list)
    for edit in graph_view.edits:
        if isinstance(edit.action, GroupAction):
            members[f"group:{edit.action.group}"].append(str(edit.site))
    found: dict[str, dict[int, float]] = {}
    acted = [(clip.site, list(zip(clip.steps, clip.acted, strict=True))) for clip in clips_of(run)]
    logged = [one for one in run.series.values() if one.record == "clipped"]
    acted += [(one.at.site, [(n, v > 0) for n, v in zip(one.steps, one.values, strict=True)]) for one in logged]
    for where, steps in acted:  # of several clips at a site any may have acted
        for site in members.get(where, [where]):
            known = found.setdefault(site, {})
            for step, has_acted in steps:
                known[step] = max(known.get(step, 0.0), float(has_acted))
    return found


def _largest(run: Run) -> tuple[str, dict[str, dict[int, float]]]:
    """Return one measure for all sites and its values; of several clips at a site the first counts."""
    for record, words in (("max_abs", "largest absolute value"), ("norm", "largest norm")):
        found: dict[str, Series] = {}
        for one in run.series.values():
            if one.record == record and one.at.kind in ("error", "gradient", "input"):
                known = found.get(one.at.site)
                if known is None or _order(one) < _order(known):
                    found[one.at.site] = one
        if found:
            return words, {site: dict(zip(one.steps, one.values, strict=True)) for site, one in found.items()}
    return "", {}


def _order(series: Series) -> int:
    return series.at.occurrence


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
