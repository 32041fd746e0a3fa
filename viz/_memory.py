"""``plot_memory``: bars of the bytes kept for the backward."""

from __future__ import annotations

import math
import os
from dataclasses import dataclass
from typing import TYPE_CHECKING

from gradrewrite.diagnostics.memory import Memory, size_of
from gradrewrite.viz import _theme as theme
from gradrewrite.viz._curves import Format, svg_of, write_figure
from gradrewrite.viz._fonts import displayable, figure_style

if TYPE_CHECKING:
    from matplotlib.figure import Figure

_WIDTH, _HEAD, _ROW = 9.0, 1.2, 0.34  # inches
_WIDEST = 60  # characters of a name


@dataclass(frozen=True, eq=False, slots=True)
class MemoryBars:
    """Bars by module, as ``plot_memory`` returns them.

    Attributes:
        memory: The bytes.
        title: Title above the bars.
    """

    memory: Memory
    title: str

    def figure(self) -> Figure:
        """Return a new matplotlib figure; pyplot is not used."""
        from matplotlib.figure import Figure
        from matplotlib.ticker import FuncFormatter, MultipleLocator

        memory, modules = self.memory, self.memory.largest_modules()
        host = f", {size_of(memory.host_bytes)} in host memory" if memory.host_bytes else ""
        totals = f"{size_of(memory.plain_bytes)} kept for the backward, {size_of(memory.policy_bytes)} with the policy"
        height = _HEAD + _ROW * max(len(modules), 1)
        with figure_style():
            figure = Figure(figsize=(_WIDTH, height), layout="constrained")
            title = f"{displayable(self.title, _WIDEST)}\n{totals}{host}".lstrip()
            figure.suptitle(title, x=0.01, ha="left", fontsize=11).set_parse_math(False)
            axes = figure.subplots()
            ways = (("plain", theme.SAVED), ("with the policy", theme.ACCENT))
            for number, (label, color) in enumerate(ways):
                places = [row + (number - 0.5) * 0.4 for row in range(len(modules))]
                axes.barh(places, [sizes[number] for sizes in modules.values()], 0.38, color=color, label=label)
            axes.set_yticks(range(len(modules)), [displayable(name, _WIDEST) for name in modules])
            axes.invert_yaxis()  # the forward runs from top to bottom
            largest = max((max(sizes) for sizes in modules.values()), default=1)
            axes.xaxis.set_major_locator(MultipleLocator(2 ** max(math.ceil(math.log2(max(largest, 1) / 8)), 0)))
            axes.xaxis.set_major_formatter(FuncFormatter(lambda size, _: size_of(round(size))))
            axes.legend(frameon=False)
        return figure

    def render(self, path: str | os.PathLike[str], format: Format = "png") -> str:
        """Write ``path.format``, with the results and errors of ``Curves.render``."""
        return write_figure("MemoryBars", self.figure, path, format)

    def _repr_svg_(self) -> str:
        return svg_of(self.figure())


def plot_memory(memory: Memory, *, title: str = "") -> MemoryBars:
    """Plot the bytes kept for the backward by module, without and with the policy.

    The 20 largest modules have two bars each, in the order of the forward; the others are one row.

    Args:
        memory: What ``model.memory(...)`` returned.
        title: Title above the bars.

    Returns:
        MemoryBars: ``render`` it into a file, or show it in a notebook.

    Raises:
        TypeError: ``memory`` is no ``Memory``.

    Example:
        >>> import torch, gradrewrite as gr
        >>> net = torch.nn.Sequential(torch.nn.Linear(64, 64), torch.nn.Tanh())
        >>> len(plot_memory(gr.transform(net, []).memory(torch.ones(16, 64))).figure().axes)
        1
    """
    if not isinstance(memory, Memory):
        raise TypeError(f"plot_memory takes what model.memory(...) returned, got {type(memory).__name__}")
    return MemoryBars(memory, title)
