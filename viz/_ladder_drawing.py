"""Drawing of a ladder: row heights, box labels, edge lines."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import replace

from gradrewrite.viz._graph_view import GraphView, call_name, describe_node, shorten, shorten_front
from gradrewrite.viz._ladder_layout import (
    EDGE,
    FAR,
    FOOT,
    HEADER,
    HEIGHT,
    LEFT,
    PILLS,
    PITCH,
    RIGHT,
    TOP,
    TOTAL,
    Band,
    LadderCell,
    LadderLayout,
    lane_of,
)
from gradrewrite.viz._scene import Box, ColorSample, Frame, Label, LegendEntry, Line, Scene
from gradrewrite.viz._theme import INSERTED, INSERTED_EDGE, PAPER, RECORDS, SAVED

MANY = 12  # edges; what reads more (a total norm) or is read more (by every step) is joined by faint lines
_LEGEND = (
    LegendEntry(INSERTED, INSERTED_EDGE, "orange edge: inserted by an edit"),
    LegendEntry(RECORDS, INSERTED_EDGE, "orange edge: carries records out of the graph"),
    LegendEntry(PAPER, SAVED, "dashed: a forward value saved for the backward"),
)


def draw_ladder(
    ladder: LadderLayout, colors: Mapping[str, ColorSample], legend: Sequence[LegendEntry], title: str
) -> Scene:
    """Return the scene of a ladder layout.

    Args:
        ladder: The layout.
        colors: By node.
        legend: What the colors mean.
        title: Title of the scene.
    """
    tops, frames, height = _heights(ladder)
    boxes = {s.key: _box(ladder.graph_view, s, tops[s.row] + s.line * PITCH, colors) for s in ladder.cells}
    rows = {s.key: s.row for s in ladder.cells}
    lanes = {s.key: lane_of(s) for s in ladder.cells}
    reads, feeds = Counter(b for _, b in ladder.edges), Counter(a for a, _ in ladder.edges)
    lines = []
    for a, b in ladder.edges:
        line = _line(boxes[a], boxes[b], (lanes[a], lanes[b]), abs(rows[a] - rows[b]))
        is_fan = reads[b] > MANY or (feeds[a] > MANY and abs(rows[a] - rows[b]) > FAR)
        lines.append(replace(line, classes=("fan",)) if is_fan and line.classes != ("carried",) else line)
    known = [*_LEGEND, *legend]
    hidden = f"; {len(ladder.hidden)} ops that only reshape are hidden" if ladder.hidden else ""
    labels = [
        Label(EDGE, 22, title, "head"),
        Label(EDGE, 40, ladder.graph_view.summary + hidden),
        Label(LEFT, 58, "forward: runs down"),
        Label(RIGHT, 58, "backward: runs up, each op beside its forward"),
        Label(EDGE, 58, "comes in"),
        Label(PILLS, 58, "gradients"),
    ]
    return Scene(title, TOTAL, height + 17 * len(known) + 24, frames, lines, list(boxes.values()), labels, known)


def _heights(ladder: LadderLayout) -> tuple[list[float], list[Frame], float]:
    """Return the upper edge of each row, the frames of the bands, and the total height."""
    opening: dict[int, list[Band]] = defaultdict(list)
    closing: dict[int, int] = defaultdict(int)
    for band in ladder.bands:
        opening[band.first].append(band)
        closing[band.last] += 1
    tops: list[float] = []
    begins: dict[Band, float] = {}
    ends: list[float] = []
    y = float(TOP)
    for row, lines in enumerate(ladder.lines):
        for band in opening[row]:
            begins[band] = y
            y += HEADER
        tops.append(y + 2)
        y += lines * PITCH
        y += closing[row] * FOOT
        ends.append(y)
    frames = []
    closed: dict[int, int] = defaultdict(int)
    for band in ladder.bands:  # of those that end with the same row, the outer ones come first
        x = 8 + 5 * min(band.depth, 6)
        height = ends[band.last] - closed[band.last] * FOOT - begins[band] - 2
        closed[band.last] += 1
        key = "/".join(call_name(call) for call in band.path)
        frames.append(Frame(key, x, begins[band], TOTAL - 2 * x, height, shorten(call_name(band.path[-1]), 120), key))
    return tops, frames, y


def _box(graph_view: GraphView, cell: LadderCell, y: float, colors: Mapping[str, ColorSample]) -> Box:
    node = cell.node
    is_pill = cell.x in (EDGE, PILLS)
    data: dict[str, str] = {"row": str(cell.row)}
    title = describe_node(graph_view, node) if node is not None else cell.key
    classes: list[str] = ["node", "pill"] if is_pill else ["node"]
    if node is not None:
        data["node"] = node.name
        classes += [node.lane] if node.mark != "records" else [node.lane, "records"]
    elif cell.edit < 0:
        data["returned"] = cell.key
    if cell.edit >= 0:
        edit = graph_view.edits[cell.edit]
        data |= {"edit": str(cell.edit), "site": str(edit.site), "action": edit.text}
        classes.append("inserted")
        title = title if node is not None else f"{edit.text} at {edit.site}: no nodes of its own"
    sample = colors.get(cell.key)
    title = f"{title}\n{sample.text}" if sample is not None else title
    text = cell.text.removeprefix("gradient:") if is_pill else cell.text
    signs = int(cell.width // 6.6)
    label = shorten_front(text, signs) if is_pill else shorten(text, signs)
    return Box(
        key=cell.key,
        x=cell.x,
        y=y,
        width=cell.width,
        height=18 if is_pill else HEIGHT,
        text=label,
        small=shorten(cell.small, int(cell.width // 5.1)),
        classes=tuple(classes),
        title=title,
        data=data,
        fill=sample.color if sample is not None else "",
    )


def _line(a: Box, b: Box, lanes: tuple[str, str], rows: int) -> Line:
    """Return the line from a box to one that reads it."""
    lane, to = lanes
    if "records" in b.classes and "records" not in a.classes:
        return Line(a.key, b.key, ((a.x + a.width / 2, a.y), (b.x + b.width / 2, b.y + b.height)), ("carried",))
    if a.y == b.y or "pill" in a.classes or "pill" in b.classes or lane != to:
        return _across(a, b, ("saved",) if lane != to else ())
    down = b.y > a.y
    begin = (a.x + a.width / 2, a.y + (a.height if down else 0))
    end = (b.x + b.width / 2, b.y + (0 if down else b.height))
    if rows <= FAR:
        return Line(a.key, b.key, (begin, end))
    bulge = min(90.0, 24 + abs(begin[1] - end[1]) * 0.04) * (-1 if lane == "forward" else 1)
    side = min(begin[0], end[0]) if lane == "forward" else max(begin[0], end[0])
    points = (begin, (side + bulge, begin[1]), (side + bulge, end[1]), end)
    return Line(a.key, b.key, points, ("far",))


def _across(a: Box, b: Box, classes: tuple[str, ...]) -> Line:
    """Return a line that leaves and enters at the sides of the boxes."""
    right = b.x > a.x
    begin = (a.x + (a.width if right else 0), a.y + a.height / 2)
    end = (b.x + (0 if right else b.width), b.y + b.height / 2)
    if begin[1] == end[1]:
        return Line(a.key, b.key, (begin, end), classes)
    reach = 20 if right else -20
    far = ("far",) if abs(begin[1] - end[1]) > FAR * PITCH else ()
    points = (begin, (begin[0] + reach, begin[1]), (end[0] - reach, end[1]), end)
    return Line(a.key, b.key, points, (*classes, *far))
