"""Sketches as DOT source for Graphviz, and what becomes of its SVG."""

from __future__ import annotations

import html
from collections.abc import Iterator, Sequence
from xml.etree import ElementTree as ET

import graphviz

from gradrewrite.viz._diagram import SIGNS, Item, Link, Sketch
from gradrewrite.viz._graph_view import plain, shorten
from gradrewrite.viz._grid_layout import arrange, width_of
from gradrewrite.viz._scene import (
    BAND,
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
    Picture,
    Swatch,
    legend_places,
)
from gradrewrite.viz._scene import Line as Drawn

LONGEST = 3000  # signs of an attribute; Graphviz reads at most 16 KiB, and escapes may take several bytes a sign
_SVG, _XLINK = "http://www.w3.org/2000/svg", "http://www.w3.org/1999/xlink"
_ARROW = 7.0


def to_dot(sketch: Sketch) -> str:
    """The sketch as DOT source; every box has its data as attributes, ``data_node`` for the name of its node.

    Where rows mean something (the overview) the places are ours, and Graphviz draws (``layout=nop2``): it would lead
    edges between rows far apart across all the others. Elsewhere the layout is Graphviz's.
    """
    dot = graphviz.Digraph("gradrewrite")
    dot.attr(bgcolor=PAPER, fontname="sans-serif", fontcolor=INK, fontsize="11")
    dot.attr("node", shape="box", style="filled,rounded", fontname="sans-serif", fontsize="11", margin="0.06,0.04")
    dot.attr("edge", fontname="sans-serif", fontsize="9", color=LINE, arrowsize="0.6")
    if sketch.is_grid:
        _add_placed(dot, sketch)
    else:
        _add_free(dot, sketch)
    return str(dot.source)


def _add_free(dot: graphviz.Digraph, sketch: Sketch) -> None:
    """Boxes in a cluster a column, and edges, for Graphviz to lay out."""
    dot.attr(rankdir="TB", ranksep="0.3", nodesep="0.35", labelloc="t", labeljust="l")
    dot.attr(label=_table([sketch.title, *sketch.caption], sketch.legend))
    for column in sketch.columns:
        with dot.subgraph(name=f"cluster_{column}") as part:
            part.attr(label=column, color="#d5dde5", fontsize="12", labelloc="t", labeljust="c")
            for item in sketch.items:
                if item.column == column:
                    part.node(item.key, **_attributes(item, _label(item)))
    for link in sketch.links:
        constraint = "false" if link.kind == "saved" else "true"
        dot.edge(link.source, link.target, constraint=constraint, **_edge_attributes(link))


def _add_placed(dot: graphviz.Digraph, sketch: Sketch) -> None:
    """Boxes, edges and words where our own layout puts them."""
    picture = arrange(sketch)
    dot.attr(layout="nop2", splines="true", bb=f"0,0,{picture.width:g},{picture.height:g}")
    for frame in picture.frames:
        key, colours = f"frame {frame.key}", {"fillcolor": BAND, "color": "#d5dde5", "style": "filled"}
        dot.node(key, label="", **colours, **_place(picture, frame.x, frame.y, frame.width, frame.height))
        _add_words(dot, picture, f"words {frame.key}", frame.x + 6, frame.y + 12, frame.text, "11")
    drawn = {(line.source, line.target): line for line in picture.lines}
    boxes = {box.key: box for box in picture.boxes}
    for item in sketch.items:
        box = boxes[item.key]
        place = _place(picture, box.x, box.y, box.width, box.height)
        dot.node(item.key, **_attributes(item, _label(item, box)), **place)
    for link in sketch.links:
        line = drawn[link.source, link.target]
        pos = _spline(picture, line, has_arrow=True)
        dot.edge(link.source, link.target, pos=pos, **_edge_attributes(link, is_far="far" in line.classes))
    for number, words in enumerate(picture.words):
        size = {"head": "14", "small": "9"}.get(words.style, "11")
        _add_words(dot, picture, f"words {number}", words.x, words.y, words.text, size)
    for number, (swatch, (x, y)) in enumerate(zip(picture.legend, legend_places(picture), strict=True)):
        colours = {"fillcolor": swatch.colour, "color": swatch.edge}
        dot.node(f"swatch {number}", label="", **colours, **_place(picture, x, y, 14, 11))
        _add_words(dot, picture, f"legend {number}", x + 19, y + 9.5, swatch.text, "11")


def _place(picture: Picture, x: float, y: float, width: float, height: float) -> dict[str, str]:
    """Position and size as Graphviz has them: points from below, inches."""
    pos = f"{x + width / 2:g},{picture.height - y - height / 2:g}"
    return {"pos": pos, "width": f"{width / 72:.5g}", "height": f"{height / 72:.5g}", "fixedsize": "true"}


