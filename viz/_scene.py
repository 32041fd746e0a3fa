"""``Scene``: boxes, lines, frames and labels with coordinates; ``to_svg`` writes one."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple
from xml.etree import ElementTree as ET

from gradrewrite.viz._graph_view import xml_safe
from gradrewrite.viz._theme import (
    BAND,
    BORDER,
    CUT,
    DETAIL,
    FAINT,
    INK,
    INSERTED,
    INSERTED_EDGE,
    LINE,
    PAPER,
    PILL,
    PILL_EDGE,
    RECORDS,
    SAVED,
)

STYLE = f"""
svg {{ font-family: "DejaVu Sans", Verdana, Arial, sans-serif; background: {PAPER}; }}
text {{ font-size: 10px; fill: {INK}; }} .small, .frame text {{ font-size: 8px; fill: {FAINT}; }}
.node .small {{ fill: {DETAIL}; }}
.head {{ font-size: 13px; font-weight: bold; }} .note {{ font-size: 11px; fill: {FAINT}; }}
.frame rect {{ fill: {BAND}; fill-opacity: 0.55; stroke: {BORDER}; }}
.node rect {{ fill: {PAPER}; stroke: {LINE}; }} .pill rect {{ fill: {PILL}; stroke: {PILL_EDGE}; }}
.inserted rect {{ fill: {INSERTED}; stroke: {INSERTED_EDGE}; stroke-width: 2; }}
.badged rect {{ stroke: {INSERTED_EDGE}; stroke-width: 2; }}
.records rect {{ fill: {RECORDS}; stroke: {INSERTED_EDGE}; stroke-width: 2; }}
.root_cause rect {{ stroke: {CUT}; stroke-width: 3; }}
path {{ fill: none; stroke: {LINE}; }} .saved {{ stroke: {SAVED}; stroke-dasharray: 3 2; }} .far {{ opacity: 0.35; }}
.carried, .fan {{ opacity: 0.12; }}
.cut {{ stroke: {CUT}; stroke-width: 2; stroke-dasharray: 4 3; }} .cross {{ stroke: {CUT}; stroke-width: 3; }}
"""


class ColorSample(NamedTuple):
    """A color, its description, and the value behind it."""

    color: str
    text: str
    value: float


@dataclass(frozen=True, slots=True)
class Box:
    """A rectangle with one or two lines of text.

    Attributes:
        key: Name by which lines refer to it.
        x: Left edge in pixels.
        y: Upper edge.
        width: Width.
        height: Height.
        text: First line.
        small: Second line.
        classes: Classes in the style sheet.
        title: What a pointer on it shows; a name and details.
        data: ``data-`` attributes.
        fill: Color, if it is not that of its classes.
    """

    key: str
    x: float
    y: float
    width: float
    height: float
    text: str
    small: str = ""
    classes: tuple[str, ...] = ("node",)
    title: str = ""
    data: Mapping[str, str] = field(default_factory=dict)
    fill: str = ""


@dataclass(frozen=True, slots=True)
class Line:
    """A line between two boxes; ``points`` are two, or the four of a cubic curve."""

    source: str
    target: str
    points: tuple[tuple[float, float], ...]
    classes: tuple[str, ...] = ()
    width: float = 1.0


@dataclass(frozen=True, slots=True)
class Frame:
    """A labeled rectangle behind boxes."""

    key: str
    x: float
    y: float
    width: float
    height: float
    text: str
    title: str = ""


@dataclass(frozen=True, slots=True)
class Label:
    """A free line of text; ``y`` is its baseline."""

    x: float
    y: float
    text: str
    style: str = "note"


@dataclass(frozen=True, slots=True)
class LegendEntry:
    """One entry of a legend."""

    color: str
    edge: str
    text: str


@dataclass(frozen=True, slots=True)
class Scene:
    """Everything that is drawn, from back to front."""

    title: str
    width: float
    height: float
    frames: Sequence[Frame] = ()
    lines: Sequence[Line] = ()
    boxes: Sequence[Box] = ()
    labels: Sequence[Label] = ()
    legend: Sequence[LegendEntry] = ()


def to_svg(scene: Scene) -> str:
    """Return the scene as an SVG document; text is escaped."""
    svg = ET.Element("svg", xmlns="http://www.w3.org/2000/svg", role="img")
    svg.set("viewBox", f"0 0 {scene.width:g} {scene.height:g}")
    svg.set("width", f"{scene.width:g}")
    svg.set("height", f"{scene.height:g}")
    ET.SubElement(svg, "title").text = xml_safe(scene.title)
    ET.SubElement(svg, "style").text = STYLE
    draw_into(svg, scene)
    return ET.tostring(svg, encoding="unicode")


def draw_into(parent: ET.Element, scene: Scene) -> None:
    """Append the parts of a scene to an SVG element."""
    behind = ET.SubElement(parent, "g", {"class": "frames"})
    for frame in scene.frames:
        _draw_frame(behind, frame)
    between = ET.SubElement(parent, "g", {"class": "lines"})
    for number, line in enumerate(scene.lines):
        path = ET.SubElement(between, "path", {"d": path_of(line.points), "data-line": str(number)})
        path.set("class", " ".join(line.classes))
        if line.width != 1.0:
            path.set("stroke-width", f"{line.width:g}")
    front = ET.SubElement(parent, "g", {"class": "boxes"})
    edits: dict[str, ET.Element] = {}
    for box in scene.boxes:
        _draw_box(_group_of(box, front, edits), box)
    for label in scene.labels:
        _text(parent, label.x, label.y, label.text, label.style)
    _draw_legend(parent, scene)


def _group_of(box: Box, front: ET.Element, edits: dict[str, ET.Element]) -> ET.Element:
    """Return the parent of a box: the boxes of one edit share a group element that names the edit."""
    number = box.data.get("edit")
    if number is None:
        return front
    if number not in edits:
        attributes = {f"data-{name}": xml_safe(box.data[name]) for name in ("edit", "site", "action")}
        edits[number] = ET.SubElement(front, "g", {"class": "edit", **attributes})
    return edits[number]


def path_of(points: Sequence[tuple[float, float]]) -> str:
    """Return the SVG path of a straight line (two points) or a cubic curve (four)."""
    (x, y), *rest = points
    letter = "C" if len(rest) == 3 else "L"
    return f"M{x:g} {y:g}{letter}" + " ".join(f"{a:g} {b:g}" for a, b in rest)


def _draw_frame(parent: ET.Element, frame: Frame) -> None:
    group = ET.SubElement(parent, "g", {"class": "frame", "data-frame": xml_safe(frame.key)})
    if frame.title:
        ET.SubElement(group, "title").text = xml_safe(frame.title)
    _rect(group, frame.x, frame.y, frame.width, frame.height)
    _text(group, frame.x + 6, frame.y + 11, frame.text, "")


def _draw_box(parent: ET.Element, box: Box) -> None:
    own = {
        f"data-{name}": xml_safe(value) for name, value in box.data.items() if name not in ("edit", "site", "action")
    }
    group = ET.SubElement(parent, "g", {"class": " ".join(box.classes), **own})
    group.set("transform", f"translate({box.x:g} {box.y:g})")
    if box.title:
        ET.SubElement(group, "title").text = xml_safe(box.title)
    rect = _rect(group, 0, 0, box.width, box.height)
    if box.fill:
        rect.set("style", f"fill:{box.fill}")
    if box.small:
        _text(group, 5, box.height / 2 - 2, box.text, "")
        _text(group, 5, box.height - 5, box.small, "small")
    else:
        _text(group, 5, box.height / 2 + 3.5, box.text, "")


def _draw_legend(parent: ET.Element, scene: Scene) -> None:
    group = ET.SubElement(parent, "g", {"class": "legend"})
    for entry, (x, y) in zip(scene.legend, legend_positions(scene), strict=True):
        rect = _rect(group, x, y, 14, 11)
        rect.set("style", f"fill:{entry.color};stroke:{entry.edge}")
        _text(group, x + 19, y + 9.5, entry.text, "note")


def legend_positions(scene: Scene) -> list[tuple[float, float]]:
    """Return the positions of the legend's entries, below each other at the bottom of the scene."""
    top = scene.height - 17 * len(scene.legend) - 8
    return [(16, top + 17 * n) for n in range(len(scene.legend))]


def _rect(parent: ET.Element, x: float, y: float, width: float, height: float) -> ET.Element:
    sizes = {"x": x, "y": y, "width": width, "height": height, "rx": 3}
    return ET.SubElement(parent, "rect", {name: f"{value:g}" for name, value in sizes.items()})


def _text(parent: ET.Element, x: float, y: float, text: str, style: str) -> None:
    element = ET.SubElement(parent, "text", {"x": f"{x:g}", "y": f"{y:g}"})
    if style:
        element.set("class", style)
    element.text = xml_safe(text)
