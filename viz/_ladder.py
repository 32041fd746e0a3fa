"""The ladder: the forward runs down on the left, the backward runs up on the right, each op beside its backward.

Edges from forward values to the backward that needs them ("saved") are what ruins layered layouts of a joint graph;
here they are short and horizontal. The order of all rows is known, so the layout takes one pass.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field

from gradrewrite.viz._net import Net, Node, contracted, describe, hidden_reshapes, lane_of_site, run_name, shorten
from gradrewrite.viz._picture import (
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

WIDTH, HEIGHT, GAP, PITCH = 132, 28, 12, 36  # of boxes, in pixels
CHIP, CHIP_GAP = 66, 6  # of the further nodes of one edit
FORWARD, BACKWARD = 3, 5  # boxes side by side
PILL, EDGE, CENTRE = 150, 40, 70
HEADER, FOOT, TOP = 15, 5, 64
FAR = 4  # rows; longer edges are curved and faint

LEFT = EDGE + PILL + GAP
CENTRE_LEFT = LEFT + FORWARD * (WIDTH + GAP) - GAP
RIGHT = CENTRE_LEFT + GAP + CENTRE
_PILLS = RIGHT + BACKWARD * (WIDTH + GAP)
TOTAL = _PILLS + PILL + EDGE


@dataclass(frozen=True, slots=True)
class Band:
    """One run of a module: the rows that it covers.

    Attributes:
        path: Module runs from the outermost to this one.
        first: Its first row.
        last: Its last row.
        depth: How many drawn bands are around it.
    """

    path: tuple[tuple[str, int], ...]
    first: int
    last: int
    depth: int


@dataclass(frozen=True, slots=True)
class Spot:
    """One box of the ladder before it has a height: its row, its line in the row, its left edge and width."""

    key: str
    node: Node | None
    edit: int
    row: int
    line: int
    x: float
    width: float
    text: str
    small: str


@dataclass(frozen=True, slots=True)
class Ladder:
    """The layout of a joint graph.

    Attributes:
        net: The graph.
        spots: Its boxes.
        lines: How many lines of boxes each row has.
        bands: Module runs, outer ones first.
        edges: Pairs of keys.
        hidden: Nodes that are left out.
    """

    net: Net
    spots: Sequence[Spot]
    lines: Sequence[int]
    bands: Sequence[Band]
    edges: Sequence[tuple[str, str]]
    hidden: Collection[str]


@dataclass(slots=True)
class _Row:
    order: int
    path: tuple[tuple[str, int], ...] = ()
    # a number is an edit without nodes
    forward: list[Node | int] = field(default_factory=list)
    backward: list[Node | int] = field(default_factory=list)
    left: list[tuple[str, Node | None, str]] = field(default_factory=list)  # key, node, text
    right: list[tuple[str, Node | None, str]] = field(default_factory=list)


def lay_out(net: Net, *, reshapes: bool = False) -> Ladder:
    """Give every node its place.

    Args:
        net: The graph.
        reshapes: Whether ops that only reshape are shown.
    """
    hidden = set() if reshapes else hidden_reshapes(net)
    rows = _rows(net, hidden)
    spots: list[Spot] = []
    for number, row in enumerate(rows):
        spots += _spots(net, number, row)
    lines = [max([s.line + 1 for s in group] or [1]) for group in _by_row(spots, len(rows))]
    edges = contracted(net, hidden) + [(source, key) for key, source in _returned(net, hidden)]
    return Ladder(net, spots, lines, _bands([row.path for row in rows]), edges, hidden)


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
    lines = [_line(boxes[a], boxes[b], (lanes[a], lanes[b]), abs(rows[a] - rows[b])) for a, b in ladder.edges]
    known = [*_LEGEND, *legend]
    summary = f"{len(ladder.net.nodes)} nodes, {len(ladder.net.edits)} edits, {ladder.net.num_inserted} nodes inserted"
    more = f"; {len(ladder.hidden)} ops that only reshape are hidden" if ladder.hidden else ""
    words = [
        Words(EDGE, 22, title, "head"),
        Words(EDGE, 40, summary + more),
        Words(LEFT, 58, "forward: runs down"),
        Words(RIGHT, 58, "backward: runs up, each op beside its forward"),
        Words(EDGE, 58, "comes in"),
        Words(_PILLS, 58, "gradients"),
    ]
    return Picture(title, TOTAL, height + 17 * len(known) + 24, frames, lines, list(boxes.values()), words, known)


_LEGEND = (
    Swatch(INSERTED, INSERTED_EDGE, "inserted by an edit"),
    Swatch(RECORDS, INSERTED_EDGE, "inserted: carries records out of the graph"),
    Swatch(PAPER, SAVED, "dashed: a forward value saved for the backward"),
)


def _rows(net: Net, hidden: Collection[str]) -> list[_Row]:
    """One row for each op that shows something, in the order of the forward; records first."""
    rows: dict[int, _Row] = {}

    def row_of(node: Node) -> _Row:
        row = rows.setdefault(node.origin.order, _Row(node.origin.order))
        row.path = row.path or node.origin.runs
        return row

    for node in net.nodes.values():
        if node.name in hidden:
            continue
        row = row_of(node)
        if node.role == "placeholder":
            side = row.right if node.origin.lane == "backward" else row.left
            label = (
                f"{node.origin.op} {node.origin.name}".strip() if node.origin.op != "parameter" else node.origin.name
            )
            side.append((node.name, node, label))
        elif node.origin.lane == "forward":
            row.forward.append(node)
        else:
            row.backward.append(node)
    for number, edit in enumerate(net.edits):
        if not edit.nodes:
            row = rows.setdefault(net.orders[edit.site], _Row(net.orders[edit.site]))
            (row.forward if lane_of_site(edit.site) == "forward" else row.backward).append(number)
    for key, source in _returned(net, hidden):
        row = row_of(net.nodes[source])
        (row.right if net.nodes[source].origin.lane == "backward" else row.left).append((key, None, key))
    return [rows[order] for order in sorted(rows)]


def _returned(net: Net, hidden: Collection[str]) -> list[tuple[str, str]]:
    """What the graph returns: the label, and the node that is shown for it."""
    reads: dict[str, str] = {}
    for source, reader in net.edges:
        reads.setdefault(reader, source)
    found = []
    for label, name in net.returned:
        while name in hidden and name in reads:
            name = reads[name]
        found.append((label, name))
    return found


def _spots(net: Net, number: int, row: _Row) -> list[Spot]:
    spots = []
    flow = _flow(net, row.forward, FORWARD * (WIDTH + GAP))
    for line, places in enumerate(flow):
        end = places[-1][1] + places[-1][2] + GAP
        for node, x, width in places:  # against the centre
            at = LEFT + FORWARD * (WIDTH + GAP) - end + x
            spots.append(_spot(net, node, number, line, at, width, len(row.forward)))
    flow = _flow(net, row.backward, BACKWARD * (WIDTH + GAP))
    for line, places in enumerate(reversed(flow)):  # the backward runs up
        for part, x, width in places:
            spots.append(_spot(net, part, number, line, RIGHT + x, width, len(row.backward)))
    for x, pills in ((EDGE, row.left), (_PILLS, row.right)):
        spots += [Spot(key, node, -1, number, n, x, PILL, text, "") for n, (key, node, text) in enumerate(pills)]
    return spots


def _flow(net: Net, parts: Sequence[Node | int], room: float) -> list[list[tuple[Node | int, float, float]]]:
    """Lines of parts with their left edges and widths; the first node of an edit has the room to name it."""
    lines: list[list[tuple[Node | int, float, float]]] = []
    x = room
    for part in parts:
        is_chip = isinstance(part, Node) and part.edit >= 0 and net.edits[part.edit].nodes[0] != part.name
        width = CHIP if is_chip else WIDTH
        if x + width > room:
            lines.append([])
            x = 0.0
        lines[-1].append((part, x, width))
        x += width + (CHIP_GAP if is_chip else GAP)
    return lines


def _spot(net: Net, part: Node | int, row: int, line: int, x: float, width: float, count: int) -> Spot:
    if isinstance(part, int):
        edit = net.edits[part]
        return Spot(f"edit {part}", None, part, row, line, x, width, action_name(edit.action), str(edit.site))
    if part.edit >= 0:
        edit = net.edits[part.edit]
        text = part.aten if width == CHIP else f"{action_name(edit.action)}: {part.aten}"
        small = action_name(edit.action) if width == CHIP else str(edit.site)
    elif part.mark:
        text, small = f"records: {part.aten}", ""
    else:
        text = f"{part.origin.op}: {part.aten}" if count > 1 else part.origin.op
        small = part.module or "(model)"
    return Spot(part.name, part, part.edit, row, line, x, width, text, small)


def action_name(action: object) -> str:
    """Short name of an action: its class, or the function's name."""
    name = getattr(action, "__name__", type(action).__name__)
    return "lambda" if name == "<lambda>" else str(name)