def _add_words(dot: graphviz.Digraph, picture: Picture, key: str, x: float, y: float, text: str, size: str) -> None:
    """Text that begins at x, with its base line at y."""
    width = max(len(text), 1) * float(size) * 0.75
    cell = f'<tr><td align="left">{_escape(text)}</td></tr>'
    label = f'<<table border="0" cellborder="0" cellpadding="0" width="{width:g}">{cell}</table>>'
    place = _place(picture, x, y - float(size), width, float(size) * 1.3)
    dot.node(
        key, label=label, shape="plaintext", style="", fontsize=size, fontcolor=FAINT if size != "14" else INK, **place
    )


def _spline(picture: Picture, line: Drawn, *, has_arrow: bool) -> str:
    """The way of an edge, with the point of its arrow."""
    points = line.points
    if len(points) == 2:
        (ax, ay), (bx, by) = points
        points = (
            (ax, ay),
            (ax + (bx - ax) / 3, ay + (by - ay) / 3),
            (bx - (bx - ax) / 3, by - (by - ay) / 3),
            (bx, by),
        )
    (cx, cy), (ex, ey) = points[2], points[3]
    length = max(((ex - cx) ** 2 + (ey - cy) ** 2) ** 0.5, 1e-9)
    end = (ex - (ex - cx) / length * _ARROW, ey - (ey - cy) / length * _ARROW)
    flipped = [f"{x:g},{picture.height - y:g}" for x, y in (*points[:3], end)]
    return f"e,{ex:g},{picture.height - ey:g} " + " ".join(flipped)


def _label(item: Item, box: Box | None = None) -> str:
    rows = f'<tr><td align="left">{_escape(shorten(item.text, SIGNS))}</td></tr>'
    small = f'<font point-size="9" color="{FAINT}">{_escape(shorten(item.small, SIGNS))}</font>' if item.small else ""
    badge = f'<font point-size="9" color="{INSERTED_EDGE}"><b>{_escape(item.badge)}</b></font>' if item.badge else ""
    if small or badge:
        rows += f'<tr><td align="left">{small}{"  " if small and badge else ""}{badge}</td></tr>'
    width = f' width="{box.width - 10:g}"' if box is not None else ""
    return f'<<table border="0" cellborder="0" cellspacing="0" cellpadding="1"{width}>{rows}</table>>'


def _attributes(item: Item, label: str) -> dict[str, str]:
    is_inserted = "inserted" in item.classes or "records" in item.classes
    fill = item.fill or (RECORDS if "records" in item.classes else INSERTED if "inserted" in item.classes else PAPER)
    edge = CUT if "blamed" in item.classes else INSERTED_EDGE if is_inserted or item.badge else LINE
    data = {key: text for name, value in item.data.items() for key, text in _pieces(f"data_{name}", value)}
    return {
        "label": label,
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


def _edge_attributes(link: Link, *, is_far: bool = False) -> dict[str, str]:
    if link.kind == "carried":
        return {"class": link.kind, "style": "dotted", "color": "#d5dde5"}
    found = {"penwidth": f"{width_of(link.tensors):.2f}", "class": link.kind or "plain"}
    if link.kind == "saved":
        found |= {"style": "dashed", "color": SAVED}
    elif link.kind == "cut":
        found |= {"style": "dashed", "color": CUT, "label": " X replaced", "fontcolor": CUT}
    elif is_far:
        found["color"] = "#d5dde5"
    return found


def finish_svg(svg: bytes, sketch: Sketch) -> str:
    """Give the boxes of Graphviz's SVG their titles and data, and cross out the edges that are gone."""
    ET.register_namespace("", _SVG)
    ET.register_namespace("xlink", _XLINK)
    root = ET.fromstring(svg.decode())
    for side in ("width", "height"):  # points would be a third larger on a screen
        root.set(side, (root.get(side) or "").replace("pt", "px"))
    items = {item.key: item for item in sketch.items}
    for group in root.iter(f"{{{_SVG}}}g"):
        classes = (group.get("class") or "").split()
        item = items.get(group.get("id") or "")
        title = group.find(f"{{{_SVG}}}title")
        if item is not None and title is not None:
            title.text = plain(item.title or item.text)
            for name, value in item.data.items():
                group.set(f"data-{name}", plain(value))
            for link in list(group.iter(f"{{{_SVG}}}a")):
                link.attrib.pop(f"{{{_XLINK}}}title", None)  # browsers would show both
        elif classes[:1] == ["edge"] and "cut" in classes:
            _cross_out(group)
            for text in group.iter(f"{{{_SVG}}}text"):
                text.text = "replaced"  # other formats have the X as a letter
        elif classes[:1] == ["node"] and title is not None:
            group.remove(title)  # words
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


def _table(lines: Sequence[str], legend: Sequence[Swatch]) -> str:
    rows = "".join(f'<tr><td align="left">{_escape(line)}</td></tr>' for line in lines)
    for swatch in legend:
        square = f'<font point-size="16" color="{swatch.colour}">&#9632;</font>'
        rows += f'<tr><td align="left">{square} {_escape(swatch.text)}</td></tr>'
    return f'<<table border="0" cellborder="0" cellspacing="0" cellpadding="1">{rows}</table>>'
