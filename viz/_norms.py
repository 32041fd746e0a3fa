"""Norms of errors or gradients by site, for bars on boxes and strips of cells on folded ones."""

from __future__ import annotations

import math
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from statistics import median
from typing import TypeVar

from gradrewrite._utils.grouping import grouped
from gradrewrite.diagnostics.clipping import clips_of
from gradrewrite.diagnostics.growth import judged_steps
from gradrewrite.diagnostics.run_log import Run, is_group
from gradrewrite.sites import kinds_with
from gradrewrite.viz import _theme as theme
from gradrewrite.viz._graph_view import GraphView
from gradrewrite.viz._ladder import Ladder
from gradrewrite.viz._scale import LogScale
from gradrewrite.viz._scene import PAD, LegendEntry, Mark

HEIGHT = 9.0  # what a bar or a strip adds to a box, in pixels
DIFFERS = 3.0  # times its siblings
_RECORDS = ("norm", "max_abs", "mean_abs")
_KINDS = kinds_with(lambda traits: traits.has_units and not traits.at_guard)
_THICK = 5.0  # pixels


Block = TypeVar("Block", bound=Hashable)


@dataclass(frozen=True, slots=True)
class Cell:
    """One layer or call: its name and its sites."""

    name: str
    sites: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class SiteNorms:
    """Norms by site and step, and their logarithmic axis."""

    record: str  # ``"norm"``, ``"max_abs"`` or ``"mean_abs"``
    by_site: Mapping[str, Mapping[int, float]]
    bounds: Mapping[str, float]  # last finite bound of the clip at a site
    start: int  # first step
    now: int  # last step before the first that is not finite
    place: str  # that step in words
    scale: LogScale

    def values(self, sites: Sequence[str], step: int) -> list[float]:
        """Return the norms of the errors among sites, else the largest of the gradients; inf if it is not finite."""
        known = [(site, self.by_site[site][step]) for site in sites if step in self.by_site.get(site, {})]
        sizes = [(site, value if math.isfinite(value) else math.inf) for site, value in known]
        errors = [value for site, value in sizes if not site.startswith("gradient:")]
        return errors or ([max(value for _, value in sizes)] if sizes else [])

    def value(self, sites: Sequence[str], step: int) -> float | None:
        """Return the largest of the values; None without one."""
        return max(self.values(sites, step), default=None)

    def color(self, value: float | None) -> str:
        """Return the color of a norm; grey without one."""
        return theme.NO_DATA if value is None else self.scale.color(value)

    def marks(self, cells: Sequence[Cell], top: float, width: float) -> list[Mark]:
        """Return a bar (now; ticks for the start and the bound), or of several cells a strip, in a box of a width."""
        left, wide = float(PAD), width - 2 * PAD
        known = [cell for cell in cells if self.value(cell.sites, self.now) is not None]
        cells = cells if len(known) > 1 else known or cells[:1]
        if len(cells) > 1:
            each = wide / len(cells)
            values = [self.value(cell.sites, self.now) for cell in cells]
            return [Mark(left + n * each, top, each, _THICK, self.color(v)) for n, v in enumerate(values)]
        (cell,) = cells
        value, begin = (self.value(cell.sites, step) for step in (self.now, self.start))
        found = [Mark(left, top, wide, _THICK, theme.NO_DATA)]
        if value is not None:
            found.append(Mark(left, top, max(2.0, wide * self.scale.position(value)), _THICK, self.color(value)))
        bound = min((self.bounds[site] for site in cell.sites if site in self.bounds), default=None)
        ticks = [(begin, theme.DETAIL, 1.0), (bound, theme.INSERTED_EDGE, 2.0)]
        found += [
            Mark(left + wide * self.scale.position(at) - thick / 2, top - 2, thick, _THICK + 3, color)
            for at, color, thick in ticks
            if at is not None
        ]
        return found

    def text(self, cells: Sequence[Cell]) -> str:
        """Return the figures of a box: ``norm 0.0131``, ``norm 0.01 to 45``."""
        values = [value for cell in cells if (value := self.value(cell.sites, self.now)) is not None]
        ends = [min(values), max(values)] if len(cells) > 1 else values[:1]
        return f"{self.record} {' to '.join(f'{value:.3g}' for value in dict.fromkeys(ends))}" if ends else ""

    def legend(self) -> list[LegendEntry]:
        """Return the legend of bars and strips."""
        ends = f"{self.record} from {self.scale.weak:.2g} to {self.scale.strong:.2g}, logarithmic"
        ticks = "ticks: at the start (thin), bound of the clip (thick)"
        return [
            LegendEntry(theme.STRONG, theme.LINE, f"bar: {ends}, in {self.place}; {ticks}"),
            LegendEntry(theme.NO_DATA, theme.LINE, "no data"),
        ]


