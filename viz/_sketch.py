"""Small pictures, for Graphviz or for our own layout: the overview and the neighbourhood of a site."""

from __future__ import annotations

import html
import math
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from xml.etree import ElementTree as ET

import graphviz

from gradrewrite.viz._net import plain, shorten
from gradrewrite.viz._picture import (
    CUT,
    FAINT,
    INK,
    INSERTED,
    INSERTED_EDGE,
    LINE,
    PAPER,
    RECORDS,
    SAVED,
    Box,
    Frame,
    Line,
    Picture,
    Swatch,
    Words,
)

SIGNS = 44  # of a label
LONGEST = 3000  # of an attribute; Graphviz reads at most 16 KiB, and escapes may take several bytes a sign
_WIDTH, _HEIGHT, _GAP, _PITCH, _TOP = 250, 32, 18, 58, 66
_SVG, _XLINK = "http://www.w3.org/2000/svg", "http://www.w3.org/1999/xlink"


@dataclass(frozen=True, slots=True)
class Item:
    """One box of a sketch.

    Attributes:
        key: Its name in the sketch.
        column: The column, and Graphviz's cluster, that it stands in.
        row: Its row from above.
        text: First line.
        small: Second line.
        badge: A mark beside it: the number of inserted nodes.
        classes: ``inserted``, ``records``, ``blamed``.
        title: What a pointer on it shows.
        data: ``data-`` attributes.
        fill: Colour, if not that of its classes.
    """

    key: str
    column: str
    row: int
    text: str
    small: str = ""
    badge: str = ""
    classes: tuple[str, ...] = ()
    title: str = ""
    data: Mapping[str, str] = field(default_factory=dict)
    fill: str = ""


@dataclass(frozen=True, slots=True)
class Link:
    """One edge: ``kind`` is ``""``, ``"saved"``, ``"carried"`` (to the records) or ``"cut"`` (replaced)."""

    source: str
    target: str
    kind: str = ""
    tensors: int = 1


@dataclass(frozen=True, slots=True)
class Sketch:
    """A small picture.

    Attributes:
        title: Its title.
        columns: Names of the columns from the left.
        items: Boxes.
        links: Edges.
        caption: Lines of text below.
        legend: What colours mean.
        is_grid: Whether rows are the same in all columns.
    """

    title: str
    columns: tuple[str, ...]
    items: Sequence[Item]
    links: Sequence[Link]
    caption: Sequence[str] = ()
    legend: Sequence[Swatch] = ()
    is_grid: bool = True


def to_dot(sketch: Sketch) -> str:
    """The sketch as DOT source; every box has its data as attributes, ``fx`` for the name of its node."""
    dot = graphviz.Digraph("gradrewrite")
    dot.attr(rankdir="TB", ranksep="0.3", nodesep="0.35", bgcolor=PAPER, fontname="sans-serif", fontcolor=INK)
    dot.attr(label=_html([sketch.title, *sketch.caption], sketch.legend), labelloc="b", labeljust="l", fontsize="11")
    dot.attr("node", shape="box", style="filled,rounded", fontname="sans-serif", fontsize="11", margin="0.06,0.04")
    dot.attr("edge", fontname="sans-serif", fontsize="9", color=LINE, arrowsize="0.6")
    if sketch.is_grid:
        _add_grid(dot, sketch)
    else:
        _add_columns(dot, sketch)
    items = {item.key: item for item in sketch.items}
    for link in sketch.links:
        side = _side_of(sketch, items[link.source], items[link.target])
        dot.edge(link.source, link.target, **_edge_attributes(link, side, is_grid=sketch.is_grid))
    return str(dot.source)


def _attributes(item: Item) -> dict[str, str]:
    is_inserted = "inserted" in item.classes or "records" in item.classes
    fill = item.fill or (RECORDS if "records" in item.classes else INSERTED if "inserted" in item.classes else PAPER)
    edge = CUT if "blamed" in item.classes else INSERTED_EDGE if is_inserted or item.badge else LINE
    rows = f'<tr><td align="left">{_escape(shorten(item.text, SIGNS))}</td></tr>'
    small = f'<font point-size="9" color="{FAINT}">{_escape(shorten(item.small, SIGNS))}</font>' if item.small else ""
    badge = f'<font point-size="9" color="{INSERTED_EDGE}"><b>{_escape(item.badge)}</b></font>' if item.badge else ""
    if small or badge:
        rows += f'<tr><td align="left">{small}{" " if small and badge else ""}{badge}</td></tr>'
    table = f'<<table border="0" cellborder="0" cellspacing="0" cellpadding="1">{rows}</table>>'
    data = {key: text for name, value in item.data.items() for key, text in _pieces(f"data_{name}", value)}
    return {
        "label": table,
        "id": item.key,
        "class": " ".join(("item", *item.classes)),
        "tooltip": graphviz.escape(plain(shorten(item.title or item.text, LONGEST))),
        "fillcolor": fill,
        "color": edge,
        "penwidth": "2" if edge != LINE else "1",
        **data,
    }


