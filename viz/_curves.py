"""``plot``: curves of a training run from its records."""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from io import StringIO
from itertools import pairwise
from typing import TYPE_CHECKING, Any, Literal, TypeGuard, get_args

from gradrewrite.diagnostics.run_log import Run, Step, last_run, read_jsonl
from gradrewrite.viz._curve_data import Events
from gradrewrite.viz._fonts import displayable, figure_style
from gradrewrite.viz._panels import Baseline, Panel, mark_steps, panels_of

if TYPE_CHECKING:
    from matplotlib.figure import Figure

    from gradrewrite.monitoring.monitor import Monitor

    Source = Monitor | str | os.PathLike[str] | Sequence[Step]

Format = Literal["png", "svg", "pdf"]

_WIDTH = 12.0  # inches; 1,000 columns of a map are more than 1,000 pixels
_DPI = 150
_HEAD = 0.7
_WIDEST_TITLE = 100
_METADATA: dict[Format, dict[str, Any]] = {"png": {}, "svg": {"Date": None}, "pdf": {"CreationDate": None}}


@dataclass(frozen=True, eq=False, slots=True)
class Curves:
    """Curves of a training run, as ``plot`` returns them.

    Attributes:
        run: The training run.
        title: Title above the panels.
        num_runs: How many runs the source had; the last is drawn.
        baseline: The run that it is compared with, if any.
    """

    run: Run
    title: str
    num_runs: int = 1
    baseline: Baseline | None = None

    @property
    def panels(self) -> tuple[str, ...]:
        """Names of the panels, from top to bottom; a panel without records is left out."""
        return tuple(panel.name for panel in panels_of(self.run, self.baseline)[0])

    def figure(self) -> Figure:
        """Return a new matplotlib figure; pyplot is not used."""
        with figure_style():
            return self._draw()

    def render(self, path: str | os.PathLike[str], format: Format = "png") -> str:
        """Write ``path.format``; equal runs give equal bytes, with one version of matplotlib.

        Args:
            path: Where, without the extension.
            format: ``"png"``, ``"svg"`` or ``"pdf"``.

        Returns:
            The path of the file.

        Raises:
            ValueError: The format is none of these.
            OSError: The file cannot be written; its folder must exist.
        """
        if format not in _METADATA:
            raise ValueError(f"Curves.render: format is one of {', '.join(get_args(Format))}, got {format!r}")
        written = f"{os.fspath(path)}.{format}"
        with figure_style():
            self._draw().savefig(written, format=format, dpi=_DPI, metadata=_METADATA[format])
        return written

    def _repr_svg_(self) -> str:
        """Return SVG, for notebooks."""
        text = StringIO()
        with figure_style():
            self._draw().savefig(text, format="svg", metadata=_METADATA["svg"])
        return text.getvalue()

    def _draw(self) -> Figure:
        from matplotlib.figure import Figure

        panels, seen = panels_of(self.run, self.baseline)
        height = _HEAD + (sum(panel.height for panel in panels) or 1.5)
        figure = Figure(figsize=(_WIDTH, height), layout="constrained")
        figure.suptitle(self._heading(seen), x=0.01, ha="left", fontsize=11).set_parse_math(False)
        if panels:
            draw_panels(figure, panels, seen, [self.run, *([self.baseline.run] if self.baseline is not None else [])])
            fix_layout(figure)
        else:
            figure.text(0.5, 0.4, _why_empty(self.run), ha="center", va="center", fontsize=11).set_parse_math(False)
        return figure

    def _heading(self, seen: Events) -> str:
        steps = self.run.steps
        parts = [f"steps {steps[0].step} to {steps[-1].step}, {_count(len(steps), 'row')}" if steps else "no rows"]
        if self.num_runs > 1:
            parts.append(f"the last of {self.num_runs} runs in the file")
        if len(seen.steps):
            parts.append(f"{_count(len(seen.steps), 'step')} not finite (red)")
        if len(seen.skipped):
            parts.append(f"{_count(len(seen.skipped), 'update')} skipped")
        return f"{displayable(self.title, _WIDEST_TITLE)}\n{'; '.join(parts)}"


