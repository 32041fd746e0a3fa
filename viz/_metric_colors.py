"""What colours say: how often clips acted, the largest error, the share of elements that were not finite."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal, get_args

from gradrewrite.clips import clips_of
from gradrewrite.history import COUNTS, Run, Series
from gradrewrite.policy import GroupAction
from gradrewrite.sites import Site
from gradrewrite.viz._graph_view import Net
from gradrewrite.viz._scene import LINE, PAPER, Paint, Swatch

Metric = Literal["clip rate", "largest error", "not finite"]
METRICS: tuple[Metric, ...] = get_args(Metric)
NOT_FINITE = "#fa5252"
STOPS = 9


@dataclass(frozen=True, slots=True)
class Measured:
    """One metric of a run.

    Attributes:
        metric: Which.
        by_site: By site the values of the steps that have one, by number of the step.
        totals: By site its value over the whole run: the share of steps, or the largest.
        low: Where the scale begins.
        high: Where it ends.
        name: What is measured, in words.
    """

    metric: Metric
    by_site: Mapping[str, Mapping[int, float]]
    totals: Mapping[str, float]
    low: float
    high: float
    name: str = ""

    def colour(self, value: float) -> str:
        """Colour of one value; what is not finite has its own."""
        if not math.isfinite(value):
            return NOT_FINITE
        if self.metric == "not finite" and value <= 0:
            return PAPER
        return palette()[round(self.place(value) * (STOPS - 1))]

    def place(self, value: float) -> float:
        """Where a finite value stands on the scale, from 0 to 1; the scale of errors is logarithmic."""
        if self.metric == "clip rate":
            return min(max(value, 0.0), 1.0)
        if value <= 0 or self.low <= 0:
            return 0.0
        if self.high <= self.low:
            return 1.0
        return min(max(math.log(value / self.low) / math.log(self.high / self.low), 0.0), 1.0)

    def words(self, value: float) -> str:
        """One value for a reader."""
        if self.metric == "clip rate":
            return f"clip acted in {value:.0%} of the steps"
        if self.metric == "not finite":
            return f"at most {value:.3%} of the elements not finite"
        return f"{self.name}: {value:.4g}"

    def legend(self) -> list[Swatch]:
        """What the colours mean."""
        if self.metric == "clip rate":
            return [
                Swatch(palette()[0], LINE, "clip never acted"),
                Swatch(palette()[-1], LINE, "clip acted in every step"),
            ]
        if self.metric == "not finite":
            found = [Swatch(PAPER, LINE, "all elements finite")]
            if self.high > 0:
                found.append(Swatch(palette()[0], LINE, f"{self.name}: {self.low:.3g}"))
        else:
            found = [Swatch(palette()[0], LINE, f"{self.name}: {self.low:.3g} or less")]
        if self.high > self.low:
            found.append(Swatch(palette()[-1], LINE, f"{self.name}: {self.high:.3g} (logarithmic between)"))
        if any(not math.isfinite(v) for v in self.totals.values()):
            found.append(Swatch(NOT_FINITE, NOT_FINITE, "NaN or infinite"))
        return found


def palette() -> list[str]:
    """Colours from little to much."""
    import matplotlib
    from matplotlib.colors import to_hex

    scale = matplotlib.colormaps["RdPu"]
    return [to_hex(scale(0.05 + 0.4 * n / (STOPS - 1))) for n in range(STOPS)]


def measure(run: Run, net: Net) -> list[Measured]:
    """The metrics that a run has records for."""
    words, largest = _largest(run)
    found = (_clip_rates(run, net), largest, _not_finite(run, net.sites))
    names = ("", words, "largest share of elements not finite")
    triples = zip(METRICS, found, names, strict=True)
    return [_measured(metric, by_site, name) for metric, by_site, name in triples if by_site]


def choose(found: Sequence[Measured], wanted: Metric | None) -> Measured | None:
    """The metric that is asked for, or the first there is.

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


