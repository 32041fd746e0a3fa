"""Panels of curves: loss and norm of a run."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from gradrewrite.diagnostics.clipping import clips_of
from gradrewrite.diagnostics.comparison import TOTAL_NORM, comparable_sizes
from gradrewrite.diagnostics.run_log import Run, loss_series
from gradrewrite.viz._fonts import displayable
from gradrewrite.viz._theme import NOT_FINITE

if TYPE_CHECKING:
    from matplotlib.axes import Axes

_LARGEST = 1e200  # margins of axes overflow
_WIDEST_LINEAR = 30.0  # largest over smallest value that a linear axis shows well
_WIDEST_LABEL = 30  # characters
_STRETCHED = 10.0  # times the largest value of the lines that stay finite: where the axis ends
_OWN = "this run"
_LOGGED = "@run"  # the site of what ``monitor.log`` takes
_MOST_LOGGED = 12  # panels

Line = tuple[str, Mapping[int, float]]  # label, values by step: NaN and infinities too


@dataclass(frozen=True, slots=True)
class Baseline:
    """A run to compare with, and its name."""

    run: Run
    name: str


@dataclass(frozen=True, slots=True)
class Panel:
    """Lines of one measure over the steps."""

    name: str  # ``"loss"``, ``"norm"`` or the name of a logged scalar
    title: str  # title above the axes
    lines: Sequence[Line]

    def draw(self, ax: Axes, bad_steps: Sequence[int], run: Run) -> None:
        """Draw the lines over the updates of a run; mark non-finite values and bad steps in red."""
        values = [value for _, line in self.lines for value in line.values() if math.isfinite(value)]
        if values and min(values) > 0 and max(values) / _WIDEST_LINEAR > min(values):
            ax.set_yscale("log")
        highest = self._highest()
        for number, (label, line) in enumerate(self.lines):
            shown = [min(max(v, -_LARGEST), _LARGEST) if math.isfinite(v) else math.nan for v in line.values()]
            style, marker = "--" if number else "-", "." if len(line) < 3 else ""
            at = [run.position(step) for step in line]
            ax.plot(at, shown, color=f"C{number}", ls=style, marker=marker, label=displayable(label, _WIDEST_LABEL))
        top = ax.get_xaxis_transform()
        bad = {step for _, line in self.lines for step, v in line.items() if not math.isfinite(v)}
        crosses = [run.position(step) for step in sorted(bad)]
        if crosses:
            ax.plot(crosses, [0.96] * len(crosses), "x", color=NOT_FINITE, transform=top, label="not finite")
        ax.vlines(
            [run.position(step) for step in bad_steps], 0, 1, transform=top, color=NOT_FINITE, linewidth=0.8, alpha=0.4
        )
        ax.margins(y=0.12)
        if highest is not None:
            ax.set_ylim(top=highest)
        ax.set_title(self.title)
        if len(ax.lines) > 1:
            legend = ax.legend(loc="lower right", bbox_to_anchor=(1, 1), ncols=4, frameon=False, borderaxespad=0.1)
            for text in legend.get_texts():
                text.set_parse_math(False)

    def _highest(self) -> float | None:
        """Return the upper end of the axis, or None for all values.

        Lines with values that are not finite do not stretch it beyond 10 times the others.
        """
        finite = [[v for v in line.values() if math.isfinite(v)] for _, line in self.lines]
        whole = [max(v) for v, (_, line) in zip(finite, self.lines, strict=True) if v and len(v) == len(line)]
        most = _STRETCHED * max(whole, default=0.0)
        return most if 0 < most < max((max(values) for values in finite if values), default=0.0) else None


def panels_of(run: Run, baselines: Sequence[Baseline] = ()) -> list[Panel]:
    """Return the recorded panels of a run and its baselines."""
    runs = [(_OWN, run), *((one.name, one.run) for one in baselines)]
    lines = [(label, series.by_step) for label, one in runs if (series := loss_series(one)) is not None]
    norm = _norm_panel(run, baselines)
    logged = [_logged_panel(name, runs) for name in _logged_names(run)]
    return [*([Panel("loss", "loss", lines)] if lines else []), *([norm] if norm is not None else []), *logged]


def _logged_names(run: Run) -> list[str]:
    """Return the names of logged scalars, without the loss."""
    addresses = [address for address in run.series if address.endswith(_LOGGED) and address != f"loss{_LOGGED}"]
    return [address.removesuffix(_LOGGED) for address in addresses][:_MOST_LOGGED]


def _logged_panel(name: str, runs: Sequence[tuple[str, Run]]) -> Panel:
    address = f"{name}{_LOGGED}"
    return Panel(name, name, [(label, run.series[address].by_step) for label, run in runs if address in run.series])


def trials_of(trials: Mapping[str, Sequence[float]]) -> Panel:
    """Return the losses of trainings from one start."""
    lines = [(name, dict(enumerate(losses))) for name, losses in trials.items()]
    return Panel("trials", "loss of each trial, from one start on the same batches", lines)


def _norm_panel(run: Run, baselines: Sequence[Baseline]) -> Panel | None:
    """Return the panel of the norm, with its only bound."""
    both = [(one.name, comparable_sizes(run, one.run)) for one in baselines]
    known = [(name, found) for name, found in both if found is not None]
    own = known[0][1] if known else comparable_sizes(run, run)
    if own is None:
        return None
    measure, sizes, _ = own
    lines = [(_OWN, sizes), *((name, found[2]) for name, found in known if found[0] == measure)]
    clips = [clip for clip in clips_of(run) if clip.record == "total_norm"]
    if len(clips) == 1 and measure == TOTAL_NORM:
        bounds = {step: bound for step, bound in zip(clips[0].steps, clips[0].bounds, strict=True) if bound < math.inf}
        lines += [("bound", bounds)] if bounds else []
    return Panel("norm", f"{measure}, before clipping", lines)