def plot(source: Source, *, baseline: Source | None = None, title: str = "") -> Curves:
    """Plot the records of a training run over its steps, one panel below the other.

    Loss (``monitor.log("loss", loss)``, or ``Observe("max")`` where ``gr.tap(loss, "loss")`` stands); norms of
    gradients and of errors, layer by step; total norms and their bounds; the factors of clips, site by step;
    what was not finite; ratios of update to weight (``gr.guard(..., update_ratios=True)``). What is not finite is
    marked, never left out. Of several runs in one file the last is drawn.

    Args:
        source: A monitor (which waits for the device), the path of a file that ``monitor.to_jsonl`` wrote, or steps.
        baseline: Another run, in any of these forms and of any length: its loss and its norms before clipping are
            drawn into the panels of the loss and of the total norm.
        title: Title above the panels; the name of the file, or "training run", if empty.

    Returns:
        Curves: ``render`` it into a file, or show it in a notebook.

    Raises:
        TypeError: ``source`` is none of these.
        OSError: The file cannot be read.
        ValueError: The file has a line that is none of the monitor's.

    Example:
        >>> from gradrewrite import Step
        >>> plot([Step(0, {"loss@run": 2.0}), Step(1, {"loss@run": 1.5})]).panels
        ('loss',)
    """
    steps = steps_of(source)
    num_runs = 1 + sum(after.step <= before.step for before, after in pairwise(steps))
    return Curves(last_run(steps), title or name_of(source, "training run"), num_runs, baseline_of(source, baseline))


def baseline_of(source: Source, baseline: Source | None) -> Baseline | None:
    """Return the last run of a baseline with its name and that of the run."""
    if baseline is None:
        return None
    name, other = name_of(baseline, "baseline"), name_of(source, "this run")
    return Baseline(last_run(steps_of(baseline)), f"{name} (baseline)" if name == other else name, other)


def name_of(source: Source, otherwise: str) -> str:
    """Return the name of a file; another where the source is none."""
    return os.path.basename(os.fspath(source)) if isinstance(source, str | os.PathLike) else otherwise


def steps_of(source: Source) -> list[Step]:
    """Return the steps of a source; raise the errors of ``plot``."""
    if is_monitor(source):
        return source.steps()
    if isinstance(source, str | os.PathLike):
        return read_jsonl(source)
    steps = [step for step in source if isinstance(step, Step)] if isinstance(source, Sequence) else []
    if not isinstance(source, Sequence) or len(steps) < len(source):
        got = type(source).__name__
        raise TypeError(f"viz.plot takes a Monitor, the path of its JSON lines, or a sequence of Step; got {got}")
    return steps


def draw_panels(figure: Figure, panels: Sequence[Panel], seen: Events, runs: Sequence[Run]) -> None:
    """Draw panels below each other, those over steps over all steps of the runs."""
    from matplotlib.ticker import MaxNLocator

    heights = [panel.height for panel in panels]
    grid = figure.add_gridspec(len(panels), 1, height_ratios=heights)
    axes: list[Any] = []
    for n, panel in enumerate(panels):
        ax = figure.add_subplot(grid[n], sharex=axes[0] if axes else None)
        panel.draw(ax)
        if panel.has_marks:
            mark_steps(ax, seen.steps)
        axes.append(ax)
    if not panels[-1].is_over_steps:
        return
    numbers = [run.steps[n].step for run in runs if run.steps for n in (0, -1)]
    axes[-1].set_xlim(min(numbers) - 0.5, max(numbers) + 0.5)
    axes[-1].xaxis.set_major_locator(MaxNLocator(integer=True, steps=[1, 2, 5, 10], min_n_ticks=1))
    axes[-1].set_xlabel("step (number of the backward)")


def fix_layout(figure: Figure) -> None:
    """Run the layout and round it: the solver's last digits vary between calls, and SVG ids are made of them."""
    engine = figure.get_layout_engine()
    assert engine is not None
    engine.execute(figure)
    figure.set_layout_engine("none")
    for ax in figure.axes:
        left, bottom, width, height = (round(edge, 6) for edge in ax.get_position().bounds)
        ax.set_position((left, bottom, width, height))


def _count(number: int, what: str) -> str:
    return f"{number} {what}{'' if number == 1 else 's'}"


def _why_empty(run: Run) -> str:
    if not run.steps:
        return "No rows: nothing was recorded."
    wanted = "norms of gradients or errors, a loss, clips, or update ratios"
    return f"Nothing here is drawn as a curve: the {len(run.series)} records are none of {wanted}."


def is_monitor(source: Any) -> TypeGuard[Monitor]:
    """Whether an object is a ``Monitor``; where that class was never imported there is none."""
    module = sys.modules.get("gradrewrite.monitoring.monitor")
    return module is not None and isinstance(source, module.Monitor)
