"""The plots of the page: dot plots and bars, the same file for the same figures."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from matplotlib import rc_context
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from benchmarks.bounds import peak_ratio
from benchmarks.cases import CASES, WAYS
from benchmarks.results import Result, Row

STYLE = {"svg.hashsalt": "gradrewrite", "svg.fonttype": "none", "font.size": 9, "font.family": "sans-serif"}
PLAIN, OURS, OTHERS = "#303030", "#1f77b4", "#9a9a9a"
NOT_OURS = (
    "plain",
    "by hand",
    "plain, clip_grad_norm_",
    "nan_asserts",
    "eager",
    "eager, hooks",
    "eager, detect_anomaly",
)
SIZES = ("small", "medium", "large", "huge")


def figures(result: Result) -> dict[str, Figure]:
    """The figures of a run, by their names."""
    makers: dict[str, Callable[[Result], Figure]] = {
        "steps": _steps,
        "memory": _memory,
        "compilation": _compilation,
        "launches": _launches,
    }
    with rc_context(STYLE):
        return {name: makers[name](result) for name in drawn(result)}


def drawn(result: Result) -> list[str]:
    """Names of the figures for which a run has numbers."""
    has = {
        "steps": any(row.ratio for row in result.rows),
        "memory": any(row.peak for row in result.rows),
        "compilation": any(row.cold for row in result.rows),
        "launches": any(row.launches for row in result.rows),
    }
    return [name for name, is_drawn in has.items() if is_drawn]


def save(figure: Figure, path: Path) -> None:
    """Write SVG without a date."""
    with rc_context(STYLE):
        figure.savefig(path, format="svg", metadata={"Date": None})
    # matplotlib leaves blanks at the ends of lines
    path.write_text("\n".join(line.rstrip() for line in path.read_text().splitlines()) + "\n")


def _panels(result: Result, title: str) -> tuple[Figure, list[tuple[Axes, str, list[Row]]]]:
    """One panel a model, with the rows of its largest size, plain first at the top."""
    largest = {CASES[case].model: case for case in sorted(result.cases(), key=lambda c: SIZES.index(CASES[c].size))}
    chosen = [case for case in result.cases() if case in largest.values()]
    order = _order(result)
    height = 0.9 + 0.19 * len(order)
    figure = Figure(figsize=(2.6 + 2.1 * len(chosen), height), layout="constrained")
    axes = figure.subplots(1, len(chosen), squeeze=False)[0]
    for number, (panel, case) in enumerate(zip(axes, chosen, strict=True)):
        panel.set_title(f"{CASES[case].model}, {CASES[case].size}", fontsize=9)
        panel.set_yticks(range(len(order)), order if number == 0 else [])
        panel.set_ylim(-0.6, len(order) - 0.4)
        panel.grid(axis="x", color="#e6e6e6")
        panel.set_axisbelow(True)
        for side in ("top", "right", "left"):
            panel.spines[side].set_visible(False)
        panel.tick_params(axis="y", length=0)
    figure.suptitle(title, fontsize=10)
    return figure, [
        (panel, case, [row for row in result.of(case) if row.way in order])
        for panel, case in zip(axes, chosen, strict=True)
    ]


def _place(row: Row, result: Result) -> int:
    return _order(result).index(row.way)


def _order(result: Result) -> list[str]:
    """The ways from the bottom to the top, the same in all panels."""
    timed = {row.way for row in result.rows if row.milliseconds is not None}
    return [way for way in WAYS if way in timed][::-1]


def _color(way: str) -> str:
    if way == "plain":
        return PLAIN
    return OURS if WAYS[way].how == "gradrewrite" else OTHERS


def _steps(result: Result) -> Figure:
    figure, panels = _panels(result, "time of a step over plain torch.compile (log scale)")
    for panel, _, rows in panels:
        panel.set_xscale("log")
        panel.axvline(1, color=PLAIN, linewidth=0.8)
        for row in rows:
            if row.ratio is not None:
                low, middle, high = row.ratio
                at = _place(row, result)
                panel.plot([low, high], [at, at], color=_color(row.way), linewidth=2, solid_capstyle="round")
                panel.plot([middle], [at], "o", color=_color(row.way), markersize=4)
        _plain_ticks(panel, [r for row in rows if row.ratio for r in row.ratio])
    return figure


def _plain_ticks(panel: Axes, values: list[float]) -> None:
    """Ticks of a logarithmic axis as plain numbers."""
    low, high = min(values), max(values)
    ticks = [tick for tick in (0.25, 0.5, 1, 1.5, 2, 3, 5, 10) if low * 0.9 <= tick <= high * 1.1]
    panel.set_xticks(ticks, [f"{tick:g}" for tick in ticks])
    panel.minorticks_off()


def _memory(result: Result) -> Figure:
    figure, panels = _panels(result, "peak memory over plain torch.compile")
    for panel, case, rows in panels:
        plain = result.row(case, "plain")
        assert plain is not None
        panel.axvline(1, color=PLAIN, linewidth=0.8)
        for row in rows:
            if row.peak is not None:
                panel.plot([peak_ratio(row, plain)], [_place(row, result)], "o", color=_color(row.way), markersize=4)
    return figure


def _compilation(result: Result) -> Figure:
    figure, panels = _panels(result, "processor seconds of the first step: cold (bars), warm (dark)")
    for panel, _, rows in panels:
        for row in rows:
            at = _place(row, result)
            panel.barh(at, row.cold or 0, 0.6, color=_color(row.way), alpha=0.45)
            panel.barh(at, row.warm or 0, 0.6, color=_color(row.way))
    return figure


def _launches(result: Result) -> Figure:
    figure, panels = _panels(result, "launches of a step")
    for panel, _, rows in panels:
        for row in rows:
            panel.barh(_place(row, result), row.launches or 0, 0.6, color=_color(row.way))
    return figure
