"""Drawings of rewritten graphs, curves of training runs, memory, exports."""

from gradrewrite.viz._curves import Curves as Curves
from gradrewrite.viz._curves import Format as CurveFormat
from gradrewrite.viz._curves import plot as plot
from gradrewrite.viz._draw import Drawing as Drawing
from gradrewrite.viz._draw import Format as Format
from gradrewrite.viz._draw import draw as draw
from gradrewrite.viz._export import ExportFormat as ExportFormat
from gradrewrite.viz._export import export as export
from gradrewrite.viz._export import to_networkx as to_networkx
from gradrewrite.viz._memory import MemoryBars as MemoryBars
from gradrewrite.viz._memory import plot_memory as plot_memory
from gradrewrite.viz._report import Report as Report
from gradrewrite.viz._report import report as report

__all__ = [
    "CurveFormat",
    "Curves",
    "Drawing",
    "ExportFormat",
    "Format",
    "MemoryBars",
    "Report",
    "draw",
    "export",
    "plot",
    "plot_memory",
    "report",
    "to_networkx",
]
