"""Panels of curves: loss and norm of a run."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from gradrewrite.diagnostics.clipping import clips_of
from gradrewrite.diagnostics.comparison import TOTAL_NORM, comparable_sizes, loss_series
from gradrewrite.diagnostics.run_log import Run
from gradrewrite.viz._fonts import displayable
from gradrewrite.viz._theme import CUT

if TYPE_CHECKING:
    from matplotlib.axes import Axes

_LARGEST = 1e200  # margins of axes overflow
_WIDEST_LINEAR = 30.0  # largest over smallest value that a linear axis shows well
_WIDEST_LABEL = 30  # characters
_OWN = "this run"

Line = tuple[str, Mapping[int, float]]  # label, values by step: NaN and infinities too


@dataclass(frozen=True, slots=True)
class Baseline:
    """A run to compare with, and its name."""

    run: Run
    name: str


@dataclass(frozen=True, slots=True)
class Panel:
    """Lines of one measure over the steps."""

    name: str  # ``"loss"`` or ``"norm"``
    title: str  # title above the axes
    lines: Sequence[Line]

    def draw(self, ax: Axes, bad_steps: Sequence[int]) -> None:
        """Draw the lines; mark non-finite values and bad steps in red."""
        values = [value for _, line in self.lines for value in line.values() if math.isfinite(value)]
        if values and min(values) > 0 and max(values) / _WIDEST_LINEAR > min(values):
            ax.set_yscale("log")
        for number, (label, line) in enumerate(self.lines):
            shown = [min(max(v, -_LARGEST), _LARGEST) if math.isfinite(v) else math.nan for v in line.values()]
            style, marker = "--" if number else "-", "." if len(line) < 3 else ""
            ax.plot(
                [*line], shown, color=f"C{number}", ls=style, marker=marker, label=displayable(label, _WIDEST_LABEL)
            )
        top = ax.get_xaxis_transform()
        crosses = sorted({step for _, line in self.lines for step, v in line.items() if not math.isfinite(v)})
        if crosses:
            ax.plot(crosses, [0.96] * len(crosses), "x", color=CUT, transform=top, label="not finite")
        ax.vlines(bad_steps, 0, 1, transform=top, color=CUT, linewidth=0.8, alpha=0.4)
        ax.margins(y=0.12)
        ax.set_title(self.title)
        if len(ax.lines) > 1:
            legend = ax.legend(loc="lower right", bbox_to_anchor=(1, 1), ncols=4, frameon=False, borderaxespad=0.1)
            for text in legend.get_texts():
                text.set_parse_math(False)


def panels_of(run: Run, baseline: Baseline | None = None) -> list[Panel]:
    """Return the recorded panels of a run and its baseline."""
    runs = [(_OWN, run), *([(baseline.name, baseline.run)] if baseline is not None else [])]
    losses = [(label, series) for label, one in runs if (series := loss_series(one)) is not None]
    lines = [(label, dict(zip(one.steps, one.values, strict=True))) for label, one in losses]
    norm = _norm_panel(run, baseline)
    return [*([Panel("loss", "loss", lines)] if lines else []), *([norm] if norm is not None else [])]


def _norm_panel(run: Run, baseline: Baseline | None) -> Panel | None:
    """Return the panel of the norm, with its only bound."""
    both = comparable_sizes(run, baseline.run) if baseline is not None else None
    found = both or comparable_sizes(run, run)
    if found is None:
        return None
    measure, own, other = found
    lines = [(_OWN, own)]
    if both is not None and baseline is not None:
        lines.append((baseline.name, other))
    clips = [clip for clip in clips_of(run) if clip.record == "total_norm"]
    if len(clips) == 1 and measure == TOTAL_NORM:
        bounds = {step: bound for step, bound in zip(clips[0].steps, clips[0].bounds, strict=True) if bound < math.inf}
        lines += [("bound", bounds)] if bounds else []
    return Panel("norm", f"{measure}, before clipping", lines)
