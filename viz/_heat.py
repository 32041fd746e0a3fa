"""``HeatMap``: a magnitude of gradients or errors, layer by step, as a matrix."""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from gradrewrite.diagnostics.clipping import clips_of
from gradrewrite.diagnostics.run_log import Run, Series
from gradrewrite.diagnostics.site_health import backward_order
from gradrewrite.viz._curve_data import Array, levels

MAX_ROWS = 40  # more labels than that cannot be read
MAX_COLUMNS = 1000  # each is more than one pixel wide
_MIN_GROUPS = 10  # fewer groups of modules say too little
_MEASURES = ("norm", "max_abs", "mean_abs")
_NAME_ENDS = re.compile(r"[./]|$")


@dataclass(frozen=True, eq=False, slots=True)
class HeatMap:
    """Matrix of one magnitude, layer by step.

    Attributes:
        kind: Kind of the sites.
        measure: Name of the record.
        rows: Names of the rows, in the order of the model.
        values: ``[rows, columns]``, the largest of a cell; NaN where nothing was recorded, inf where a value was not
            finite.
        first: The first step.
        width: How many steps a column covers.
        num_sites: How many sites the rows cover.
        num_left_out: How many sites of this kind recorded other measures alone.
    """

    kind: str
    measure: str
    rows: list[str]
    values: Array
    first: int
    width: int
    num_sites: int
    num_left_out: int


def heat_map(run: Run, kind: str) -> HeatMap | None:
    """Return the heat map of one kind of site, in the measure that most sites recorded; None without records."""
    by_measure = {measure: _series_of(run, kind, measure) for measure in _MEASURES}
    measure = max(_MEASURES, key=lambda name: len(by_measure[name]))
    chosen = by_measure[measure]
    if not chosen:
        return None
    first, width, columns = _columns(run)
    values = np.full((len(chosen), columns), math.nan)
    for row, one in enumerate(chosen):
        at = (np.array(one.steps) - first) // width
        np.fmax.at(values[row], at, levels(run, one.record, one.at.site, one.steps, one.values))
    groups = group([one.at.site.partition(":")[2] for one in chosen], MAX_ROWS)
    merged = np.stack([np.fmax.reduce(values[rows], axis=0) for _, rows in groups])
    known = {one.at.site for part in by_measure.values() for one in part}
    names = [name for name, _ in groups]
    return HeatMap(kind, measure, names, merged, first, width, len(chosen), len(known) - len(chosen))


def factor_map(run: Run) -> HeatMap | None:
    """Return the smallest factor of each cell, inf where a size was not finite; None where no factor is known."""
    order = {site: n for n, site in enumerate(backward_order(run))}
    clips = sorted((clip for clip in clips_of(run) if min(clip.bounds) < math.inf), key=lambda clip: order[clip.site])
    found = [(clip, factors) for clip in clips if not np.isnan(factors := np.array(clip.factors)).all()]
    if not found:
        return None
    first, width, columns = _columns(run)
    values = np.full((len(found), columns), math.nan)
    for row, (clip, factors) in enumerate(found):
        at = (np.array(clip.steps) - first) // width
        np.fmin.at(values[row], at, np.where(np.isinf(factors), -math.inf, factors))  # the smallest outlives a merge
        values[row, at[np.isinf(levels(run, clip.record, clip.site, clip.steps, clip.sizes))]] = -math.inf
    groups = group([clip.label for clip, _ in found], MAX_ROWS)
    merged = np.abs([np.fmin.reduce(values[rows], axis=0) for _, rows in groups])
    return HeatMap("clip", "factor", [name for name, _ in groups], merged, first, width, len(found), 0)


def _columns(run: Run) -> tuple[int, int, int]:
    """Return the first step, how many steps a column covers, and how many columns there are."""
    first, last = run.steps[0].step, run.steps[-1].step
    width = -(-(last - first + 1) // MAX_COLUMNS)
    return first, width, (last - first) // width + 1


def _series_of(run: Run, kind: str, measure: str) -> list[Series]:
    """Return one series per site: the one with the lowest number, recorded before the other actions."""
    found: dict[str, Series] = {}
    for one in run.series.values():
        if one.at.kind == kind and one.record == measure:
            known = found.setdefault(one.at.site, one)
            if _number(one) < _number(known):
                found[one.at.site] = one
    return list(found.values())


def _number(series: Series) -> int:
    return series.at.occurrence


def group(names: Sequence[str], limit: int) -> list[tuple[str, list[int]]]:
    """Group names into at most ``limit`` rows, by the longest module prefix that is coarse enough.

    Where that leaves few rows (300 layers in one list), neighbors of the next finer prefix are put together.
    """
    if len(names) <= limit:
        return [(name, [n]) for n, name in enumerate(names)]
    by_depth = [_by_prefix(names, depth) for depth in range(1, 1 + max(len(_NAME_ENDS.findall(n)) for n in names))]
    coarse = [groups for groups in by_depth if len(groups) <= limit]
    finer = [groups for groups in by_depth if len(groups) > limit]
    if coarse and (len(coarse[-1]) >= min(_MIN_GROUPS, limit) or not finer):
        return [(names[rows[0]] if len(rows) == 1 else f"{prefix}*", rows) for prefix, rows in coarse[-1]]
    size = -(-len(finer[0]) // limit)
    chunks = [finer[0][n : n + size] for n in range(0, len(finer[0]), size)]
    return [(_span([prefix for prefix, _ in chunk]), [n for _, rows in chunk for n in rows]) for chunk in chunks]


def _span(prefixes: Sequence[str]) -> str:
    first, last = (prefix.rstrip("./") for prefix in (prefixes[0], prefixes[-1]))
    return first if len(prefixes) == 1 else f"{first} ... {last}"


def _by_prefix(names: Sequence[str], depth: int) -> list[tuple[str, list[int]]]:
    """Group names by their first ``depth`` parts; a prefix that is not a whole name ends in ``.`` or ``/``."""
    groups: dict[str, list[int]] = {}
    for n, name in enumerate(names):
        ends = [match.end() for match in _NAME_ENDS.finditer(name)]
        groups.setdefault(name[: ends[min(depth, len(ends)) - 1]], []).append(n)
    return list(groups.items())