def paint(net: Net, measured: Measured) -> dict[str, Paint]:
    """The colour of each node that shows a site: what was inserted there, else the node that holds its value."""
    paints = paint_sites(measured)
    found = nodes_of_sites(net)
    painted = {name: paints[site] for site, names in found.items() if site in paints for name in names[1:] or names}
    empty = {f"edit {n}": str(edit.site) for n, edit in enumerate(net.edits) if not edit.nodes}
    return painted | {key: paints[site] for key, site in empty.items() if site in paints}


def paint_sites(measured: Measured) -> dict[str, Paint]:
    """The colour of each site."""
    return {
        site: Paint(measured.colour(value), f"{site}: {measured.words(value)}", value)
        for site, value in measured.totals.items()
    }


def nodes_of_sites(net: Net) -> dict[str, list[str]]:
    """By site the nodes that show it: first the one that holds its value, then those that its edits inserted."""
    found: dict[str, list[str]] = {str(site): [name] for site, name in net.anchors.items()}
    for edit in net.edits:
        found[str(edit.site)] += edit.nodes
    return found


def _measured(metric: Metric, by_site: Mapping[str, Mapping[int, float]], name: str) -> Measured:
    totals = {site: _total(metric, list(values.values())) for site, values in by_site.items()}
    positive = [v for values in by_site.values() for v in values.values() if 0 < v < math.inf]
    return Measured(metric, by_site, totals, min(positive, default=0.0), max(positive, default=0.0), name)


def _total(metric: Metric, values: Sequence[float]) -> float:
    if metric == "clip rate":
        return sum(values) / len(values)
    bad = [v for v in values if not math.isfinite(v)]
    return bad[0] if bad else max(values)


def _clip_rates(run: Run, net: Net) -> dict[str, dict[int, float]]:
    members: dict[str, list[str]] = defaultdict(list)
    for edit in net.edits:
        if isinstance(edit.action, GroupAction):
            members[f"group:{edit.action.group}"].append(str(edit.site))
    found: dict[str, dict[int, float]] = {}
    acted = [(clip.site, list(zip(clip.steps, clip.acted, strict=True))) for clip in clips_of(run)]
    logged = [one for one in run.series.values() if one.at.record == "clipped"]
    acted += [(one.at.site, [(n, v > 0) for n, v in zip(one.steps, one.values, strict=True)]) for one in logged]
    for where, steps in acted:  # of several clips at a site any may have acted
        for site in members.get(where, [where]):
            known = found.setdefault(site, {})
            for step, has_acted in steps:
                known[step] = max(known.get(step, 0.0), float(has_acted))
    return found


def _largest(run: Run) -> tuple[str, dict[str, dict[int, float]]]:
    """One measure for all sites, and its values: what the first of several clips at a site met."""
    for record, words in (("max_abs", "largest absolute value"), ("norm", "largest norm")):
        found: dict[str, Series] = {}
        for one in run.series.values():
            if one.at.record == record and one.at.kind in ("error", "gradient", "input"):
                known = found.get(one.at.site)
                if known is None or _order(one) < _order(known):
                    found[one.at.site] = one
        if found:
            return words, {site: dict(zip(one.steps, one.values, strict=True)) for site, one in found.items()}
    return "", {}


def _order(series: Series) -> int:
    return int(series.at.number[1:] or 1)


def _not_finite(run: Run, sites: Sequence[Site]) -> dict[str, dict[int, float]]:
    sizes = {str(site): _size(site) for site in sites}
    found: dict[str, dict[int, float]] = defaultdict(dict)
    for one in run.series.values():
        if one.at.record in COUNTS and one.at.site in sizes:
            for step, count in zip(one.steps, one.values, strict=True):
                share = min(count / sizes[one.at.site], 1.0)
                found[one.at.site][step] = max(share, found[one.at.site].get(step, 0.0))
    return dict(found)


def _size(site: Site) -> float:
    """Number of elements; where a size is symbolic, as if it were 1: the share is then at most too large."""
    return float(max(math.prod(size or 1 for size in site.shape), 1))
