"""DOT source for Graphviz: drawings with their positions, and texts that Graphviz accepts whatever they contain."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

import graphviz

from gradrewrite.viz._fonts import FONT, xml_safe
from gradrewrite.viz._scene import SMALL, Box, Scene
from gradrewrite.viz._theme import CUT, INSERTED, INSERTED_EDGE, LINE, PAPER, PILL, RECORDS, SAVED

_LONGEST = 3000  # characters of an attribute: Graphviz reads at most 16 KiB, escapes take several bytes


def scene_dot(scene: Scene) -> str:
    """Return the boxes and edges of a scene as DOT source, with positions (``layout=nop``).

    A box has its data as attributes: ``data_node``, ``data_edit``, ``data_action``; several nodes or edits inside it
    are in ``data_nodes`` and ``data_edits``, separated by spaces.
    """
    dot = graphviz.Digraph("gradrewrite")
    dot.attr(layout="nop", splines="line", bgcolor=PAPER, fontname=FONT, label=escaped(scene.title), labelloc="t")
    dot.attr("node", shape="box", style="filled", fontname=FONT, fontsize=str(SMALL), fixedsize="true")
    dot.attr("edge", color=LINE, arrowsize="0.6")
    names = {box.key: f"box{number}" for number, box in enumerate(scene.boxes)}
    for box in scene.boxes:
        pos = f"{box.x + box.width / 2:g},{scene.height - box.y - box.height / 2:g}"
        size = {"width": f"{box.width / 72:.5g}", "height": f"{box.height / 72:.5g}"}
        text = escaped(f"{box.text}\n{box.small}".strip().replace("&", "&amp;"))  # Graphviz reads entities
        label = graphviz.nohtml(text.replace("\n", "\\l") + "\\l")
        dot.node(names[box.key], label=label, pos=pos, **size, **_colors(box), **_attributes(box))
    for line in scene.lines:
        dashed = {"style": "dashed", "color": SAVED} if "saved" in line.classes else {}
        width = {"penwidth": f"{line.width:g}", "class": " ".join(line.classes)}
        dot.edge(names[line.source], names[line.target], **dashed, **width)
    return str(dot.source)


def data_attributes(data: Mapping[str, str]) -> dict[str, str]:
    """Return data as attributes ``data_name``; a long list of words continues in ``data_name_2``."""
    return {key: text for name, value in data.items() for key, text in _pieces(f"data_{name}", value)}


def escaped(text: str) -> str:
    """Escape text, as the subclass of ``str`` that graphviz never takes for HTML."""
    found: str = graphviz.escape(xml_safe(text if len(text) <= _LONGEST else f"{text[:_LONGEST]}.."))
    return found


def _pieces(name: str, value: str) -> Iterator[tuple[str, str]]:
    words, number = value.split(" "), 1
    while words:
        count, length = 0, 0
        while count < len(words) and (not count or length + len(words[count]) < _LONGEST):
            length += len(words[count]) + 1
            count += 1
        yield name if number == 1 else f"{name}_{number}", escaped(" ".join(words[:count]))
        words, number = words[count:], number + 1


def _attributes(box: Box) -> dict[str, str]:
    inside: dict[str, list[str]] = {}
    for data, _ in box.parts:
        for name in ("node", "edit"):
            if name in data:
                inside.setdefault(f"{name}s", []).append(data[name])
    data = {**box.data, **{name: " ".join(found) for name, found in inside.items()}}
    return {"class": " ".join(box.classes), "tooltip": escaped(box.title), **data_attributes(data)}


def _colors(box: Box) -> dict[str, str]:
    fills = {"inserted": INSERTED, "records": RECORDS, "pill": PILL}
    fill = box.fill or next((fills[name] for name in box.classes if name in fills), PAPER)
    marked = {"inserted", "records"} & set(box.classes)
    edge = CUT if "root_cause" in box.classes else INSERTED_EDGE if marked else LINE
    return {"fillcolor": fill, "color": edge, "penwidth": "2" if edge != LINE else "1"}