def _bands(paths: Sequence[tuple[tuple[str, int], ...]]) -> list[Band]:
    """Module runs that cover two rows or more, in the order in which they begin."""
    found: list[Band] = []
    open_: list[tuple[tuple[str, int], int]] = []
    for number, path in enumerate([*paths, ()]):
        common = 0
        while common < min(len(open_), len(path)) and open_[common][0] == path[common]:
            common += 1
        while len(open_) > common:
            runs = tuple(run for run, _ in open_)
            first = open_.pop()[1]
            if number - first > 1:
                found.append(Band(runs, first, number - 1, 0))
        open_ += [(run, number) for run in path[common:]]
    found.sort(key=lambda band: (band.first, len(band.path)))
    drawn = {(band.path, band.first) for band in found}
    depth = {}
    for band in found:
        around = [b for b in (band.path[:n] for n in range(1, len(band.path))) if b in depth]
        depth[band.path] = len(around)
    assert len(drawn) == len(found)
    return [Band(band.path, band.first, band.last, depth[band.path]) for band in found]


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
    for band in ladder.bands:
        inside = sum(b.last == band.last and b.depth > band.depth for b in _near(ladder.bands, band, begins))
        x = 8 + 5 * min(band.depth, 6)
        bottom = ends[band.last] - (closing[band.last] - inside - 1) * FOOT
        key = "/".join(run_name(run) for run in band.path)
        height = bottom - begins[band] - 2
        frames.append(Frame(key, x, begins[band], TOTAL - 2 * x, height, shorten(run_name(band.path[-1]), 120), key))
    return tops, frames, y


def _near(bands: Sequence[Band], band: Band, begins: Mapping[Band, float]) -> list[Band]:
    return [b for b in bands if b.first >= band.first and b.last == band.last]


def _box(net: Net, spot: Spot, y: float, colours: Mapping[str, Paint]) -> Box:
    node = spot.node
    is_pill = spot.x in (EDGE, _PILLS)
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
    return Box(
        key=spot.key,
        x=spot.x,
        y=y,
        width=spot.width,
        height=18 if is_pill else HEIGHT,
        text=shorten(text, signs),
        small=shorten(spot.small, int(spot.width // 5.2)),
        classes=tuple(classes),
        title=title,
        data=data,
        fill=paint.colour if paint is not None else "",
    )


def lane_of(spot: Spot) -> str:
    """The lane that a box stands in."""
    if spot.node is not None:
        return spot.node.origin.lane
    return "backward" if spot.x >= RIGHT else "forward"


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


def _by_row(spots: Sequence[Spot], count: int) -> list[list[Spot]]:
    groups: list[list[Spot]] = [[] for _ in range(count)]
    for spot in spots:
        groups[spot.row].append(spot)
    return groups
