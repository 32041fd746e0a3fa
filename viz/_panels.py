"""Panels of a figure of curves, each drawn into axes that share the steps."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import groupby
from typing import TYPE_CHECKING, Any

import numpy as np

from gradrewrite.diagnostics.comparison import comparable_sizes
from gradrewrite.diagnostics.run_log import Run, kind_of
from gradrewrite.diagnostics.site_health import SiteHealth
from gradrewrite.viz._curve_data import (
    Array,
    Events,
    Line,
    Ratios,
    Steps,
    events,
    losses,
    total_norms,
    update_ratios,
)
from gradrewrite.viz._fonts import displayable
from gradrewrite.viz._heat import MAX_ROWS, HeatMap, factor_map, group, heat_map
from gradrewrite.viz._theme import (
    CURVE_ABSENT,
    CURVE_BLUE,
    CURVE_GRID,
    CURVE_INK,
    CURVE_PALE,
    CURVE_RED,
    CURVE_ZERO,
)

if TYPE_CHECKING:
    from matplotlib.axes import Axes

COMMON_RATIO = 1e-3  # the usual rule of thumb for a healthy ratio of update to weight
_WIDEST_LABEL = 38
_WIDEST_TITLE = 90  # what a legend beside it leaves
_TIGHT: dict[str, Any] = {"columnspacing": 1.2, "handlelength": 1.6, "handletextpad": 0.5}
_WIDEST_LINEAR = 30.0  # largest over smallest value that a linear axis shows well


@dataclass(frozen=True, eq=False, slots=True)
class Panel:
    """One panel of a figure.

    Attributes:
        name: What it is called.
        height: In inches, with its title.
        draw: Draws it into its axes.
        is_over_steps: Whether its axis is that of the steps.
        has_marks: Whether steps with events are marked in it.
    """

    name: str
    height: float
    draw: Callable[[Axes], None]
    is_over_steps: bool = True
    has_marks: bool = True


@dataclass(frozen=True, eq=False, slots=True)
class Baseline:
    """A run to compare with.

    Attributes:
        run: That run.
        name: What it is called.
        other: What the run that is compared with it is called.
    """

    run: Run
    name: str
    other: str


def panels_of(run: Run, baseline: Baseline | None = None) -> tuple[list[Panel], Events]:
    """Return the panels that a run has records for, from top to bottom, and the events that all of them mark."""
    found: list[Panel] = []
    lines = losses(run)
    if baseline is not None:
        lines = [*losses(run, baseline.other)[:1], *losses(baseline.run, baseline.name)[:1]]
    if lines:
        found.append(Panel("loss", 2.3, partial(_draw_lines, lines, "loss", "loss")))
    if baseline is not None and (sizes := comparable_sizes(run, baseline.run)) is not None:
        label, *both = sizes
        names = (baseline.other, baseline.name)
        lines = [Line(n, np.array([*v]), np.array([*v.values()])) for n, v in zip(names, both, strict=True)]
        found.append(Panel("total norm", 2.3, partial(_draw_lines, lines, f"{label}, before clipping", label)))
    elif lines := total_norms(run):
        title = "total norm before clipping, and its bound"
        found.append(Panel("total norm, bound", 2.3, partial(_draw_lines, lines, title, "total norm")))
    for kind in ("gradient", "error"):
        if (heat := heat_map(run, kind)) is not None:
            found.append(Panel(f"{kind} norm", 0.9 + max(0.9, 0.18 * len(heat.rows)), partial(_draw_heat, heat)))
    if (factors := factor_map(run)) is not None:
        found.append(Panel("factor", 0.9 + max(0.9, 0.18 * len(factors.rows)), partial(_draw_heat, factors)))
    seen = events(run)
    num_rows = len(seen.sites) + bool(len(seen.skipped))
    if num_rows:
        height = 0.9 + max(0.5, 0.18 * num_rows)
        found.append(Panel("non-finite", height, partial(_draw_events, seen), has_marks=False))
    if (ratios := update_ratios(run)) is not None:
        found.append(Panel("update ratio", 2.3, partial(_draw_ratios, ratios)))
    return found, seen


def depth_panel(sites: Sequence[SiteHealth]) -> Panel | None:
    """Return the panel of norms by site, errors, then weights, then biases; None where fewer than two have one."""
    measure = "norm" if any(row.measure == "norm" for row in sites) else "max_abs"
    sizes = [row for row in sites if row.measure == measure and row.p50 > 0]
    rows: list[tuple[str, SiteHealth]] = []
    for _, part in groupby(sorted(sizes, key=_part), _part):
        known = [*part]
        groups = group([row.site for row in known], MAX_ROWS // 2)
        rows += [(name, max((known[n] for n in at), key=lambda row: (row.mark, row.p50))) for name, at in groups]
    if len(rows) < 2:
        return None
    return Panel(
        "depth", 1.0 + 0.2 * len(rows), partial(_draw_depth, rows, measure), is_over_steps=False, has_marks=False
    )


def _part(row: SiteHealth) -> tuple[str, bool]:
    """Return the comparison group of a site: its kind, biases apart; errors sort first."""
    return kind_of(row.site), row.site.endswith("bias")


def mark_steps(ax: Axes, steps: Steps) -> None:
    """Mark steps by thin red lines, consecutive steps by a red band."""
    if not len(steps):
        return
    for part in np.split(steps, np.flatnonzero(np.diff(steps) > 1) + 1):
        ax.axvline(part[0], color=CURVE_RED, linewidth=0.8, alpha=0.6, zorder=3, gid="event")
        if len(part) > 1:
            ax.axvspan(part[0], part[-1] + 0.5, color=CURVE_RED, alpha=0.08, linewidth=0, zorder=3, gid="event")


def _draw_lines(lines: list[Line], title: str, label: str, ax: Axes) -> None:
    marker = "." if len(lines[0].steps) < 3 else ""
    for n, line in enumerate(lines):
        style: dict[str, Any] = {"color": f"C{n % 10}", "ls": "--" if n else "-", "marker": marker}
        ax.plot(line.steps, _finite(line.values), label=displayable(line.label, 30), **style)
        of = f" ({displayable(line.label, 30)})" if len(lines) > 1 else ""
        _mark_top(ax, line.steps[np.isnan(line.values)], "x", f"NaN{of}")
        _mark_top(ax, line.steps[np.isinf(line.values)], "^", f"infinite{of}")
    _scale(ax, [line.values for line in lines])
    ax.set_ylabel(label)
    _head(ax, title)


def _draw_heat(heat: HeatMap, ax: Axes) -> None:
    from matplotlib.patches import Patch

    scale, colors = colors_of(heat.values, heat.measure)
    last = heat.first + heat.width * heat.values.shape[1]
    extent = (heat.first - 0.5, last - 0.5, len(heat.rows) - 0.5, -0.5)
    ax.imshow(colors, aspect="auto", interpolation="none", extent=extent, origin="upper")
    _name_rows(ax, heat.rows)
    bar = ax.inset_axes((1.01, 0, 0.012, 1))
    ax.figure.colorbar(scale, cax=bar, label=_measure_label(heat.measure))
    kinds = {"zero": (CURVE_ZERO, (heat.values == 0) & (heat.measure != "factor"))}
    kinds["not finite"] = (CURVE_RED, np.isinf(heat.values))
    kinds["not recorded"] = (CURVE_ABSENT, np.isnan(heat.values))
    seen = [Patch(facecolor=c, edgecolor=CURVE_PALE, label=name) for name, (c, cells) in kinds.items() if cells.any()]
    _head(ax, _heat_title(heat), handles=seen)


def colors_of(values: Array, measure: str = "norm") -> tuple[Any, Array]:
    """Return the scale with its colors, and RGBA ``[rows, columns, 4]``; non-finite and missing have own colors.

    Magnitudes have a logarithmic scale and a color for zero. Factors have one from the smallest, at most 0.1, to 1: a
    small range is not stretched over all colors; dark is strong.
    """
    from matplotlib.cm import ScalarMappable
    from matplotlib.colors import LogNorm, to_rgba

    is_plain, is_factor = (values > 0) & np.isfinite(values), measure == "factor"
    low, high = (values[is_plain].min(), values[is_plain].max()) if is_plain.any() else (0.1, 10.0)
    low, high = (min(low, 0.1), 1.0) if is_factor else (low / 2, high * 2) if low == high else (low, high)
    norm = LogNorm(low, high)
    scale = ScalarMappable(norm, "Blues_r" if is_factor else "viridis")
    colors = np.asarray(scale.cmap(norm(np.where(is_plain, values, low))), dtype=np.float64)
    zero = np.zeros_like(is_plain) if is_factor else values == 0
    for color, cells in ((CURVE_ZERO, zero), (CURVE_RED, np.isinf(values)), (CURVE_ABSENT, np.isnan(values))):
        colors[cells] = to_rgba(color)
    return scale, colors


def _heat_title(heat: HeatMap) -> str:
    if heat.measure == "factor":
        over = f"; smallest of {heat.width} steps" if heat.width > 1 else ""
        return f"size after clipping / before, by site and step{over}"
    rows = "parameter" if heat.kind == "gradient" else "layer"
    parts = [f"{_measure_label(heat.measure)} of {heat.kind}s by {rows}"]
    if len(heat.rows) < heat.num_sites:
        parts.append(f"largest of each group, {heat.num_sites} sites in {len(heat.rows)} rows")
    if heat.width > 1:
        parts.append(f"largest of {heat.width} steps")
    if heat.num_left_out:
        parts.append(f"{heat.num_left_out} sites without this record left out")
    if len("; ".join(parts)) <= _WIDEST_TITLE:
        return "; ".join(parts)
    return f"{'; '.join(parts[:2])};\n{'; '.join(parts[2:])}"


def _draw_depth(rows: list[tuple[str, SiteHealth]], measure: str, ax: Axes) -> None:
    at, middle = range(len(rows)), [row.p50 for _, row in rows]
    ax.hlines(
        at, middle, [row.p99 for _, row in rows], color=CURVE_BLUE, alpha=0.5, linewidth=4, label="to the 99 % quantile"
    )
    ax.plot(middle, at, "o", color=CURVE_BLUE, markersize=5, label="median before clipping")
    for n in range(1, len(rows)):
        if _part(rows[n][1]) != _part(rows[n - 1][1]):
            ax.axhline(n - 0.5, color=CURVE_INK, linewidth=0.8, gid="part")
    named = [(row.p50, n) for n, (_, row) in enumerate(rows) if row.mark]
    if named:
        ax.plot(
            *zip(*named, strict=True), "o", color=CURVE_RED, markersize=8, fillstyle="none", label="see the verdict"
        )
    bounds = [row.bound if np.isfinite(row.bound) else np.nan for _, row in rows]
    if np.isfinite(bounds).any():
        ax.plot(bounds, at, "|", color=CURVE_INK, markersize=9, markeredgewidth=1.5, label="bound")
    _name_rows(ax, [name for name, _ in rows])
    ax.set_ylim(len(rows) - 0.4, -0.6)
    ax.set_xscale("log")
    ax.set_xlabel(_measure_label(measure))
    ax.grid(axis="x", color=CURVE_GRID, linewidth=0.6)
    _head(ax, f"{_measure_label(measure)} by site")


def _draw_events(seen: Events, ax: Axes) -> None:
    rows = [*seen.sites, *([("skipped updates", seen.skipped)] if len(seen.skipped) else [])]
    for n, (site, steps) in enumerate(rows):
        color = CURVE_INK if n == len(seen.sites) else (CURVE_PALE if site in seen.expected else CURVE_RED)
        ax.plot(steps, np.full(len(steps), n), ls="none", marker="|", markersize=7, color=color, gid="nonfinite")
    _name_rows(ax, [name for name, _ in rows])
    ax.set_ylim(len(rows) - 0.4, -0.6)
    ax.grid(axis="y", color=CURVE_GRID, linewidth=0.6)
    ax.set_axisbelow(True)
    title = "not finite, in the order of execution"
    if seen.num_sites > len(seen.sites):
        title += f"; the first {len(seen.sites)} sites, {seen.num_sites - len(seen.sites)} more are not shown"
    if seen.expected:
        title += "; grey: infinite with a finite backward, as a mask is"
    _head(ax, title if seen.sites else "skipped updates")


def _draw_ratios(ratios: Ratios, ax: Axes) -> None:
    ax.fill_between(
        ratios.steps, ratios.low, ratios.high, color=CURVE_BLUE, alpha=0.2, linewidth=0, label="smallest to largest"
    )
    positive = np.where(ratios.median > 0, _finite(ratios.median), np.nan)
    marker = "." if len(ratios.steps) < 3 else ""
    label = f"median of {ratios.num_layers}"
    ax.plot(ratios.steps, positive, color=CURVE_BLUE, linewidth=1.1, marker=marker, label=label)
    ax.axhline(COMMON_RATIO, color=CURVE_INK, linewidth=0.8, linestyle="--", label="1e-3 (customary)")
    _mark_top(ax, ratios.steps[ratios.is_infinite], "^", "infinite or NaN")
    still = ratios.steps[ratios.median == 0]
    if len(still):
        style: dict[str, Any] = {
            "color": CURVE_PALE,
            "markersize": 4,
            "transform": ax.get_xaxis_transform(),
            "gid": "zero",
        }
        ax.plot(still, [0.03] * len(still), "v", label="0: no update", **style)
    ax.set_yscale("log")
    known = [v for v in (*ratios.low, *ratios.high) if np.isfinite(v)]
    ax.set_ylim(min([*known, COMMON_RATIO]) / 2, max([*known, COMMON_RATIO]) * 4)
    ax.set_ylabel("|update| / |weight|")
    _head(ax, "ratio of update to weight")


def _finite(values: Array) -> Array:
    return np.where(np.isfinite(values), np.clip(values, -1e200, 1e200), np.nan)  # margins of axes overflow


def _mark_top(ax: Axes, steps: Steps, marker: str, label: str) -> None:
    """Draw one mark per step at the top of the axes; the label once."""
    if len(steps):
        known = {text.get_label() for text in ax.lines}
        style: dict[str, Any] = {
            "color": CURVE_RED,
            "markersize": 5,
            "transform": ax.get_xaxis_transform(),
            "gid": "nonfinite",
        }
        ax.plot(steps, [0.96] * len(steps), marker, label="_nolegend_" if label in known else label, **style)


def _scale(ax: Axes, values: list[Array]) -> None:
    """Use a logarithmic axis where the values span a wide range."""
    known = np.concatenate(values)
    known = known[np.isfinite(known)]
    if len(known) and known.min() > 0 and known.max() / _WIDEST_LINEAR > known.min():
        ax.set_yscale("log")
    ax.margins(y=0.12)


def _name_rows(ax: Axes, names: list[str]) -> None:
    ax.set_yticks(range(len(names)), [displayable(name, _WIDEST_LABEL) for name in names])
    for label in ax.get_yticklabels():
        label.set_parse_math(False)
    ax.tick_params(axis="y", length=0)


def _head(ax: Axes, title: str, handles: list[Any] | None = None) -> None:
    """Write the title on the left and the legend on the right above the axes."""
    ax.set_title(title).set_parse_math(False)
    found = ax.get_legend_handles_labels()[0] if handles is None else handles
    if found:
        legend = ax.legend(
            handles=found, loc="lower right", bbox_to_anchor=(1, 1), ncols=6, frameon=False, borderaxespad=0.1, **_TIGHT
        )
        for text in legend.get_texts():
            text.set_parse_math(False)


def _measure_label(measure: str) -> str:
    return {
        "norm": "norm",
        "total_norm": "total norm",
        "max_abs": "max |x|",
        "mean_abs": "mean |x|",
        "factor": "factor",
    }[measure]
