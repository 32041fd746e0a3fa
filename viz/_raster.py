"""Scenes as PNG and PDF, drawn by matplotlib."""

from __future__ import annotations

import io
from typing import Any

from gradrewrite.viz import _theme as theme
from gradrewrite.viz._fonts import FONT, displayable
from gradrewrite.viz._scene import HEAD, SMALL, TEXT, Line, Scene, colors_of, legend_positions, texts_of

MOST_PIXELS = 30_000  # of one side of a PNG
_LONGEST = 1000  # characters; no text of a scene has more
_POINTS = 72 / 96  # a pixel in points
_STYLES: dict[str, dict[str, Any]] = {  # of texts, as in the style sheet
    "": {"fontsize": TEXT * _POINTS, "color": theme.INK},
    "note": {"fontsize": SMALL * _POINTS, "color": theme.DETAIL},
    "small": {"fontsize": SMALL * _POINTS, "color": theme.INK},
    "head": {"fontsize": HEAD * _POINTS, "color": theme.INK, "weight": "bold"},
}


def scene_to_bytes(scene: Scene, form: str) -> bytes:
    """Return a scene as ``"png"`` (larger ones are scaled to 30,000 pixels) or ``"pdf"``, always the same bytes."""
    import matplotlib
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    scale = min(1.0, MOST_PIXELS / max(scene.width, scene.height))
    figure = Figure(figsize=(scene.width / 96, scene.height / 96), dpi=96 * scale)
    FigureCanvasAgg(figure)
    axes = figure.add_axes((0, 0, 1, 1))
    axes.set_xlim(0, scene.width)
    axes.set_ylim(scene.height, 0)
    axes.set_axis_off()
    with matplotlib.rc_context({"font.family": [FONT], "pdf.fonttype": 42}):
        _draw(axes, scene)
        data = io.BytesIO()
        metadata = {"CreationDate": None} if form == "pdf" else {"Software": None}
        figure.savefig(data, format=form, metadata=metadata, dpi=figure.dpi)
    return data.getvalue()


def _draw(axes: Any, scene: Scene) -> None:
    from matplotlib.collections import PatchCollection, PathCollection
    from matplotlib.patches import Rectangle

    frames = [Rectangle((f.x, f.y), f.width, f.height) for f in scene.frames]
    style: dict[str, Any] = {"facecolor": theme.BAND, "edgecolor": theme.BORDER, "alpha": 0.55, "linewidth": 0.7}
    axes.add_collection(PatchCollection(frames, **style))
    style = {
        "edgecolors": [_line_color(line) for line in scene.lines],
        "linewidths": [line.width * _POINTS for line in scene.lines],
        "linestyles": ["--" if "saved" in line.classes else "-" for line in scene.lines],
    }
    axes.add_collection(PathCollection([_path(line) for line in scene.lines], facecolors="none", **style))
    axes.add_collection(PatchCollection([_arrow(line) for line in scene.lines], color=theme.FAINT))
    colors = [colors_of(box) for box in scene.boxes]
    style = {
        "facecolors": [fill for fill, *_ in colors],
        "edgecolors": [edge for _, edge, _ in colors],
        "linewidths": [1.6 if is_strong else 0.8 for *_, is_strong in colors],
    }
    boxes = [Rectangle((box.x, box.y), box.width, box.height) for box in scene.boxes]
    axes.add_collection(PatchCollection(boxes, **style))
    marks = [(box, mark) for box in scene.boxes for mark in box.marks]
    places = [Rectangle((box.x + mark.x, box.y + mark.y), mark.width, mark.height) for box, mark in marks]
    axes.add_collection(PatchCollection(places, facecolors=[mark.color for _, mark in marks]))
    for entry, (x, y) in zip(scene.legend, legend_positions(scene), strict=True):
        axes.add_patch(Rectangle((x, y), 14, 11, facecolor=entry.color, edgecolor=entry.edge))
    for label in texts_of(scene):
        axes.text(label.x, label.y, displayable(label.text, _LONGEST), parse_math=False, **_STYLES[label.style])


def _path(line: Line) -> Any:
    from matplotlib.path import Path

    rest = Path.LINETO if len(line.points) == 2 else Path.CURVE4
    return Path(line.points, [Path.MOVETO, *[rest] * (len(line.points) - 1)])


def _arrow(line: Line) -> Any:
    """Return the head of an arrow at the end of a line."""
    from matplotlib.patches import Polygon

    (ax, ay), (x, y) = line.points[-2:]
    length = max(((x - ax) ** 2 + (y - ay) ** 2) ** 0.5, 1e-9)
    dx, dy = (x - ax) / length * 6, (y - ay) / length * 6
    return Polygon([(x, y), (x - dx - dy / 2, y - dy + dx / 2), (x - dx + dy / 2, y - dy - dx / 2)])


def _line_color(line: Line) -> tuple[float, float, float, float]:
    from matplotlib.colors import to_rgba

    return to_rgba(theme.SAVED if "saved" in line.classes else theme.LINE, 0.15 if "fan" in line.classes else 1.0)
