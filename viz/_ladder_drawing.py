"""How a ladder is drawn: rows get their heights, boxes their words, edges their lines."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import replace

from gradrewrite.viz._graph_view import Net, describe, run_name, shorten, shorten_front
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
    Ladder,
    Spot,
    lane_of,
)
from gradrewrite.viz._scene import (
    INSERTED,
    INSERTED_EDGE,
    PAPER,
    RECORDS,
    SAVED,
    Box,
    Frame,
    Line,
    Paint,
    Picture,
    Swatch,
    Words,
)

MANY = 12  # edges; what reads more (a total norm) or is read more (by every step) is joined by faint lines
_LEGEND = (
    Swatch(INSERTED, INSERTED_EDGE, "orange edge: inserted by an edit"),
    Swatch(RECORDS, INSERTED_EDGE, "orange edge: carries records out of the graph"),
    Swatch(PAPER, SAVED, "dashed: a forward value saved for the backward"),
)


def draw_ladder(ladder: Ladder, colours: Mapping[str, Paint], legend: Sequence[Swatch], title: str) -> Picture:
    """Draw a layout.

    Args:
        ladder: The layout.
        colours: By node.
        legend: What the colours mean.
        title: Title of the picture.
    """
    tops, frames, height = _heights(ladder)
    boxes = {s.key: _box(ladder.net, s, tops[s.row] + s.line * PITCH, colours) for s in ladder.spots}
    rows = {s.key: s.row for s in ladder.spots}
    lanes = {s.key: lane_of(s) for s in ladder.spots}
    reads, feeds = Counter(b for _, b in ladder.edges), Counter(a for a, _ in ladder.edges)
    lines = []
    for a, b in ladder.edges:
        line = _line(boxes[a], boxes[b], (lanes[a], lanes[b]), abs(rows[a] - rows[b]))
        is_fan = reads[b] > MANY or (feeds[a] > MANY and abs(rows[a] - rows[b]) > FAR)
        lines.append(replace(line, classes=("fan",)) if is_fan and line.classes != ("carried",) else line)
    known = [*_LEGEND, *legend]
    summary = f"{len(ladder.net.nodes)} nodes, {len(ladder.net.edits)} edits, {ladder.net.num_inserted} nodes inserted"
    more = f"; {len(ladder.hidden)} ops that only reshape are hidden" if ladder.hidden else ""
    words = [
        Words(EDGE, 22, title, "head"),
        Words(EDGE, 40, summary + more),
        Words(LEFT, 58, "forward: runs down"),
        Words(RIGHT, 58, "backward: runs up, each op beside its forward"),
        Words(EDGE, 58, "comes in"),
        Words(PILLS, 58, "gradients"),
    ]
    return Picture(title, TOTAL, height + 17 * len(known) + 24, frames, lines, list(boxes.values()), words, known)


def _heights(ladder: Ladder) -> tuple[list[float], list[Frame], float]:
    """The upper edge of each row, the frames of the bands, and the height of all."""
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
        key = "/".join(run_name(run) for run in band.path)
        frames.append(Frame(key, x, begins[band], TOTAL - 2 * x, height, shorten(run_name(band.path[-1]), 120), key))
    return tops, frames, y


def _box(net: Net, spot: Spot, y: float, colours: Mapping[str, Paint]) -> Box:
    node = spot.node
    is_pill = spot.x in (EDGE, PILLS)
    data: dict[str, str] = {"row": str(spot.row)}
    title = describe(net, node) if node is not None else spot.key
    classes: list[str] = ["node", "pill"] if is_pill else ["node"]
    if node is not None:
        data["node"] = node.name
        classes += [node.origin.lane] if node.mark != "records" else [node.origin.lane, "records"]
    elif spot.edit < 0:
        data["returned"] = spot.key
    if spot.edit >= 0:
        edit = net.edits[spot.edit]
        data |= {"edit": str(spot.edit), "site": str(edit.site), "action": edit.text}
        classes.append("inserted")
        title = title if node is not None else f"{edit.text} at {edit.site}: no nodes of its own"
    paint = colours.get(spot.key)
    title = f"{title}\n{paint.words}" if paint is not None else title
    text = spot.text.removeprefix("gradient:") if is_pill else spot.text
    signs = int(spot.width // 6.6)
    label = shorten_front(text, signs) if is_pill else shorten(text, signs)
    return Box(
        key=spot.key,
        x=spot.x,
        y=y,
        width=spot.width,
        height=18 if is_pill else HEIGHT,
        text=label,
        small=shorten(spot.small, int(spot.width // 5.1)),
        classes=tuple(classes),
        title=title,
        data=data,
        fill=paint.colour if paint is not None else "",
    )


def _line(a: Box, b: Box, lanes: tuple[str, str], rows: int) -> Line:
    """The line from a box to one that reads it."""
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
    """A line that leaves and enters at the sides."""
    right = b.x > a.x
    begin = (a.x + (a.width if right else 0), a.y + a.height / 2)
    end = (b.x + (0 if right else b.width), b.y + b.height / 2)
    if begin[1] == end[1]:
        return Line(a.key, b.key, (begin, end), classes)
    reach = 20 if right else -20
    far = ("far",) if abs(begin[1] - end[1]) > FAR * PITCH else ()
    points = (begin, (begin[0] + reach, begin[1]), (end[0] - reach, end[1]), end)
    return Line(a.key, b.key, points, (*classes, *far))
