"""``plot``: curves of a training run from its records."""

from __future__ import annotations

import base64
import html
import os
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from io import BytesIO
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, TypeGuard, get_args

from gradrewrite._utils.files import written_whole
from gradrewrite.diagnostics.nonfinite_steps import bad_steps
from gradrewrite.diagnostics.run_file import read_jsonl
from gradrewrite.diagnostics.run_log import Run, Step, last_run
from gradrewrite.viz._fonts import displayable, figure_style
from gradrewrite.viz._maps import Map, maps_of
from gradrewrite.viz._panels import Baseline, Panel, panels_of

if TYPE_CHECKING:
    from matplotlib.figure import Figure

    from gradrewrite.monitoring.monitor import Monitor

    Source = Monitor | str | os.PathLike[str] | Sequence[Step]

Format = Literal["png", "svg", "pdf"]

_WIDTH, _HEAD, _PANEL = 12.0, 0.7, 2.3  # inches
_DPI = 150
_WIDEST_TITLE = 100  # characters
_METADATA: dict[Format, dict[str, Any]] = {"png": {}, "svg": {"Date": None}, "pdf": {"CreationDate": None}}


@dataclass(frozen=True, eq=False, slots=True)
class Curves:
    """Curves of a training run, as ``plot`` returns them.

    Attributes:
        run: The training run.
        title: Title above the panels.
        baselines: The runs that it is drawn with.
    """

    run: Run
    title: str
    baselines: tuple[Baseline, ...] = ()

    @property
    def panels(self) -> tuple[str, ...]:
        """Names of the panels, from top to bottom; a panel without records is left out."""
        panels = [panel.name for panel in panels_of(self.run, self.baselines)]
        return (*panels, *(f"{one.name} by iteration" for one in maps_of(self.run)))

    def figure(self) -> Figure:
        """Return a new matplotlib figure; pyplot is not used."""
        bad = [one.step.step for one in bad_steps(self.run)]
        nothing = "neither a loss nor norms or largest values of gradients or errors were recorded."
        why_empty = f"Nothing to draw: {nothing}" if self.run.steps else "No steps: nothing was recorded."
        panels: list[Panel | Map] = [*panels_of(self.run, self.baselines), *maps_of(self.run)]
        return figure_of(panels, self.run, self._heading(len(bad)), bad, why_empty)

    def render(self, path: str | os.PathLike[str], format: Format = "png") -> str:
        """Write ``path.format``; equal runs give equal bytes, with one version of matplotlib.

        Args:
            path: Where; folder and extension are added where they are missing.
            format: ``"png"``, ``"svg"`` or ``"pdf"``.

        Returns:
            The path of the file.

        Raises:
            ValueError: The format is none of these.
            OSError: The file cannot be written.
        """
        return write_figure("Curves", self.figure, path, format)

    def _repr_svg_(self) -> str:
        return svg_of(self.figure())

    def _heading(self, num_bad: int) -> str:
        run = self.run
        parts = [run.span(run.steps[0].step, run.steps[-1].step) if run.steps else "no steps", *run.resumed_text]
        parts += [f"the last of {run.num_before + 1} runs in the file"] if run.num_before else []
        parts += [f"not finite (red): {num_bad}"] if num_bad else []
        return f"{displayable(self.title, _WIDEST_TITLE)}\n{'; '.join(parts)}".lstrip()


