"""Scenes as PNG and PDF, drawn by matplotlib."""

from __future__ import annotations

import io
from collections.abc import Sequence
from typing import Any

from gradrewrite.viz import _theme as theme
from gradrewrite.viz._fonts import FONT, displayable
from gradrewrite.viz._scene import HEAD, PAD, SMALL, TEXT, Box, Scene, legend_positions

MOST_PIXELS = 30_000  # of one side of a PNG
_LONGEST = 1000  # characters; no text of a scene has more
_POINTS = 72 / 96  # a pixel in points


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
    from matplotlib.path import Path

    frames = [Rectangle((f.x, f.y), f.width, f.height) for f in scene.frames]
    axes.add_collection(
        PatchCollection(frames, facecolor=theme.BAND, edgecolor=theme.BORDER, alpha=0.55, linewidth=0.7)
    )
    for dash in ("-", "--"):
        lines = [n for n in scene.lines if ("saved" in n.classes) == (dash == "--")]
        rest = {len(n.points): Path.LINETO if len(n.points) == 2 else Path.CURVE4 for n in lines}
        paths = [Path(n.points, [Path.MOVETO, *[rest[len(n.points)]] * (len(n.points) - 1)]) for n in lines]
        axes.add_collection(
            PathCollection(
                paths,
                facecolors="none",
                edgecolors=[_line_color(n.classes) for n in lines],
                linewidths=[n.width * _POINTS for n in lines],
                linestyles=dash,
            )
        )
    axes.add_collection(PatchCollection([_arrow(n.points) for n in scene.lines], color=theme.FAINT))
    for edged in (False, True):
        boxes = [b for b in scene.boxes if _is_edged(b) == edged]
        patches = [Rectangle((b.x, b.y), b.width, b.height) for b in boxes]
        edges = [
            theme.CUT if "root_cause" in b.classes else theme.INSERTED_EDGE if edged else theme.LINE for b in boxes
        ]
        fills = [_fill(b) for b in boxes]
        width = 1.6 if edged else 0.8
        axes.add_collection(PatchCollection(patches, facecolors=fills, edgecolors=edges, linewidth=width))
    _write(axes, scene)


def _arrow(points: Sequence[tuple[float, float]]) -> Any:
    """Return the head of an arrow at the end of a line."""
    from matplotlib.patches import Polygon

    (ax, ay), (x, y) = points[-2:]
    length = max(((x - ax) ** 2 + (y - ay) ** 2) ** 0.5, 1e-9)
    dx, dy = (x - ax) / length * 6, (y - ay) / length * 6
    return Polygon([(x, y), (x - dx - dy / 2, y - dy + dx / 2), (x - dx + dy / 2, y - dy - dx / 2)])


def _write(axes: Any, scene: Scene) -> None:
    def text(x: float, y: float, content: str, size: float, color: str, weight: str = "normal") -> None:
        shown = displayable(content, _LONGEST)
        axes.text(x, y, shown, fontsize=size * _POINTS, color=color, weight=weight, parse_math=False, va="baseline")

    for frame in scene.frames:
        text(frame.x + 6, frame.y + 14, frame.text, SMALL, theme.DETAIL)
    for box in scene.boxes:
        if box.small:
            text(box.x + PAD, box.y + box.height / 2 - 3, box.text, TEXT, theme.INK)
            text(box.x + PAD, box.y + box.height - 6, box.small, SMALL, theme.DETAIL)
        else:
            text(box.x + PAD, box.y + box.height / 2 + 4, box.text, TEXT, theme.INK)
    for label in scene.labels:
        is_head = label.style == "head"
        size, color = (HEAD, theme.INK) if is_head else (SMALL, theme.DETAIL)
        text(label.x, label.y, label.text, size, color, "bold" if is_head else "normal")
    from matplotlib.patches import Rectangle

    for entry, (x, y) in zip(scene.legend, legend_positions(scene), strict=True):
        axes.add_patch(Rectangle((x, y), 14, 11, facecolor=entry.color, edgecolor=entry.edge))
        text(x + 19, y + 9.5, entry.text, SMALL, theme.DETAIL)


def _is_edged(box: Box) -> bool:
    return bool({"inserted", "records", "root_cause"} & set(box.classes))


def _fill(box: Box) -> str:
    if box.fill:
        return box.fill
    if "records" in box.classes:
        return theme.RECORDS
    return theme.INSERTED if "inserted" in box.classes else theme.PILL if "pill" in box.classes else theme.PAPER


def _line_color(classes: tuple[str, ...]) -> tuple[float, float, float, float]:
    from matplotlib.colors import to_rgba

    return to_rgba(theme.SAVED if "saved" in classes else theme.LINE, 0.15 if "fan" in classes else 1.0)
