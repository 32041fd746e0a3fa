"""Ladder layout: the forward runs down on the left, the backward up on the right, each op beside its backward.

Edges from forward values to the backward that needs them ("saved") are what ruins layered layouts of a joint graph;
here they are short and horizontal. The order of all rows is known, so the layout takes one pass.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass, field

from gradrewrite.viz._graph_view import (
    GraphView,
    Node,
    action_name,
    contracted_edges,
    hidden_reshapes,
    lane_of_site,
    visible_outputs,
)

WIDTH, HEIGHT, GAP, PITCH = 132, 28, 12, 36  # of boxes, in pixels
CHIP, CHIP_GAP = 80, 6  # of the further nodes of one edit
FORWARD, BACKWARD = 3, 5  # boxes side by side
PILL, EDGE, CENTER = 150, 40, 70
HEADER, FOOT, TOP = 15, 5, 64
FAR = 4  # rows; longer edges are curved and faint

LEFT = EDGE + PILL + GAP
CENTER_LEFT = LEFT + FORWARD * (WIDTH + GAP) - GAP
RIGHT = CENTER_LEFT + GAP + CENTER
PILLS = RIGHT + BACKWARD * (WIDTH + GAP)
TOTAL = PILLS + PILL + EDGE


@dataclass(frozen=True, slots=True)
class Band:
    """Rows of one module call.

    Attributes:
        path: Module calls from the outermost to this one.
        first: Its first row.
        last: Its last row.
        depth: How many drawn bands are around it.
    """

    path: tuple[tuple[str, int], ...]
    first: int
    last: int
    depth: int


@dataclass(frozen=True, slots=True)
class LadderCell:
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
class LadderLayout:
    """Ladder layout of a joint graph: rows, lines and horizontal positions.

    Attributes:
        graph_view: The graph.
        cells: Its boxes.
        lines: How many lines of boxes each row has.
        bands: Module calls, outer ones first.
        edges: Pairs of keys.
        hidden: Nodes that are left out.
    """

    graph_view: GraphView
    cells: Sequence[LadderCell]
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


def lay_out_ladder(graph_view: GraphView, *, reshapes: bool = False) -> LadderLayout:
    """Lay out a joint graph as a ladder.

    Args:
        graph_view: The graph.
        reshapes: Whether ops that only reshape are shown.
    """
    hidden = set() if reshapes else hidden_reshapes(graph_view)
    rows = _rows(graph_view, hidden)
    cells: list[LadderCell] = []
    for number, row in enumerate(rows):
        cells += _cells(graph_view, number, row)
    lines = [max([s.line + 1 for s in group] or [1]) for group in _by_row(cells, len(rows))]
    edges = contracted_edges(graph_view, hidden) + [
        (source, key) for key, source in visible_outputs(graph_view, graph_view.returned, hidden)
    ]
    return LadderLayout(graph_view, cells, lines, _bands([row.path for row in rows]), edges, hidden)


def _rows(graph_view: GraphView, hidden: Collection[str]) -> list[_Row]:
    """Return one row for each op with visible nodes, in the order of the forward; records first."""
    rows: dict[int, _Row] = {}
    calls = {node.order: node.calls for node in graph_view.nodes.values() if node.role == "op"}

    def row_of(node: Node) -> _Row:
        row = rows.setdefault(node.order, _Row(node.order))
        row.path = row.path or node.calls
        return row

    for node in graph_view.nodes.values():
        if node.name in hidden:
            continue
        row = row_of(node)
        if node.role == "placeholder":
            side = row.right if node.lane == "backward" else row.left
            label = node.op_and_argument if node.op != "parameter" else node.argument
            side.append((node.name, node, label))
        elif node.lane == "forward":
            row.forward.append(node)
        else:
            row.backward.append(node)
    for number, edit in enumerate(graph_view.edits):
        if not edit.nodes:
            order = graph_view.orders[edit.site]
            row = rows.setdefault(order, _Row(order))
            row.path = row.path or calls.get(order, ())
            (row.forward if lane_of_site(edit.site) == "forward" else row.backward).append(number)
    for key, source in visible_outputs(graph_view, graph_view.returned, hidden):
        row = row_of(graph_view.nodes[source])
        (row.right if graph_view.nodes[source].lane == "backward" else row.left).append((key, None, key))
    for row in rows.values():
        row.forward, row.backward = _grouped_by_edit(row.forward), _grouped_by_edit(row.backward)
    return [rows[order] for order in sorted(rows)]


def _grouped_by_edit(parts: Sequence[Node | int]) -> list[Node | int]:
    """Return parts in execution order, with the nodes of one edit next to each other."""
    groups: dict[tuple[str, int], list[Node | int]] = {}
    for number, part in enumerate(parts):
        is_edited = isinstance(part, Node) and part.edit >= 0
        key = ("edit", part.edit) if is_edited and isinstance(part, Node) else ("", number)
        groups.setdefault(key, []).append(part)
    return [part for group in groups.values() for part in group]


def _cells(graph_view: GraphView, number: int, row: _Row) -> list[LadderCell]:
    cells = []
    flow = _flow(graph_view, row.forward, FORWARD * (WIDTH + GAP))
    for line, places in enumerate(flow):
        end = places[-1][1] + places[-1][2] + GAP
        for node, x, width in places:  # against the centre
            at = LEFT + FORWARD * (WIDTH + GAP) - end + x
            cells.append(_cell(graph_view, node, number, line, at, width, len(row.forward)))
    flow = _flow(graph_view, row.backward, BACKWARD * (WIDTH + GAP))
    for line, places in enumerate(reversed(flow)):  # the backward runs up
        for part, x, width in places:
            cells.append(_cell(graph_view, part, number, line, RIGHT + x, width, len(row.backward)))
    for x, pills in ((EDGE, row.left), (PILLS, row.right)):
        cells += [LadderCell(key, node, -1, number, n, x, PILL, text, "") for n, (key, node, text) in enumerate(pills)]
    return cells


def _flow(
    graph_view: GraphView, parts: Sequence[Node | int], room: float
) -> list[list[tuple[Node | int, float, float]]]:
    """Break parts into lines, with their left edges and widths.

    An edit of several nodes has lines of its own; its first node has the room to name it.
    """
    lines: list[list[tuple[Node | int, float, float]]] = []
    x, block = room, -1
    for part in parts:
        number = part.edit if isinstance(part, Node) and part.edit >= 0 else -1
        own = number if number >= 0 and len(graph_view.edits[number].nodes) > 1 else -1
        is_chip = own >= 0 and isinstance(part, Node) and graph_view.edits[own].nodes[0] != part.name
        width = CHIP if is_chip else WIDTH
        if x + width > room or own != block:
            lines.append([])
            x, block = 0.0, own
        lines[-1].append((part, x, width))
        x += width + (CHIP_GAP if is_chip else GAP)
    return lines


def _cell(
    graph_view: GraphView, part: Node | int, row: int, line: int, x: float, width: float, count: int
) -> LadderCell:
    if isinstance(part, int):
        edit = graph_view.edits[part]
        return LadderCell(f"edit {part}", None, part, row, line, x, width, action_name(edit.action), str(edit.site))
    if part.edit >= 0:
        edit = graph_view.edits[part.edit]
        text = part.aten if width == CHIP else f"{action_name(edit.action)}: {part.aten}"
        small = action_name(edit.action) if width == CHIP else str(edit.site)
    elif part.mark:
        text, small = f"records: {part.aten}", ""
    else:
        text = f"{part.op}: {part.aten}" if count > 1 else part.op
        small = part.module_call or "(model)"
    return LadderCell(part.name, part, part.edit, row, line, x, width, text, small)


def _bands(paths: Sequence[tuple[tuple[str, int], ...]]) -> list[Band]:
    """Return the module calls that cover two rows or more, by first row."""
    found: list[Band] = []
    open_: list[tuple[tuple[str, int], int]] = []
    for number, path in enumerate([*paths, ()]):
        common = 0
        while common < min(len(open_), len(path)) and open_[common][0] == path[common]:
            common += 1
        while len(open_) > common:
            outer = tuple(call for call, _ in open_)
            first = open_.pop()[1]
            if number - first > 1:
                found.append(Band(outer, first, number - 1, 0))
        open_ += [(call, number) for call in path[common:]]
    found.sort(key=lambda band: (band.first, len(band.path)))
    depth: dict[tuple[tuple[str, int], ...], int] = {}
    for band in found:
        depth[band.path] = sum(band.path[:n] in depth for n in range(1, len(band.path)))
    return [Band(band.path, band.first, band.last, depth[band.path]) for band in found]


def lane_of(cell: LadderCell) -> str:
    """Return the lane of a box."""
    if cell.node is not None:
        return cell.node.lane
    return "backward" if cell.x >= RIGHT else "forward"


def _by_row(cells: Sequence[LadderCell], count: int) -> list[list[LadderCell]]:
    groups: list[list[LadderCell]] = [[] for _ in range(count)]
    for cell in cells:
        groups[cell.row].append(cell)
    return groups
