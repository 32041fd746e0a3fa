"""Diagrams as DOT source, and the postprocessing of the SVG that Graphviz makes of it."""

from __future__ import annotations

from collections.abc import Sequence
from xml.etree import ElementTree as ET

import graphviz

from gradrewrite.viz._diagram import MAX_LABEL, Diagram, Item, Link
from gradrewrite.viz._dot import data_attributes, html_text, tooltip
from gradrewrite.viz._graph_view import shorten, xml_safe
from gradrewrite.viz._grid_layout import lay_out_diagram, width_of
from gradrewrite.viz._scene import Box, LegendEntry, Scene, legend_positions
from gradrewrite.viz._scene import Line as Drawn
from gradrewrite.viz._theme import BAND, BORDER, CUT, FAINT, INK, INSERTED, INSERTED_EDGE, LINE, PAPER, RECORDS, SAVED

_SVG, _XLINK = "http://www.w3.org/2000/svg", "http://www.w3.org/1999/xlink"
_ARROW = 7.0


def diagram_dot(diagram: Diagram) -> str:
    """Return the DOT source of a diagram; boxes have their data as attributes, ``data_node`` is the fx name.

    Rows of the overview have a meaning, so its positions are those of the grid layout and Graphviz only draws
    (``layout=nop2``); its own layout would route edges between distant rows across all others.
    """
    dot = graphviz.Digraph("gradrewrite")
    dot.attr(bgcolor=PAPER, fontname="sans-serif", fontcolor=INK, fontsize="11")
    dot.attr("node", shape="box", style="filled,rounded", fontname="sans-serif", fontsize="11", margin="0.06,0.04")
    dot.attr("edge", fontname="sans-serif", fontsize="9", color=LINE, arrowsize="0.6")
    if diagram.is_grid:
        _add_placed(dot, diagram)
    else:
        _add_free(dot, diagram)
    return str(dot.source)


def _add_free(dot: graphviz.Digraph, diagram: Diagram) -> None:
    """Add one cluster per column, and the edges, for Graphviz to lay out."""
    dot.attr(rankdir="TB", ranksep="0.3", nodesep="0.35", labelloc="t", labeljust="l")
    dot.attr(label=_table([diagram.title, *diagram.caption], diagram.legend))
    for column in diagram.columns:
        with dot.subgraph(name=f"cluster_{column}") as part:
            part.attr(label=column, color=BORDER, fontsize="12", labelloc="t", labeljust="c")
            for item in diagram.items:
                if item.column == column:
                    part.node(item.key, **_attributes(item, _label(item)))
    for link in diagram.links:
        constraint = "false" if link.kind == "saved" else "true"
        dot.edge(link.source, link.target, constraint=constraint, **_edge_attributes(link))


def _add_placed(dot: graphviz.Digraph, diagram: Diagram) -> None:
    """Add boxes, edges and labels at the positions of the grid layout."""
    scene = lay_out_diagram(diagram)
    dot.attr(layout="nop2", splines="true", bb=f"0,0,{scene.width:g},{scene.height:g}")
    for frame in scene.frames:
        key, colors = f"frame {frame.key}", {"fillcolor": BAND, "color": BORDER, "style": "filled"}
        dot.node(key, label="", **colors, **_place(scene, frame.x, frame.y, frame.width, frame.height))
        _add_label(dot, scene, f"label {frame.key}", frame.x + 6, frame.y + 12, frame.text, "11")
    drawn = {(line.source, line.target): line for line in scene.lines}
    boxes = {box.key: box for box in scene.boxes}
    for item in diagram.items:
        box = boxes[item.key]
        place = _place(scene, box.x, box.y, box.width, box.height)
        dot.node(item.key, **_attributes(item, _label(item, box)), **place)
    for link in diagram.links:
        line = drawn[link.source, link.target]
        pos = _spline(scene, line)
        dot.edge(link.source, link.target, pos=pos, **_edge_attributes(link, is_far="far" in line.classes))
    for number, label in enumerate(scene.labels):
        size = {"head": "14", "small": "9"}.get(label.style, "11")
        _add_label(dot, scene, f"label {number}", label.x, label.y, label.text, size)
    for number, (entry, (x, y)) in enumerate(zip(scene.legend, legend_positions(scene), strict=True)):
        colors = {"fillcolor": entry.color, "color": entry.edge}
        dot.node(f"swatch {number}", label="", **colors, **_place(scene, x, y, 14, 11))
        _add_label(dot, scene, f"legend {number}", x + 19, y + 9.5, entry.text, "11")


def _place(scene: Scene, x: float, y: float, width: float, height: float) -> dict[str, str]:
    """Return position (points from the bottom) and size (inches) as Graphviz attributes."""
    pos = f"{x + width / 2:g},{scene.height - y - height / 2:g}"
    return {"pos": pos, "width": f"{width / 72:.5g}", "height": f"{height / 72:.5g}", "fixedsize": "true"}


