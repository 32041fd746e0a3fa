"""The ladder: the forward runs down on the left, the backward runs up on the right, each op beside its backward.

Edges from forward values to the backward that needs them ("saved") are what ruins layered layouts of a joint graph;
here they are short and horizontal. The order of all rows is known, so the layout takes one pass.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass, field

from gradrewrite.viz._graph_view import Net, Node, action_name, contracted, hidden_reshapes, lane_of_site, shown_for

WIDTH, HEIGHT, GAP, PITCH = 132, 28, 12, 36  # of boxes, in pixels
CHIP, CHIP_GAP = 80, 6  # of the further nodes of one edit
FORWARD, BACKWARD = 3, 5  # boxes side by side
PILL, EDGE, CENTRE = 150, 40, 70
HEADER, FOOT, TOP = 15, 5, 64
FAR = 4  # rows; longer edges are curved and faint

LEFT = EDGE + PILL + GAP
CENTRE_LEFT = LEFT + FORWARD * (WIDTH + GAP) - GAP
RIGHT = CENTRE_LEFT + GAP + CENTRE
PILLS = RIGHT + BACKWARD * (WIDTH + GAP)
TOTAL = PILLS + PILL + EDGE


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
    edges = contracted(net, hidden) + [(source, key) for key, source in shown_for(net, net.returned, hidden)]
    return Ladder(net, spots, lines, _bands([row.path for row in rows]), edges, hidden)


def _rows(net: Net, hidden: Collection[str]) -> list[_Row]:
    """One row for each op that shows something, in the order of the forward; records first."""
    rows: dict[int, _Row] = {}
    runs = {node.origin.order: node.origin.runs for node in net.nodes.values() if node.role == "op"}

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
            order = net.orders[edit.site]
            row = rows.setdefault(order, _Row(order))
            row.path = row.path or runs.get(order, ())
            (row.forward if lane_of_site(edit.site) == "forward" else row.backward).append(number)
    for key, source in shown_for(net, net.returned, hidden):
        row = row_of(net.nodes[source])
        (row.right if net.nodes[source].origin.lane == "backward" else row.left).append((key, None, key))
    for row in rows.values():
        row.forward, row.backward = _together(row.forward), _together(row.backward)
    return [rows[order] for order in sorted(rows)]


def _together(parts: Sequence[Node | int]) -> list[Node | int]:
    """Parts in the order of execution, but the nodes of one edit beside each other."""
    groups: dict[tuple[str, int], list[Node | int]] = {}
    for number, part in enumerate(parts):
        is_edited = isinstance(part, Node) and part.edit >= 0
        key = ("edit", part.edit) if is_edited and isinstance(part, Node) else ("", number)
        groups.setdefault(key, []).append(part)
    return [part for group in groups.values() for part in group]


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
    for x, pills in ((EDGE, row.left), (PILLS, row.right)):
        spots += [Spot(key, node, -1, number, n, x, PILL, text, "") for n, (key, node, text) in enumerate(pills)]
    return spots


def _flow(net: Net, parts: Sequence[Node | int], room: float) -> list[list[tuple[Node | int, float, float]]]:
    """Lines of parts with their left edges and widths.

    An edit of several nodes has lines of its own; its first node has the room to name it.
    """
    lines: list[list[tuple[Node | int, float, float]]] = []
    x, block = room, -1
    for part in parts:
        number = part.edit if isinstance(part, Node) and part.edit >= 0 else -1
        own = number if number >= 0 and len(net.edits[number].nodes) > 1 else -1
        is_chip = own >= 0 and isinstance(part, Node) and net.edits[own].nodes[0] != part.name
        width = CHIP if is_chip else WIDTH
        if x + width > room or own != block:
            lines.append([])
            x, block = 0.0, own
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
    depth: dict[tuple[tuple[str, int], ...], int] = {}
    for band in found:
        depth[band.path] = sum(band.path[:n] in depth for n in range(1, len(band.path)))
    return [Band(band.path, band.first, band.last, depth[band.path]) for band in found]


def lane_of(spot: Spot) -> str:
    """The lane that a box stands in."""
    if spot.node is not None:
        return spot.node.origin.lane
    return "backward" if spot.x >= RIGHT else "forward"


def _by_row(spots: Sequence[Spot], count: int) -> list[list[Spot]]:
    groups: list[list[Spot]] = [[] for _ in range(count)]
    for spot in spots:
        groups[spot.row].append(spot)
    return groups
