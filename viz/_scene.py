"""``Scene``: boxes, lines, frames and labels with coordinates; ``to_svg`` writes one."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import NamedTuple
from xml.etree import ElementTree as ET

from gradrewrite.viz import _theme as theme
from gradrewrite.viz._fonts import fit_all, xml_safe

TEXT, SMALL, HEAD = 12, 11, 14  # font sizes in pixels
PAD = 6  # between the edge of a box and its text
SWATCH = 17  # height of a line of the legend

_COLORS = {  # of a box and its edge, by class; of several classes the last one here
    "node": ("PAPER", "LINE"),
    "pill": ("PILL", "PILL_EDGE"),
    "inserted": ("INSERTED", "INSERTED_EDGE"),
    "records": ("RECORDS", "INSERTED_EDGE"),
    "idle": ("PAPER", "INSERTED_EDGE"),
}
_STRONG = frozenset(("inserted", "records", "root_cause"))  # classes with a thick edge


def _style(of: Callable[[str], str]) -> str:
    boxes = (f".{name} rect {{ fill: {of(fill)}; stroke: {of(edge)}; }}" for name, (fill, edge) in _COLORS.items())
    return f"""
svg {{ font-family: "DejaVu Sans", Verdana, Arial, sans-serif; background: {of("PAPER")}; }}
text {{ font-size: {TEXT}px; fill: {of("INK")}; white-space: pre; }}
.head {{ font-size: {HEAD}px; font-weight: bold; }} .small {{ font-size: {SMALL}px; }}
.note {{ font-size: {SMALL}px; fill: {of("DETAIL")}; }}
.frame rect {{ fill: {of("BAND")}; fill-opacity: 0.55; stroke: {of("BORDER")}; }}
{" ".join(boxes)}
.inserted rect, .records rect {{ stroke-width: 2; }} .idle rect {{ stroke-width: 1; }}
.root_cause rect {{ stroke: {of("NOT_FINITE")}; stroke-width: 4; }} .boxes .mark {{ stroke: none; }}
.lines path {{ fill: none; stroke: {of("LINE")}; }}
.lines .saved {{ stroke: {of("SAVED")}; stroke-dasharray: 3 2; }} .lines .fan {{ opacity: 0.15; }}
.lines path {{ marker-end: url(#arrow); }} #arrow path {{ fill: {of("FAINT")}; stroke: none; }}
"""


STYLE = _style(lambda name: str(getattr(theme, name)))
PAGE_STYLE = _style(theme.css_variable)  # light or dark
ARROW = """<defs>
<marker id="arrow" viewBox="0 0 6 6" refX="6" refY="3" orient="auto" markerWidth="7" markerHeight="7"
 markerUnits="userSpaceOnUse"><path d="M0 0L6 3L0 6z"/></marker></defs>"""


class ColorSample(NamedTuple):
    """A color and its description."""

    color: str
    text: str


class Mark(NamedTuple):
    """A filled rectangle inside a box, from its upper left corner."""

    x: float
    y: float
    width: float
    height: float
    color: str


@dataclass(frozen=True, slots=True)
class Box:
    """A rectangle with one or two lines of text, each shortened to its width by ``fit_boxes``."""

    key: str  # name by which lines refer to it
    x: float  # left edge in pixels
    y: float  # upper edge
    width: float
    height: float
    text: str  # first line
    small: str = ""  # second line
    classes: tuple[str, ...] = ("node",)  # classes in the style sheet
    title: str = ""  # what a pointer on it shows; a name and details
    data: Mapping[str, str] = field(default_factory=dict)  # ``data-`` attributes
    # What is inside it and not drawn: ``data-`` attributes and title of each.
    parts: Sequence[tuple[Mapping[str, str], str]] = ()
    fill: str = ""  # color, if it is not that of its classes
    text_height: float = 0.0  # height of the upper part with the texts; all of it if 0
    marks: Sequence[Mark] = ()  # in the lower part


@dataclass(frozen=True, slots=True)
class Line:
    """A line between two boxes; ``points`` are two, or those of cubic curves (1 + 3 n)."""

    source: str
    target: str
    points: tuple[tuple[float, float], ...]
    classes: tuple[str, ...] = ()
    width: float = 1.0
    title: str = ""


@dataclass(frozen=True, slots=True)
class Frame:
    """A labeled rectangle behind boxes; its tooltip is the key."""

    key: str
    x: float
    y: float
    width: float
    height: float
    text: str


@dataclass(frozen=True, slots=True)
class Label:
    """A line of text with its baseline at ``y``."""

    x: float
    y: float
    text: str
    style: str = "note"  # a class in the style sheet: "", "note", "small" (on a color) or "head"


@dataclass(frozen=True, slots=True)
class LegendEntry:
    """One entry of a legend."""

    color: str
    edge: str
    text: str


@dataclass(frozen=True, slots=True)
class Scene:
    """All parts of a drawing, from back to front."""

    title: str
    width: float
    height: float
    frames: Sequence[Frame] = ()
    lines: Sequence[Line] = ()
    boxes: Sequence[Box] = ()
    labels: Sequence[Label] = ()
    legend: Sequence[LegendEntry] = ()


def fit_boxes(boxes: Sequence[Box]) -> list[Box]:
    """Return boxes with texts that fit into them; different texts stay different where there is room."""
    texts = fit_all([(box.text, box.width - 2 * PAD, TEXT) for box in boxes])
    smalls = fit_all([(box.small, box.width - 2 * PAD, SMALL) for box in boxes])
    return [replace(box, text=t, small=s) for box, t, s in zip(boxes, texts, smalls, strict=True)]


def to_svg(scene: Scene, *, label: str = "") -> str:
    """Return the scene as SVG, with a label for a page."""
    names = {"role": "group", "aria-label": label} if label else {"role": "img"}
    size = {"width": f"{scene.width:g}", "height": f"{scene.height:g}"}
    view = {"viewBox": f"0 0 {scene.width:g} {scene.height:g}"}
    svg = ET.Element("svg", {"xmlns": "http://www.w3.org/2000/svg", **names, **view, **size})
    if not label:  # a page has the style and the arrowhead once
        ET.SubElement(svg, "title").text = scene.title
        ET.SubElement(svg, "style").text = STYLE
        svg.append(ET.fromstring(ARROW))
    _draw(svg, scene)
    return xml_safe(ET.tostring(svg, encoding="unicode"))


def _draw(parent: ET.Element, scene: Scene) -> None:
    behind = ET.SubElement(parent, "g", {"class": "frames"})
    for frame in scene.frames:
        group = ET.SubElement(behind, "g", {"class": "frame", "data-frame": frame.key})
        ET.SubElement(group, "title").text = frame.key
        _rect(group, frame.x, frame.y, frame.width, frame.height)
        _text(group, _heading(frame))
    between = ET.SubElement(parent, "g", {"class": "lines"})
    for line in scene.lines:
        path = ET.SubElement(between, "path", {"d": path_of(line.points), "class": " ".join(line.classes)})
        if line.width != 1.0:
            path.set("style", f"stroke-width:{line.width:g}")
        if line.title:
            ET.SubElement(path, "title").text = line.title
    front = ET.SubElement(parent, "g", {"class": "boxes"})
    for box in scene.boxes:
        _draw_box(front, box)
    for entry, (x, y) in zip(scene.legend, legend_positions(scene), strict=True):
        rect = _rect(parent, x, y, 14, 11)
        rect.set("style", f"fill:{entry.color};stroke:{entry.edge}")
    for label in [*scene.labels, *_legend_texts(scene)]:
        _text(parent, label)


def texts_of(scene: Scene) -> list[Label]:
    """Return all texts of a scene."""
    of_boxes = [replace(one, x=box.x + one.x, y=box.y + one.y) for box in scene.boxes for one in _texts(box)]
    return [*map(_heading, scene.frames), *of_boxes, *scene.labels, *_legend_texts(scene)]


def _heading(frame: Frame) -> Label:
    return Label(frame.x + 6, frame.y + 14, frame.text)


def _texts(box: Box) -> list[Label]:
    height = box.text_height or box.height
    if not box.small:
        return [Label(PAD, height / 2 + 4, box.text, "")]
    return [
        Label(PAD, height / 2 - 3, box.text, ""),
        Label(PAD, height - 6, box.small, "small" if box.fill else "note"),
    ]


def _legend_texts(scene: Scene) -> list[Label]:
    positions = zip(scene.legend, legend_positions(scene), strict=True)
    return [Label(x + 19, y + 9.5, entry.text) for entry, (x, y) in positions]


def legend_positions(scene: Scene) -> list[tuple[float, float]]:
    """Return the positions of the legend's colors, at the bottom."""
    top = scene.height - SWATCH * len(scene.legend) - 8
    return [(16, top + SWATCH * n) for n in range(len(scene.legend))]


def colors_of(box: Box) -> tuple[str, str, bool]:
    """Return fill, edge color, and whether the edge is strong."""
    fill, edge = next(colors for name, colors in reversed(_COLORS.items()) if name in (*box.classes, "node"))
    edge = "NOT_FINITE" if "root_cause" in box.classes else edge
    is_strong = bool(_STRONG.intersection(box.classes)) and "idle" not in box.classes
    return box.fill or str(getattr(theme, fill)), str(getattr(theme, edge)), is_strong


def path_of(points: Sequence[tuple[float, float]]) -> str:
    """Return the SVG path of a straight line (two points) or of cubic curves (1 + 3 n)."""
    (x, y), *rest = points
    letter = "L" if len(rest) == 1 else "C"
    return f"M{x:g} {y:g}{letter}" + " ".join(f"{a:g} {b:g}" for a, b in rest)


def _draw_box(parent: ET.Element, box: Box) -> None:
    group = ET.SubElement(parent, "g", {"class": " ".join(box.classes), **_data(box.data)})
    group.set("transform", f"translate({box.x:g} {box.y:g})")
    if box.title:
        ET.SubElement(group, "title").text = box.title
    rect = _rect(group, 0, 0, box.width, box.height)
    if box.fill:
        rect.set("style", f"fill:{box.fill}")
    for mark in box.marks:
        rect = ET.SubElement(group, "rect", {**_sizes(*mark[:4]), "class": "mark"})
        rect.set("style", f"fill:{mark.color}")
    for label in _texts(box):
        _text(group, label)
    for data, title in box.parts:
        ET.SubElement(ET.SubElement(group, "g", _data(data)), "title").text = title


def _data(data: Mapping[str, str]) -> dict[str, str]:
    return {f"data-{name}": value for name, value in data.items()}


def _rect(parent: ET.Element, x: float, y: float, width: float, height: float) -> ET.Element:
    return ET.SubElement(parent, "rect", {**_sizes(x, y, width, height), "rx": "3"})


def _sizes(x: float, y: float, width: float, height: float) -> dict[str, str]:
    return {"x": f"{x:g}", "y": f"{y:g}", "width": f"{width:g}", "height": f"{height:g}"}


def _text(parent: ET.Element, label: Label) -> None:
    element = ET.SubElement(parent, "text", {"x": f"{label.x:g}", "y": f"{label.y:g}"})
    if label.style:
        element.set("class", label.style)
    element.text = label.text