def _pieces(name: str, value: str) -> Iterator[tuple[str, str]]:
    """An attribute, or several where Graphviz would refuse one so long: ``data_inserted``, ``data_inserted_2``."""
    words, number = value.split(" "), 1
    while words:
        count, length = 0, 0
        while count < len(words) and (not count or length + len(words[count]) < LONGEST):
            length += len(words[count]) + 1
            count += 1
        text = shorten(" ".join(words[:count]), LONGEST)
        yield name if number == 1 else f"{name}_{number}", graphviz.escape(plain(text))
        words, number = words[count:], number + 1


def _edge_attributes(link: Link, side: str | None, *, is_grid: bool) -> dict[str, str]:
    if link.kind == "carried":
        return {"class": link.kind, "constraint": "false", "style": "dotted", "color": "#d5dde5"}
    found = {"penwidth": f"{width_of(link.tensors):.2f}", "class": link.kind or "plain"}
    if link.tensors > 1:
        found |= {"label": f" {link.tensors}", "fontcolor": FAINT}
    if is_grid:
        found["constraint"] = "false"
        if side is not None:
            found |= {"tailport": side, "headport": side, "color": "#d5dde5"}
    if link.kind == "saved":
        found |= {"style": "dashed", "color": SAVED, "constraint": "false"}
    if link.kind == "cut":
        found |= {"style": "dashed", "color": CUT, "label": " X replaced", "fontcolor": CUT}
    return found


def _side_of(sketch: Sketch, a: Item, b: Item) -> str | None:
    """Where an edge between rows far apart runs: outside of its column."""
    if a.column != b.column or abs(a.row - b.row) <= 1:
        return None
    return "w" if a.column == sketch.columns[0] else "e"


def _add_columns(dot: graphviz.Digraph, sketch: Sketch) -> None:
    """A cluster a column."""
    for column in sketch.columns:
        with dot.subgraph(name=f"cluster_{column}") as part:
            part.attr(label=column, color="#d5dde5", fontsize="12", labelloc="t", labeljust="c")
            for item in sketch.items:
                if item.column == column:
                    part.node(item.key, **_attributes(item))


def _add_grid(dot: graphviz.Digraph, sketch: Sketch) -> None:
    """Rows of one rank, and invisible edges that keep them in order; clusters would tear the rows apart."""
    rows: dict[int, list[str]] = defaultdict(list)
    columns: dict[str, list[tuple[int, str]]] = defaultdict(list)
    top = min((item.row for item in sketch.items), default=0) - 1
    for column in sketch.columns:
        dot.node(f"column {column}", label=column, shape="plaintext", style="", group=column)
        rows[top].append(f"column {column}")
        columns[column].append((top, f"column {column}"))
    for item in sketch.items:
        dot.node(item.key, group=item.column, **_attributes(item))
        rows[item.row].append(item.key)
        columns[item.column].append((item.row, item.key))
    for keys in rows.values():
        with dot.subgraph() as same:
            same.attr(rank="same")
            for key in keys:
                same.node(key)
        for a, b in pairwise(keys):
            dot.edge(a, b, style="invis", minlen="2")
    for members in columns.values():
        for (_, a), (_, b) in pairwise(sorted(members)):
            dot.edge(a, b, style="invis", weight="50")


def width_of(tensors: int) -> float:
    """Width of an edge that stands for so many tensors, in points."""
    return 1.0 + math.log2(max(tensors, 1)) * 0.5


def to_picture(sketch: Sketch, notice: str = "") -> Picture:
    """The sketch in our own layout: columns side by side, rows below each other.

    Args:
        sketch: The sketch.
        notice: A line on top, where Graphviz could not draw it.
    """
    taken: dict[tuple[str, int], int] = defaultdict(int)
    slots = {
        c: max([sum(i.column == c and i.row == r for i in sketch.items) for r in _rows(sketch)], default=1)
        for c in sketch.columns
    }
    lefts, x = {}, 30.0
    for column in sketch.columns:
        lefts[column] = x
        x += max(slots[column], 1) * (_WIDTH + _GAP) + 50
    places = {row: number for number, row in enumerate(_rows(sketch))}
    boxes: dict[str, Box] = {}
    for item in sketch.items:
        slot = taken[item.column, item.row]
        taken[item.column, item.row] += 1
        at = (lefts[item.column] + slot * (_WIDTH + _GAP), _TOP + places[item.row] * _PITCH)
        boxes[item.key] = _box(item, *at)
    bottom = _TOP + len(places) * _PITCH
    frames = [
        Frame(c, lefts[c] - 12, _TOP - 20, slots[c] * (_WIDTH + _GAP) + 8, bottom - _TOP + 10, c)
        for c in sketch.columns
    ]
    lines = [line for link in sketch.links for line in _lines(boxes[link.source], boxes[link.target], link)]
    text = [notice, *sketch.caption] if notice else list(sketch.caption)
    words = [Words(16, 24, sketch.title, "head")]
    words += [Words(16, bottom + 16 + 15 * n, shorten(line, 220)) for n, line in enumerate(text)]
    height = bottom + 30 + 15 * len(text) + 17 * len(sketch.legend) + 10
    widest = max([len(shorten(t, 220)) for t in text] or [0]) * 6.4 + 30
    return Picture(
        sketch.title, max(x, widest), height, frames, lines, list(boxes.values()), words, list(sketch.legend)
    )


