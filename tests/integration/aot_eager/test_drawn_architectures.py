"""Nine architectures and a recurrence of 1,000 steps as they are drawn: readable, and with a box for each edit."""

from __future__ import annotations

from collections import Counter
from xml.etree import ElementTree as ET

import pytest
from drawing import assert_readable

from gradrewrite import viz
from gradrewrite.ir.joint_graph import JointGraph
from gradrewrite.viz import _overview

from models import drawn

SVG = "{http://www.w3.org/2000/svg}"


def assert_drawn_well(graph: JointGraph) -> None:
    sites = Counter(str(edit.site) for edit in graph.edits)
    overview, ladder = viz.draw(graph, "overview"), viz.draw(graph)
    assert 3 <= len(overview._overview.ladder.rows) <= _overview.MOST
    for drawing in (overview, ladder):
        assert_readable(drawing._scene())
        svg = ET.fromstring(drawing._repr_svg_())
        assert Counter(e.get("data-edit") for e in svg.iter(f"{SVG}g") if e.get("data-edit")) == sites
    for drawing, layout in ((overview, overview._overview), (ladder, ladder._ladder)):
        texts = {part.key: (part.column, part.text, part.small) for row in layout.ladder.rows for part in row}
        shown = {(texts[box.key][0], box.text, box.small) for box in drawing._scene().boxes}
        assert len(shown) == len(set(texts.values()))  # shortened labels stay distinct
    boxes = [part for row in ladder._ladder.ladder.rows for part in row if part.edits]
    assert sorted(part.edits for part in boxes) == [(number,) for number in range(len(graph.edits))]


@pytest.mark.slow
@pytest.mark.parametrize("name", drawn.NAMES)
def test_an_architecture(name: str) -> None:
    if name not in ("unet", "lstm"):
        pytest.importorskip("transformers", reason="transformers is not installed")
    assert_drawn_well(drawn.drawn(name))


@pytest.mark.slow
def test_a_recurrence_of_1000_steps() -> None:
    assert_drawn_well(drawn.recurrence(1000))
