"""Grid layout of a diagram: columns side by side, rows below each other."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Mapping, Sequence

from gradrewrite.viz._diagram import MAX_LABEL, Diagram, Item, Link
from gradrewrite.viz._graph_view import shorten
from gradrewrite.viz._scene import Box, Frame, Label, Line, Scene

HEIGHT, GAP, PITCH, TOP, MARGIN = 32, 18, 46, 74, 16
SIDE = 60  # room beside a column, where edges between rows far apart run
_CHARACTER_WIDTH = 6.4  # pixels; enough for most letters, not for the widest
_WIDEST_LINE = 220


def lay_out_diagram(diagram: Diagram, notice: str = "") -> Scene:
    """Lay out a diagram on a grid.

    Args:
        diagram: The diagram.
        notice: A line below, where Graphviz could not draw it.
    """
    width = (
        max([len(shorten(t, MAX_LABEL)) for i in diagram.items for t in (i.text, _small(i))] or [8]) * _CHARACTER_WIDTH
        + 14
    )
    lefts, frames_width = _columns(diagram, width)
    rows = {row: number for number, row in enumerate(sorted({item.row for item in diagram.items}))}
    boxes: dict[str, Box] = {}
    taken: dict[tuple[str, int], int] = defaultdict(int)
    for item in diagram.items:
        slot = taken[item.column, item.row]
        taken[item.column, item.row] += 1
        x = lefts[item.column] + slot * (width + GAP)
        boxes[item.key] = _box(item, x, TOP + rows[item.row] * PITCH, width)
    bottom = TOP + len(rows) * PITCH
    text = [line for line in (notice, *diagram.caption) if line]
    labels = [Label(MARGIN, 24, diagram.title, "head")]
    labels += [Label(MARGIN, bottom + 14 + 15 * n, shorten(line, _WIDEST_LINE)) for n, line in enumerate(text)]
    labels += [label for link in diagram.links for label in _counts(boxes, link, diagram)]
    widest = max([len(shorten(t, _WIDEST_LINE)) for t in text] or [0]) * _CHARACTER_WIDTH + 2 * MARGIN
    right = max((lefts[c] + frames_width[c] for c in diagram.columns), default=0.0) + SIDE
    return Scene(
        title=diagram.title,
        width=max(right, widest),
        height=bottom + 30 + 15 * len(text) + 17 * len(diagram.legend),
        frames=[Frame(c, lefts[c] - 10, TOP - 22, frames_width[c] + 20, bottom - TOP + 8, c) for c in diagram.columns],
        lines=[line for link in diagram.links for line in _lines(boxes, link, diagram)],
        boxes=list(boxes.values()),
        labels=labels,
        legend=list(diagram.legend),
    )


def _columns(diagram: Diagram, width: float) -> tuple[dict[str, float], dict[str, float]]:
    """Return the left edge and the width of each column."""
    lefts, widths = {}, {}
    x = float(MARGIN + SIDE)
    for column in diagram.columns:
        in_rows: dict[int, int] = defaultdict(int)
        for item in diagram.items:
            in_rows[item.row] += item.column == column
        slots = max(in_rows.values(), default=1) or 1
        lefts[column], widths[column] = x, slots * (width + GAP) - GAP
        x += widths[column] + 2 * SIDE
    return lefts, widths


def width_of(tensors: int) -> float:
    """Return the line width, in points, of an edge that stands for ``tensors`` tensors."""
    return 1.0 + math.log2(max(tensors, 1)) * 0.5


def _small(item: Item) -> str:
    return f"{item.small}  {item.badge}".strip()


def _box(item: Item, x: float, y: float, width: float) -> Box:
    return Box(
        key=item.key,
        x=x,
        y=y,
        width=width,
        height=HEIGHT,
        text=shorten(item.text, MAX_LABEL),
        small=shorten(_small(item), MAX_LABEL + 8),
        classes=("node", *(("badged",) if item.badge else ()), *item.classes),
        title=item.title,
        data=item.data,
        fill=item.fill,
    )


def _lines(boxes: Mapping[str, Box], link: Link, diagram: Diagram) -> list[Line]:
    a, b = boxes[link.source], boxes[link.target]
    points = _route(boxes, link, diagram)
    is_far = len(points) == 4 and not link.kind
    classes = (link.kind,) if link.kind else ("far",) if is_far else ()
    width = 1.0 if link.kind == "carried" else width_of(link.tensors)
    found = [Line(a.key, b.key, points, classes, width)]
    if link.kind == "cut":
        x, y = _middle(points)
        found += [Line(a.key, b.key, ((x - 6, y - dy), (x + 6, y + dy)), ("cross",)) for dy in (6, -6)]
    return found


def _route(boxes: Mapping[str, Box], link: Link, diagram: Diagram) -> tuple[tuple[float, float], ...]:
    """Return a straight line between neighbors and columns; a curve outside the column between distant rows."""
    a, b = boxes[link.source], boxes[link.target]
    columns = {item.key: diagram.columns.index(item.column) for item in diagram.items}
    middle_a, middle_b = a.y + a.height / 2, b.y + b.height / 2
    if diagram.is_grid and a.x == b.x and abs(a.y - b.y) > PITCH:
        is_first = columns[a.key] == 0
        edge = a.x if is_first else a.x + a.width
        reach = min(SIDE - 8.0, 18 + abs(a.y - b.y) / PITCH * 4) * (-1 if is_first else 1)
        return ((edge, middle_a), (edge + reach * 4 / 3, middle_a), (edge + reach * 4 / 3, middle_b), (edge, middle_b))
    if a.y == b.y or columns[a.key] != columns[b.key]:
        right = b.x > a.x
        return ((a.x + (a.width if right else 0), middle_a), (b.x + (0 if right else b.width), middle_b))
    down = b.y > a.y
    begin = (a.x + a.width / 2, a.y + (a.height if down else 0))
    return (begin, (b.x + b.width / 2, b.y + (0 if down else b.height)))


def _middle(points: Sequence[tuple[float, float]]) -> tuple[float, float]:
    if len(points) == 2:
        return (points[0][0] + points[1][0]) / 2, (points[0][1] + points[1][1]) / 2
    weights = (1 / 8, 3 / 8, 3 / 8, 1 / 8)
    return sum(w * x for w, (x, _) in zip(weights, points, strict=True)), sum(
        w * y for w, (_, y) in zip(weights, points, strict=True)
    )


def _counts(boxes: Mapping[str, Box], link: Link, diagram: Diagram) -> list[Label]:
    """Return the label with the number of tensors of an edge."""
    if link.tensors < 2 or link.kind == "carried":
        return []
    points = _route(boxes, link, diagram)
    x, y = _middle(points)
    is_upright = points[0][0] == points[-1][0]
    return [Label(x + (7 if is_upright else 4), y + (4 if is_upright else -3), str(link.tensors), "small")]