def _add_label(dot: graphviz.Digraph, scene: Scene, key: str, x: float, y: float, text: str, size: str) -> None:
    """Add text that begins at x, with its baseline at y."""
    width = max(len(text), 1) * float(size) * 0.75
    cell = f'<tr><td align="left">{html_text(text)}</td></tr>'
    label = f'<<table border="0" cellborder="0" cellpadding="0" width="{width:g}">{cell}</table>>'
    place = _place(scene, x, y - float(size), width, float(size) * 1.3)
    dot.node(
        key, label=label, shape="plaintext", style="", fontsize=size, fontcolor=FAINT if size != "14" else INK, **place
    )


def _spline(scene: Scene, line: Drawn) -> str:
    """Return the spline of an edge, with the tip of its arrow."""
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
    flipped = [f"{x:g},{scene.height - y:g}" for x, y in (*points[:3], end)]
    return f"e,{ex:g},{scene.height - ey:g} " + " ".join(flipped)


def _label(item: Item, box: Box | None = None) -> str:
    rows = f'<tr><td align="left">{html_text(shorten(item.text, MAX_LABEL))}</td></tr>'
    small = (
        f'<font point-size="9" color="{FAINT}">{html_text(shorten(item.small, MAX_LABEL))}</font>' if item.small else ""
    )
    badge = f'<font point-size="9" color="{INSERTED_EDGE}"><b>{html_text(item.badge)}</b></font>' if item.badge else ""
    if small or badge:
        rows += f'<tr><td align="left">{small}{"  " if small and badge else ""}{badge}</td></tr>'
    width = f' width="{box.width - 10:g}"' if box is not None else ""
    return f'<<table border="0" cellborder="0" cellspacing="0" cellpadding="1"{width}>{rows}</table>>'


def _attributes(item: Item, label: str) -> dict[str, str]:
    is_inserted = "inserted" in item.classes or "records" in item.classes
    fill = item.fill or (RECORDS if "records" in item.classes else INSERTED if "inserted" in item.classes else PAPER)
    edge = CUT if "root_cause" in item.classes else INSERTED_EDGE if is_inserted or item.badge else LINE
    return {
        "label": label,
        "id": item.key,
        "class": " ".join(("item", *item.classes)),
        "tooltip": tooltip(item.title or item.text),
        "fillcolor": fill,
        "color": edge,
        "penwidth": "2" if edge != LINE else "1",
        **data_attributes(item.data),
    }


def _edge_attributes(link: Link, *, is_far: bool = False) -> dict[str, str]:
    if link.kind == "carried":
        return {"class": link.kind, "style": "dotted", "color": BORDER}
    found = {"penwidth": f"{width_of(link.tensors):.2f}", "class": link.kind or "plain"}
    if link.kind == "saved":
        found |= {"style": "dashed", "color": SAVED}
    elif link.kind == "cut":
        found |= {"style": "dashed", "color": CUT, "label": " X replaced", "fontcolor": CUT}
    elif is_far:
        found["color"] = BORDER
    return found


def finish_svg(svg: bytes, diagram: Diagram) -> str:
    """Add titles and data to the boxes of Graphviz's SVG, and cross out the replaced edges."""
    ET.register_namespace("", _SVG)
    ET.register_namespace("xlink", _XLINK)
    root = ET.fromstring(svg.decode())
    for side in ("width", "height"):  # points would be a third larger on a screen
        root.set(side, (root.get(side) or "").replace("pt", "px"))
    items = {item.key: item for item in diagram.items}
    for group in root.iter(f"{{{_SVG}}}g"):
        classes = (group.get("class") or "").split()
        item = items.get(group.get("id") or "")
        title = group.find(f"{{{_SVG}}}title")
        if item is not None and title is not None:
            title.text = xml_safe(item.title or item.text)
            for name, value in item.data.items():
                group.set(f"data-{name}", xml_safe(value))
            for link in list(group.iter(f"{{{_SVG}}}a")):
                link.attrib.pop(f"{{{_XLINK}}}title", None)  # browsers would show both
        elif classes[:1] == ["edge"] and "cut" in classes:
            _cross_out(group)
            for text in group.iter(f"{{{_SVG}}}text"):
                text.text = "replaced"  # other formats have the X as a letter
        elif classes[:1] == ["node"] and title is not None:
            group.remove(title)  # a label
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


def _table(lines: Sequence[str], legend: Sequence[LegendEntry]) -> str:
    rows = "".join(f'<tr><td align="left">{html_text(line)}</td></tr>' for line in lines)
    for entry in legend:
        square = f'<font point-size="16" color="{entry.color}">&#9632;</font>'
        rows += f'<tr><td align="left">{square} {html_text(entry.text)}</td></tr>'
    return f'<<table border="0" cellborder="0" cellspacing="0" cellpadding="1">{rows}</table>>'