def _rows(sketch: Sketch) -> list[int]:
    return sorted({item.row for item in sketch.items})


def _box(item: Item, x: float, y: float) -> Box:
    small = f"{item.small}  {item.badge}".strip()
    classes = ("node", *item.classes) if not item.badge else ("node", "inserted", *item.classes)
    return Box(
        key=item.key,
        x=x,
        y=y,
        width=_WIDTH,
        height=_HEIGHT,
        text=shorten(item.text, 38),
        small=shorten(small, 48),
        classes=classes,
        title=item.title,
        data=item.data,
        fill=item.fill or (PAPER if item.badge else ""),
    )


def _lines(a: Box, b: Box, link: Link) -> list[Line]:
    classes = (link.kind,) if link.kind else ()
    begin, end = (a.x + a.width / 2, a.y + a.height / 2), (b.x + b.width / 2, b.y + b.height / 2)
    if a.x == b.x and abs(a.y - b.y) > _PITCH:
        side = a.x - 26
        found = [Line(a.key, b.key, ((a.x, begin[1]), (side, begin[1]), (side, end[1]), (b.x, end[1])), classes)]
    else:
        found = [Line(a.key, b.key, (begin, end), classes, width_of(link.tensors))]
    if link.kind == "cut":
        x, y = (begin[0] + end[0]) / 2, (begin[1] + end[1]) / 2
        for dy in (6, -6):
            found.append(Line(a.key, b.key, ((x - 6, y - dy), (x + 6, y + dy)), ("cross",)))
    return found


def finish_svg(svg: bytes, sketch: Sketch) -> str:
    """Give the boxes of Graphviz's SVG their titles and data, and cross out the edges that are gone."""
    ET.register_namespace("", _SVG)
    ET.register_namespace("xlink", _XLINK)
    root = ET.fromstring(svg.decode())
    items = {item.key: item for item in sketch.items}
    for group in root.iter(f"{{{_SVG}}}g"):
        kind = (group.get("class") or "").split()[:1]
        item = items.get(group.get("id") or "")
        title = group.find(f"{{{_SVG}}}title")
        if item is not None and title is not None:
            title.text = plain(item.title or item.text)
            for name, value in item.data.items():
                group.set(f"data-{name}", plain(value))
            for link in list(group.iter(f"{{{_SVG}}}a")):
                link.attrib.pop(f"{{{_XLINK}}}title", None)  # browsers would show both
        elif kind == ["edge"] and "cut" in (group.get("class") or "").split():
            _cross_out(group)
    return ET.tostring(root, encoding="unicode")


def _cross_out(group: ET.Element) -> None:
    path = group.find(f".//{{{_SVG}}}path")
    assert path is not None
    numbers = [float(n) for n in (path.get("d") or "").replace("M", " ").replace("C", " ").replace(",", " ").split()]
    middle = len(numbers) // 4 * 2
    x, y = numbers[middle], numbers[middle + 1]
    for dy in (5, -5):
        cross = ET.SubElement(group, f"{{{_SVG}}}path", {"class": "cross", "stroke": CUT, "stroke-width": "2"})
        cross.set("d", f"M{x - 5:g} {y - dy:g}L{x + 5:g} {y + dy:g}")


def _escape(text: str) -> str:
    return html.escape(plain(text))


def _html(lines: Sequence[str], legend: Sequence[Swatch]) -> str:
    rows = "".join(f'<tr><td align="left" colspan="2">{_escape(line)}</td></tr>' for line in lines)
    for swatch in legend:
        cell = f'<td width="16" border="1" color="{swatch.edge}" bgcolor="{swatch.colour}"></td>'
        rows += f'<tr>{cell}<td align="left">{_escape(swatch.text)}</td></tr>'
    return f'<<table border="0" cellborder="0" cellspacing="0" cellpadding="1">{rows}</table>>'
