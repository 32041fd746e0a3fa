"""Layout of a ladder: columns, row heights, and the control points of edges.

The forward runs down on the left, the backward up on the right. Edges from forward values to the backward that needs
them ("saved") are what ruins layered layouts of a joint graph; here they are short and horizontal. All lengths of
static drawings and of the page are here: heights add up, and a control point is a place on the edge of a box.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import count
from math import log2

from gradrewrite._utils.grouping import grouped
from gradrewrite.viz._fonts import fit
from gradrewrite.viz._ladder import COLUMNS, Column, Edge, Ladder, Part, describe_node
from gradrewrite.viz._metric_colors import SiteMetric, box_colors
from gradrewrite.viz._norms import HEIGHT, Cell, SiteNorms, cells_of
from gradrewrite.viz._scene import HEAD, SMALL, SWATCH, Box, Frame, Label, LegendEntry, Line, Scene, fit_boxes
from gradrewrite.viz._theme import INSERTED, INSERTED_EDGE, LINE, PAPER, RECORDS, SAVED

WIDTHS: Mapping[Column, float] = {
    "input": 170,
    "forward": 230,
    "inner": 230,
    "backward": 230,
    "edit": 360,
    "output": 170,
}
HEADINGS: Mapping[Column, str] = {
    "input": "parameters, inputs",
    "forward": "forward, runs down",
    "inner": "gradients inside, run up",
    "backward": "backward, runs up",
    "edit": "edits",
    "output": "gradients",
}
MARGIN, BETWEEN = 48.0, 52.0  # left and right of all columns, between two
BOX, PILL, GAP = 36.0, 20.0, 8.0  # heights, and the distance below
HEADER, FOOT, TOP = 20.0, 6.0, 70.0
_NARROWEST = 800.0  # a drawing with a title: what its note and its legend take
REACH, BULGE = 22.0, 20.0  # of curves from column to column, and of those along a column
_LEGEND = {  # by classes of a box
    ("inserted",): LegendEntry(
        INSERTED, INSERTED_EDGE, "an edit: action, site, share of steps it acted in, median factor"
    ),
    ("inserted", "idle"): LegendEntry(
        PAPER, INSERTED_EDGE, "an edit that never acted: a clip, or a check that found nothing"
    ),
    ("records",): LegendEntry(RECORDS, INSERTED_EDGE, "carries records out of the graph"),
}

Point = tuple[float, str, float]  # x, key of a box, share of its height
Route = tuple[Edge, tuple[Point, ...]]  # an edge with its control points


@dataclass(frozen=True)
class LadderLayout:
    """Horizontal positions and heights of a ladder."""

    ladder: Ladder
    norms: SiteNorms | None = None

    @cached_property
    def cells(self) -> dict[str, list[Cell]]:
        """Layers or calls with norms, by key of the box."""
        return cells_of(self.ladder, self.norms) if self.norms is not None else {}

    def height_of(self, part: Part) -> float:
        """Return the height of a box."""
        return PILL if part.column in ("input", "output") else BOX + HEIGHT * (part.key in self.cells)

    @cached_property
    def columns(self) -> dict[Column, float]:
        """Left edges of the columns that have boxes."""
        used = {part.column for part in self.ladder.parts}
        left, found = MARGIN, {}
        for column in COLUMNS:
            if column in used:
                found[column] = left
                left += WIDTHS[column] + BETWEEN
        return found

    @property
    def width(self) -> float:
        """Width of the drawing."""
        return max((x + WIDTHS[column] for column, x in self.columns.items()), default=300.0) + MARGIN

    @cached_property
    def offsets(self) -> list[dict[str, float]]:
        """Upper edges of the boxes of each row, from the top of the row."""
        found = []
        for row in self.ladder.rows:
            used: dict[Column, float] = defaultdict(float)
            places = {}
            for part in row:
                places[part.key] = used[part.column]
                used[part.column] += self.height_of(part) + GAP
            found.append(places)
        return found

    @cached_property
    def heights(self) -> list[float]:
        """Heights of the rows."""
        return [
            max((places[part.key] + self.height_of(part) + GAP for part in row), default=0.0)
            for row, places in zip(self.ladder.rows, self.offsets, strict=True)
        ]

    @cached_property
    def routes(self) -> list[Route]:
        """Edges with their control points."""
        parts = {part.key: part for part in self.ladder.parts}
        ranks: dict[Column, Iterator[int]] = defaultdict(count)
        rank = {part.key: next(ranks[part.column]) for part in self.ladder.parts}
        return [(e, self._points(parts[e.source], parts[e.target], rank)) for e in self.ladder.edges]

    def _points(self, a: Part, b: Part, rank: Mapping[str, int]) -> tuple[Point, ...]:
        if a.key == b.key:  # what a loop carries: from the end of an iteration to the begin of the next
            is_down = a.column == "forward"
            side = self.columns[a.column] + WIDTHS[a.column] * (not is_down)
            bend = side + REACH * (-1 if is_down else 1)
            end, begin = (0.8, 0.2) if is_down else (0.2, 0.8)
            return (side, a.key, end), (bend, a.key, end), (bend, a.key, begin), (side, a.key, begin)
        left, right = (self.columns[part.column] for part in (a, b))
        if a.column != b.column:
            is_right = right > left
            start = left + WIDTHS[a.column] * is_right
            end = right + WIDTHS[b.column] * (not is_right)
            reach = REACH if is_right else -REACH
            return (start, a.key, 0.5), (start + reach, a.key, 0.5), (end - reach, b.key, 0.5), (end, b.key, 0.5)
        far, is_down = abs(rank[a.key] - rank[b.key]), rank[b.key] > rank[a.key]
        if far == 1:
            middle = left + WIDTHS[a.column] / 2
            return (middle, a.key, float(is_down)), (middle, b.key, float(not is_down))
        is_left = a.column == "forward"
        side = left if is_left else left + WIDTHS[a.column]
        bend = side + min(BETWEEN - 4, BULGE + 3 * far) * (-1 if is_left else 1)
        return (side, a.key, 0.5), (bend, a.key, 0.5), (bend, b.key, 0.5), (side, b.key, 0.5)


def draw_ladder(
    layout: LadderLayout,
    title: str = "",
    note: str = "",
    metric: SiteMetric | None = None,
    root_cause: Collection[str] = (),
    *,
    is_page: bool = False,
) -> Scene:
    """Return the scene of a ladder; without title, headings alone; for a page without norms."""
    ladder, norms = layout.ladder, layout.norms
    top = TOP if title else HEADER + GAP
    tops, frames, height = _place(layout, top)
    unplaced = boxes_of(layout, metric, root_cause, is_page=is_page)
    boxes = [
        replace(unplaced[key], y=tops[number] + y)
        for number, places in enumerate(layout.offsets)
        for key, y in places.items()
    ]
    by_key = {box.key: box for box in boxes}
    lines = [_line(route, by_key) for route in layout.routes]
    legend = _legend(ladder) if title else []
    legend += metric.legend() if title and metric is not None else []
    legend += norms.legend() if title and norms is not None and layout.cells else []
    width = max(layout.width, _NARROWEST if title else 0.0)
    labels = [Label(x, top - 8, HEADINGS[column]) for column, x in layout.columns.items()]
    if title:
        labels.append(Label(16, 22, fit(title, width - 32, HEAD), "head"))
        labels.append(Label(16, 40, fit(note, width - 32, SMALL)))
    return Scene(title, width, height + SWATCH * len(legend) + 24, frames, lines, boxes, labels, legend)


def boxes_of(
    layout: LadderLayout, metric: SiteMetric | None, root_cause: Collection[str], *, is_page: bool = False
) -> dict[str, Box]:
    """Return the boxes of a ladder by key, at the top of the drawing."""
    colors = box_colors(layout.ladder, metric) if metric is not None else {}
    blamed = frozenset(root_cause)
    boxes = []
    for part in layout.ladder.parts:
        kind = "pill" if part.column in ("input", "output") else part.column
        classes = ("node", kind, *part.classes, *(("root_cause",) if blamed.intersection(part.nodes) else ()))
        fill, text = colors.get(part.key, ("", ""))
        title = f"{part.title}\n{text}" if text else part.title
        x, width, height = layout.columns[part.column], WIDTHS[part.column], layout.height_of(part)
        data, inside = _data(layout.ladder, part)
        box = Box(part.key, x, 0, width, height, part.text, part.small, classes, title, data, inside, fill)
        boxes.append(_with_norms(layout, box, is_page=is_page))
    return {box.key: box for box in fit_boxes(boxes)}


def _with_norms(layout: LadderLayout, box: Box, *, is_page: bool) -> Box:
    """Add figures and the bar of a box, or its strip; for a page only their room."""
    cells, norms = layout.cells.get(box.key), layout.norms
    if cells is None or norms is None:
        return box
    if is_page:
        return replace(box, text_height=BOX)
    text = " \u00b7 ".join(filter(None, (box.small, norms.text(cells))))
    return replace(box, small=text, text_height=BOX, marks=norms.marks(cells, BOX, box.width))


def _data(ladder: Ladder, part: Part) -> tuple[dict[str, str], list[tuple[dict[str, str], str]]]:
    view = ladder.graph_view
    nodes = part.nodes[:1] if ladder.is_overview and not part.edits else part.nodes
    is_short = ladder.is_overview and len(nodes) > 1
    inside = [({"node": name}, name if is_short else describe_node(view, view.nodes[name])) for name in nodes]
    if len(part.edits) == 1:
        edit = view.edits[part.edits[0]]
        return {"edit": str(edit.site), "action": edit.text}, inside
    for number in (*part.edits, *part.figures):
        edit = view.edits[number]
        inside.append(({"edit": str(edit.site), "action": edit.text}, f"{edit.text} at {edit.site}"))
    if part.column in ("input", "output"):
        return ({"node": part.nodes[0]}, []) if part.nodes else ({"returned": part.title}, [])
    return {}, inside


def _place(layout: LadderLayout, top: float) -> tuple[list[float], list[Frame], float]:
    opening = grouped((band.first, band) for band in layout.ladder.bands)
    closing = grouped((band.last, band) for band in layout.ladder.bands)
    tops, begins, frames, y = [], {}, [], top
    for row, height in enumerate(layout.heights):
        for band in opening.get(row, ()):
            begins[band.key] = y
            y += HEADER
        tops.append(y + 2)
        y += height
        for band in reversed(closing.get(row, ())):
            y += FOOT
            x = inset(band.depth)
            begin, width = begins[band.key], layout.width - 2 * x
            name = fit(band.name, width - 12, SMALL)
            frames.append(Frame(band.key, x, begin, width, y - begin - 4, name))
    return tops, sorted(frames, key=lambda frame: (frame.y, -frame.height)), y


def inset(depth: int) -> float:
    """Return the distance of a band's frame from the edge of the drawing."""
    return 6.0 + 6.0 * min(depth, 6)


def _line(route: Route, boxes: Mapping[str, Box]) -> Line:
    edge, controls = route
    points = tuple((x, boxes[key].y + share * boxes[key].height) for x, key, share in controls)
    title = f"{edge.tensors} tensors" if edge.tensors > 1 else ""
    width = round(1.0 + 0.4 * log2(edge.tensors), 2)
    return Line(edge.source, edge.target, points, (edge.kind,) if edge.kind else (), width, title)


def _legend(ladder: Ladder) -> list[LegendEntry]:
    shown = {part.classes for part in ladder.parts}
    found = [entry for classes, entry in _LEGEND.items() if classes in shown]
    if any(edge.kind == "carried" for edge in ladder.edges):
        found.append(LegendEntry(LINE, LINE, "from a box to itself: what a loop carries to its next iteration"))
    if any(edge.kind == "saved" for edge in ladder.edges):
        found.append(LegendEntry(PAPER, SAVED, "dashed: a forward value saved for the backward"))
    return found
