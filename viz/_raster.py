"""Scenes as PNG and PDF, drawn by matplotlib."""

from __future__ import annotations

import io
from typing import Any

from gradrewrite.viz._fonts import FONT, displayable
from gradrewrite.viz._scene import Box, Scene, legend_positions
from gradrewrite.viz._theme import (
    BAND,
    BORDER,
    CUT,
    FAINT,
    INK,
    INSERTED,
    INSERTED_EDGE,
    LINE,
    PAPER,
    PILL,
    RECORDS,
    SAVED,
)

MOST_PIXELS = 30_000  # of one side of a PNG
_LONGEST = 1000  # characters; no text of a scene has more
_POINTS = 72 / 96  # a pixel in points


def scene_to_bytes(scene: Scene, form: str) -> bytes:
    """Return a scene as PNG or PDF; the same scene gives the same bytes.

    Args:
        scene: The scene.
        form: ``"png"`` (at most 30,000 pixels high: larger pictures are scaled down) or ``"pdf"``.
    """
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
    axes.add_collection(PatchCollection(frames, facecolor=BAND, edgecolor=BORDER, alpha=0.55, linewidth=0.7))
    for dash, cut in (("-", False), ("--", False), ("--", True)):
        lines = [
            n for n in scene.lines if ("saved" in n.classes, "cut" in n.classes) == (dash == "--" and not cut, cut)
        ]
        curve = {2: [Path.MOVETO, Path.LINETO], 4: [Path.MOVETO, Path.CURVE4, Path.CURVE4, Path.CURVE4]}
        paths = [Path(n.points, curve[len(n.points)]) for n in lines]
        axes.add_collection(
            PathCollection(
                paths,
                facecolors="none",
                edgecolors=[_line_color(n.classes) for n in lines],
                linewidths=[n.width * _POINTS for n in lines],
                linestyles=dash,
            )
        )
    for edged in (False, True):
        boxes = [b for b in scene.boxes if _is_edged(b) == edged]
        patches = [Rectangle((b.x, b.y), b.width, b.height) for b in boxes]
        edges = [CUT if "root_cause" in b.classes else INSERTED_EDGE if edged else LINE for b in boxes]
        fills = [_fill(b) for b in boxes]
        width = 1.6 if edged else 0.8
        axes.add_collection(PatchCollection(patches, facecolors=fills, edgecolors=edges, linewidth=width))
    _write(axes, scene)


def _write(axes: Any, scene: Scene) -> None:
    def text(x: float, y: float, content: str, size: float, color: str, weight: str = "normal") -> None:
        shown = displayable(content, _LONGEST)
        axes.text(x, y, shown, fontsize=size * _POINTS, color=color, weight=weight, parse_math=False, va="baseline")

    for frame in scene.frames:
        text(frame.x + 6, frame.y + 11, frame.text, 8, FAINT)
    for box in scene.boxes:
        if box.small:
            text(box.x + 5, box.y + box.height / 2 - 2, box.text, 10, INK)
            text(box.x + 5, box.y + box.height - 5, box.small, 8, FAINT)
        else:
            text(box.x + 5, box.y + box.height / 2 + 3.5, box.text, 10, INK)
    for label in scene.labels:
        is_head = label.style == "head"
        text(
            label.x,
            label.y,
            label.text,
            13 if is_head else 11,
            INK if is_head else FAINT,
            "bold" if is_head else "normal",
        )
    from matplotlib.patches import Rectangle

    for entry, (x, y) in zip(scene.legend, legend_positions(scene), strict=True):
        axes.add_patch(Rectangle((x, y), 14, 11, facecolor=entry.color, edgecolor=entry.edge))
        text(x + 19, y + 9.5, entry.text, 11, FAINT)


def _is_edged(box: Box) -> bool:
    return bool({"inserted", "records", "root_cause", "badged"} & set(box.classes))


def _fill(box: Box) -> str:
    if box.fill:
        return box.fill
    if "records" in box.classes:
        return RECORDS
    return INSERTED if "inserted" in box.classes else PILL if "pill" in box.classes else PAPER


def _line_color(classes: tuple[str, ...]) -> tuple[float, float, float, float]:
    from matplotlib.colors import to_rgba

    color = CUT if {"cut", "cross"} & set(classes) else SAVED if "saved" in classes else LINE
    return to_rgba(color, 0.12 if {"carried", "fan"} & set(classes) else 0.35 if "far" in classes else 1.0)