def plot(source: Source, *, baseline: Source | Mapping[str, Source] | None = None, title: str = "") -> Curves:
    """Plot loss and norm of a training run by step.

    The loss is that of ``monitor.log("loss", loss)``, or of ``Observe("max")`` where ``gr.tap(loss, "loss")`` stands.
    The norm is the total norm of the gradients before clipping, with the bound of the clip if there is one clip, else
    the norm of all gradients or errors that were recorded, or the largest of their absolute values. What is not finite
    is marked, never left out. What was recorded in 8 iterations of a loop or more, or calls of a module, is a map, its
    size by iteration and step. Of several runs in one file the last is drawn.

    Args:
        source: A monitor (which waits for the device), the path of a file that ``monitor.to_jsonl`` wrote, or steps.
        baseline: Another run, in any of these forms and of any length, or several by their names: losses and norms are
            drawn into the panels. A run that ends with values that are not finite does not stretch the axes.
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
    return Curves(last_run(steps), title or name_of(source, "training run"), baselines_of(baseline))


def baselines_of(baseline: Source | Mapping[str, Source] | None) -> tuple[Baseline, ...]:
    """Return the last run of each baseline with its name."""
    if isinstance(baseline, Mapping):
        return tuple(Baseline(last_run(steps_of(source)), name) for name, source in baseline.items())
    return () if baseline is None else (Baseline(last_run(steps_of(baseline)), name_of(baseline, "baseline")),)


def figure_of(
    panels: Sequence[Panel | Map], run: Run, heading: str = "", bad: Sequence[int] = (), why_empty: str = ""
) -> Figure:
    """Return panels as a figure over the updates of a run, with the steps that are not finite in red."""
    from matplotlib.figure import Figure
    from matplotlib.ticker import MaxNLocator

    height = _HEAD + _PANEL * max(len(panels), 1)
    with figure_style():
        figure = Figure(figsize=(_WIDTH, height))
        figure.suptitle(heading, x=0.01, ha="left", fontsize=11).set_parse_math(False)
        if not panels:
            figure.text(0.5, 0.4, why_empty, ha="center", va="center", fontsize=11)
            return figure
        axes = figure.subplots(len(panels), sharex=True, squeeze=False)[:, 0]
        figure.subplots_adjust(left=0.07, right=0.99, top=1 - 0.9 / height, bottom=0.5 / height, hspace=0.25)
        for panel, ax in zip(panels, axes, strict=True):
            if isinstance(panel, Map):
                panel.draw(ax, run)
            else:
                panel.draw(ax, bad, run)
        axes[-1].xaxis.set_major_locator(MaxNLocator(integer=True, steps=[1, 2, 5, 10], min_n_ticks=1))
        axes[-1].set_xlabel("update" if run.has_micro_batches else "step")
    return figure


def _save(figure: Figure, file: Path | BytesIO, format: Format) -> None:
    with figure_style():
        figure.savefig(file, format=format, dpi=_DPI, metadata=_METADATA[format])


def write_figure(name: str, make: Callable[[], Figure], path: str | os.PathLike[str], format: Format) -> str:
    """Write a figure into ``path.format``, and return that; ValueError for an unknown format."""
    if format not in _METADATA:
        raise ValueError(f"{name}.render: format is one of {', '.join(get_args(Format))}, got {format!r}")
    written = f"{os.fspath(path).removesuffix(f'.{format}')}.{format}"
    figure = make()
    with written_whole(written) as part:
        _save(figure, part, format)
    return written


def svg_of(figure: Figure) -> str:
    """Return a figure as SVG."""
    data = BytesIO()
    _save(figure, data, "svg")
    return data.getvalue().decode()


def image_of(figure: Figure, alt: str) -> str:
    """Return a figure as an element of a page."""
    data = base64.b64encode(svg_of(figure).encode()).decode()
    return f'<img alt="{html.escape(alt)}" src="data:image/svg+xml;base64,{data}">'


def name_of(source: Source, otherwise: str) -> str:
    """Return the name of a file; another where the source is none."""
    return os.path.basename(os.fspath(source)) if isinstance(source, str | os.PathLike) else otherwise


def steps_of(source: Source) -> list[Step]:
    """Return the steps of a source; raise the errors of ``plot``."""
    if is_monitor(source):
        return source.steps()
    if isinstance(source, str | os.PathLike):
        return read_jsonl(source)
    if isinstance(source, Sequence) and all(isinstance(step, Step) for step in source):
        return [*source]
    got = type(source).__name__
    raise TypeError(f"a run is a Monitor, the path of its JSON lines, or a sequence of Step; got {got}")


def is_monitor(source: Any) -> TypeGuard[Monitor]:
    """Whether an object is a ``Monitor``; where that class was never imported there is none."""
    module = sys.modules.get("gradrewrite.monitoring.monitor")
    return module is not None and isinstance(source, module.Monitor)
