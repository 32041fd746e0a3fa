"""DOT source of scenes for Graphviz, with their positions."""

from __future__ import annotations

from textwrap import wrap

import graphviz

from gradrewrite.viz._fonts import FONT, xml_safe
from gradrewrite.viz._scene import SMALL, Box, Scene, colors_of
from gradrewrite.viz._theme import LINE, PAPER, SAVED

_LONGEST = 3000  # characters of an attribute: Graphviz reads at most 16 KiB, escapes take several bytes


def scene_dot(scene: Scene) -> str:
    """Return the boxes and edges of a scene as DOT source, with positions (``layout=nop``).

    A box has its data as attributes: ``data_node``, ``data_edit``, ``data_action``; several nodes or edits inside it
    are in ``data_nodes`` and ``data_edits``, separated by spaces; a long list continues in ``data_nodes_2``.
    """
    dot = graphviz.Digraph("gradrewrite")
    dot.attr(layout="nop", splines="line", bgcolor=PAPER, fontname=FONT, label=_escaped(scene.title), labelloc="t")
    dot.attr("node", shape="box", style="filled", fontname=FONT, fontsize=str(SMALL), fixedsize="true")
    dot.attr("edge", color=LINE, arrowsize="0.6")
    names = {box.key: f"box{number}" for number, box in enumerate(scene.boxes)}
    for box in scene.boxes:
        fill, edge, is_strong = colors_of(box)
        colors = {"fillcolor": fill, "color": edge, "penwidth": "2" if is_strong else "1"}
        pos = f"{box.x + box.width / 2:g},{scene.height - box.y - box.height / 2:g}"
        size = {"width": f"{box.width / 72:.5g}", "height": f"{box.height / 72:.5g}"}
        text = _escaped(f"{box.text}\n{box.small}".strip().replace("&", "&amp;"))  # Graphviz reads entities
        label = graphviz.nohtml(text.replace("\n", "\\l") + "\\l")
        dot.node(names[box.key], label=label, pos=pos, **size, **colors, **_attributes(box))
    for line in scene.lines:
        dashed = {"style": "dashed", "color": SAVED} if "saved" in line.classes else {}
        width = {"penwidth": f"{line.width:g}", "class": " ".join(line.classes)}
        dot.edge(names[line.source], names[line.target], **dashed, **width)
    return str(dot.source)


def _escaped(text: str) -> str:
    """Escape text, as the subclass of ``str`` that graphviz never takes for HTML."""
    found: str = graphviz.escape(xml_safe(text if len(text) <= _LONGEST else f"{text[:_LONGEST]}.."))
    return found


def _attributes(box: Box) -> dict[str, str]:
    inside = {f"{kind}s": " ".join(data[kind] for data, _ in box.parts if kind in data) for kind in ("node", "edit")}
    found = {"class": " ".join(box.classes), "tooltip": _escaped(box.title)}
    for name, value in {**box.data, **inside}.items():
        pieces = wrap(value, _LONGEST, break_long_words=False, break_on_hyphens=False)
        for number, piece in enumerate(pieces, 1):
            found[f"data_{name}" if number == 1 else f"data_{name}_{number}"] = _escaped(piece)
    return found