def norms_of(run: Run, graph_view: GraphView) -> SiteNorms | None:
    """Return the norms of a run at the sites of a graph; None without any."""
    found = {record: by_site for record in _RECORDS if (by_site := values_by_site(run, graph_view, record))}
    if not found:
        return None
    record, by_site = max(found.items(), key=lambda item: len(item[1]))
    start, now = run.steps[0].step, judged_steps(run)[-1].step
    until = (value for steps in by_site.values() for step, value in steps.items() if step <= now)
    bounds = {clip.site: clip.bound for clip in clips_of(run) if 0 < clip.bound < math.inf and not is_group(clip.site)}
    return SiteNorms(record, by_site, bounds, start, now, run.place(now), LogScale.around(until))


def values_by_site(run: Run, graph_view: GraphView, record: str) -> dict[str, dict[int, float]]:
    """Return values of errors and gradients; the first record of a site counts."""
    known = {str(site) for site in graph_view.sites}
    found: dict[str, dict[int, float]] = {}
    for one in sorted(run.select((record,), _KINDS), key=lambda one: one.at.occurrence):
        if one.at.site in known:
            found.setdefault(one.at.site, one.by_step)
    return found


def sites_by_order(graph_view: GraphView) -> dict[int, list[str]]:
    """Return the errors and gradients of each torch-level op, by its number."""
    return grouped((order, str(site)) for site, order in graph_view.orders.items() if site.kind in _KINDS)


def cells_of(ladder: Ladder, norms: SiteNorms) -> dict[str, list[Cell]]:
    """Return the cells of the boxes of the backward with a norm, by key; one cell for a box that is not folded.

    A loop with norms inside has one for each iteration.

    A box has the norms of the errors that reach it, of the outputs of its ops.
    """
    view, of = ladder.graph_view, sites_by_order(ladder.graph_view)
    numbers = {str(site): site.iteration for site in view.sites if site.iteration is not None}
    found = {}
    for part in (part for part in ladder.parts if part.column == "backward"):
        orders = [
            (name, dict.fromkeys(node.order for n in nodes if not (node := view.nodes[n]).mark))
            for name, nodes in part.cells or [(part.text, part.nodes)]
        ]
        (of_part, own), *more = orders
        turns = grouped((numbers[site], site) for order in own for site in of.get(order, ()) if site in numbers)
        if not more and any(site in norms.by_site for sites in turns.values() for site in sites):
            found[part.key] = [Cell(f"{of_part}#{n}", tuple(turns[n])) for n in sorted(turns)]
            continue
        cells = [Cell(name, tuple(site for order in own for site in of.get(order, ()))) for name, own in orders]
        if any(site in norms.by_site for cell in cells for site in cell.sites):
            found[part.key] = cells
    return found


def differing_siblings(families: Iterable[Sequence[Block]], sizes: Callable[[Block], Sequence[float]]) -> set[Block]:
    """Return the blocks unlike their siblings, of families of three or more."""
    large = [own for own in families if len(own) > 2]
    return {own[place] for own in large for place in differing([sizes(block) for block in own])}


def differing(blocks: Sequence[Sequence[float]]) -> set[int]:
    """Return the places of blocks that change the size unlike their siblings.

    A block is given by the norms of its errors, in the order of the forward. Two ratios are compared, each with its
    median over all blocks: of the error that leaves the block on its way back, and of the largest on the way, to the
    error that reaches it. More than 3 times, or less than a third, is a difference; steady growth is none.
    """
    known = [(place, [size for size in block if 0 < size < math.inf]) for place, block in enumerate(blocks)]
    sizes = [(place, block) for place, block in known if block]
    pairs = [(place, block, before[-1]) for (_, before), (place, block) in pairwise(sizes)]
    leaves = {place: out / block[-1] for place, block, out in pairs}
    largest = {place: max(*block, out) / block[-1] for place, block, out in pairs}
    apart = {place for place, block in enumerate(blocks) if math.inf in block}
    apart = apart if len(apart) < len(blocks) / 2 else set()
    for ratios in (leaves, largest):
        usual = median(ratios.values()) if ratios else 1.0
        apart |= {place for place, ratio in ratios.items() if not usual / DIFFERS <= ratio <= usual * DIFFERS}
    return apart
