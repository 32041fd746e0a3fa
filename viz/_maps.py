"""Maps of a record by iteration and step, for values that are made many times in one backward."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from gradrewrite.diagnostics.run_log import BACKWARD, MAGNITUDES, Run, Series
from gradrewrite.viz._fonts import displayable
from gradrewrite.viz._theme import INK, NO_DATA, NOT_FINITE, STRONG, WEAK

if TYPE_CHECKING:
    from matplotlib.axes import Axes

LEAST = 8  # iterations
_MOST = 4  # maps
_MOST_COLUMNS = 1000
_WIDEST_TITLE = 80  # characters


@dataclass(frozen=True, slots=True)
class Map:
    """One record at a value: its size by iteration and step."""

    name: str  # ``norm@error:lstm.l0/h``
    rows: Sequence[Mapping[int, float]]  # of each iteration from 0, values by step

    @property
    def title(self) -> str:
        """Title above the axes."""
        return f"{self.name} by iteration, logarithmic"

    def draw(self, ax: Axes, run: Run) -> None:
        """Draw it over the updates of a run; grey is no record, red is NaN or infinite."""
        import numpy as np
        from matplotlib.colors import LinearSegmentedColormap, ListedColormap, LogNorm
        from matplotlib.ticker import NullFormatter

        steps = sorted({step for row in self.rows for step in row})
        steps = steps[:: -(-len(steps) // _MOST_COLUMNS)]
        values = np.array([[row.get(step, math.nan) for step in steps] for row in self.rows])
        is_bad = np.array([[step in row and not math.isfinite(row[step]) for step in steps] for row in self.rows])
        finite = values[np.isfinite(values) & (values > 0)]
        low, high = (float(finite.min()), float(finite.max())) if finite.size else (1.0, 10.0)
        places = [run.position(step) for step in steps]
        width = places[1] - places[0] if len(places) > 1 else 1.0
        edges = np.array([*places, places[-1] + width]) - width / 2
        numbers = np.arange(len(self.rows) + 1) - 0.5
        ax.set_facecolor(NO_DATA)
        ax.grid(visible=False)
        shown = np.ma.masked_where(~np.isfinite(values), np.where(values > 0, values, low))
        norm = LogNorm(low, max(high, low * 10))
        colors = LinearSegmentedColormap.from_list("sizes", [WEAK, STRONG, INK])
        mesh = ax.pcolormesh(edges, numbers, shown, norm=norm, cmap=colors, rasterized=True)
        if is_bad.any():
            bad = np.ma.masked_where(~is_bad, np.ones_like(values))
            ax.pcolormesh(edges, numbers, bad, cmap=ListedColormap([NOT_FINITE]), rasterized=True)
        bar = ax.figure.colorbar(mesh, cax=ax.inset_axes((0.75, 1.04, 0.25, 0.06)), orientation="horizontal")
        bar.ax.xaxis.tick_top()
        bar.ax.xaxis.set_minor_formatter(NullFormatter())
        ax.set_ylabel("iteration")
        ax.set_title(displayable(self.title, _WIDEST_TITLE), y=1.0)


def maps_of(run: Run) -> list[Map]:
    """Return the maps of errors and gradients that were recorded in ``LEAST`` iterations or more.

    They are in the order of the forward, of each value the first magnitude, and of many those with most iterations.
    """
    found: dict[str, dict[int, Series]] = {}
    for one in run.select(MAGNITUDES, BACKWARD - {"outside"}):
        base, _, number = one.at.site.partition("#")
        if one.at.occurrence == 1 and (not number or number.isdecimal()):
            found.setdefault(f"{one.record}@{base}", {})[int(number or 0)] = one
    many = {name: rows for name, rows in found.items() if len(rows) >= LEAST}
    first: dict[str, str] = {}
    for name in sorted(many, key=lambda name: MAGNITUDES.index(name.partition("@")[0])):
        first.setdefault(name.partition("@")[2], name)
    chosen = set(sorted(first.values(), key=lambda name: -len(many[name]))[:_MOST])
    return [
        Map(name, [rows[n].by_step if n in rows else {} for n in range(max(rows) + 1)])
        for name, rows in many.items()
        if name in chosen
    ]
