"""Pictures as plain values, and how they become SVG."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple
from xml.etree import ElementTree as ET

from gradrewrite.viz._graph_view import plain

INK, FAINT, LINE, SAVED = "#1f2933", "#6b7785", "#a9b4c0", "#9dbad6"
INSERTED, INSERTED_EDGE, RECORDS = "#ffd8a8", "#d9480f", "#e6e1f5"
BAND, PAPER, CUT = "#eef2f6", "#ffffff", "#c92a2a"

STYLE = f"""
svg {{ font-family: "DejaVu Sans", Verdana, Arial, sans-serif; background: {PAPER}; }}
text {{ font-size: 10px; fill: {INK}; }} .small, .frame text {{ font-size: 8px; fill: {FAINT}; }}
.node .small {{ fill: #495561; }}
.head {{ font-size: 13px; font-weight: bold; }} .note {{ font-size: 11px; fill: {FAINT}; }}
.frame rect {{ fill: {BAND}; fill-opacity: 0.55; stroke: #d5dde5; }}
.node rect {{ fill: {PAPER}; stroke: {LINE}; }} .pill rect {{ fill: #f4f6f8; stroke: #cfd7df; }}
.inserted rect {{ fill: {INSERTED}; stroke: {INSERTED_EDGE}; stroke-width: 2; }}
.badged rect {{ stroke: {INSERTED_EDGE}; stroke-width: 2; }}
.records rect {{ fill: {RECORDS}; stroke: {INSERTED_EDGE}; stroke-width: 2; }}
.blamed rect {{ stroke: {CUT}; stroke-width: 3; }}
path {{ fill: none; stroke: {LINE}; }} .saved {{ stroke: {SAVED}; stroke-dasharray: 3 2; }} .far {{ opacity: 0.35; }}
.carried, .fan {{ opacity: 0.12; }}
.cut {{ stroke: {CUT}; stroke-width: 2; stroke-dasharray: 4 3; }} .cross {{ stroke: {CUT}; stroke-width: 3; }}
"""


class Paint(NamedTuple):
    """A colour, what it says in words, and the value behind it."""

    colour: str
    words: str
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
        fill: Colour, if it is not that of its classes.
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
    """A labelled rectangle behind boxes."""

    key: str
    x: float
    y: float
    width: float
    height: float
    text: str
    title: str = ""


@dataclass(frozen=True, slots=True)
class Words:
    """A line of text by itself; ``y`` is its base line."""

    x: float
    y: float
    text: str
    style: str = "note"


@dataclass(frozen=True, slots=True)
class Swatch:
    """One entry of a legend."""

    colour: str
    edge: str
    text: str


@dataclass(frozen=True, slots=True)
class Picture:
    """A picture: what stands behind comes first."""

    title: str
    width: float
    height: float
    frames: Sequence[Frame] = ()
    lines: Sequence[Line] = ()
    boxes: Sequence[Box] = ()
    words: Sequence[Words] = ()
    legend: Sequence[Swatch] = ()


def to_svg(picture: Picture) -> str:
    """The picture as an SVG document; text is text, whatever it holds."""
    svg = ET.Element("svg", xmlns="http://www.w3.org/2000/svg", role="img")
    svg.set("viewBox", f"0 0 {picture.width:g} {picture.height:g}")
    svg.set("width", f"{picture.width:g}")
    svg.set("height", f"{picture.height:g}")
    ET.SubElement(svg, "title").text = plain(picture.title)
    ET.SubElement(svg, "style").text = STYLE
    draw_into(svg, picture)
    return ET.tostring(svg, encoding="unicode")


def draw_into(parent: ET.Element, picture: Picture) -> None:
    """Append the parts of a picture to an element."""
    behind = ET.SubElement(parent, "g", {"class": "frames"})
    for frame in picture.frames:
        _draw_frame(behind, frame)
    between = ET.SubElement(parent, "g", {"class": "lines"})
    for number, line in enumerate(picture.lines):
        path = ET.SubElement(between, "path", {"d": path_of(line.points), "data-line": str(number)})
        path.set("class", " ".join(line.classes))
        if line.width != 1.0:
            path.set("stroke-width", f"{line.width:g}")
    front = ET.SubElement(parent, "g", {"class": "boxes"})
    edits: dict[str, ET.Element] = {}
    for box in picture.boxes:
        _draw_box(_group_of(box, front, edits), box)
    for words in picture.words:
        _text(parent, words.x, words.y, words.text, words.style)
    _draw_legend(parent, picture)


def _group_of(box: Box, front: ET.Element, edits: dict[str, ET.Element]) -> ET.Element:
    """The boxes of one edit stand in one element, which names the edit."""
    number = box.data.get("edit")
    if number is None:
        return front
    if number not in edits:
        attributes = {f"data-{name}": plain(box.data[name]) for name in ("edit", "site", "action")}
        edits[number] = ET.SubElement(front, "g", {"class": "edit", **attributes})
    return edits[number]


def path_of(points: Sequence[tuple[float, float]]) -> str:
    """A straight line through two points, or a cubic curve through four."""
    (x, y), *rest = points
    letter = "C" if len(rest) == 3 else "L"
    return f"M{x:g} {y:g}{letter}" + " ".join(f"{a:g} {b:g}" for a, b in rest)


def _draw_frame(parent: ET.Element, frame: Frame) -> None:
    group = ET.SubElement(parent, "g", {"class": "frame", "data-frame": plain(frame.key)})
    if frame.title:
        ET.SubElement(group, "title").text = plain(frame.title)
    _rect(group, frame.x, frame.y, frame.width, frame.height)
    _text(group, frame.x + 6, frame.y + 11, frame.text, "")


def _draw_box(parent: ET.Element, box: Box) -> None:
    own = {f"data-{name}": plain(value) for name, value in box.data.items() if name not in ("edit", "site", "action")}
    group = ET.SubElement(parent, "g", {"class": " ".join(box.classes), **own})
    group.set("transform", f"translate({box.x:g} {box.y:g})")
    if box.title:
        ET.SubElement(group, "title").text = plain(box.title)
    rect = _rect(group, 0, 0, box.width, box.height)
    if box.fill:
        rect.set("style", f"fill:{box.fill}")
    if box.small:
        _text(group, 5, box.height / 2 - 2, box.text, "")
        _text(group, 5, box.height - 5, box.small, "small")
    else:
        _text(group, 5, box.height / 2 + 3.5, box.text, "")


def _draw_legend(parent: ET.Element, picture: Picture) -> None:
    group = ET.SubElement(parent, "g", {"class": "legend"})
    for swatch, (x, y) in zip(picture.legend, legend_places(picture), strict=True):
        rect = _rect(group, x, y, 14, 11)
        rect.set("style", f"fill:{swatch.colour};stroke:{swatch.edge}")
        _text(group, x + 19, y + 9.5, swatch.text, "note")


def legend_places(picture: Picture) -> list[tuple[float, float]]:
    """Where the entries of the legend stand: below each other at the foot of the picture."""
    top = picture.height - 17 * len(picture.legend) - 8
    return [(16, top + 17 * n) for n in range(len(picture.legend))]


def _rect(parent: ET.Element, x: float, y: float, width: float, height: float) -> ET.Element:
    sizes = {"x": x, "y": y, "width": width, "height": height, "rx": 3}
    return ET.SubElement(parent, "rect", {name: f"{value:g}" for name, value in sizes.items()})


def _text(parent: ET.Element, x: float, y: float, text: str, style: str) -> None:
    element = ET.SubElement(parent, "text", {"x": f"{x:g}", "y": f"{y:g}"})
    if style:
        element.set("class", style)
    element.text = plain(text)
