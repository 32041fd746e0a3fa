"""The overview: at most sixteen rows, modules at the deepest level that fits, every edit in one box."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from xml.etree import ElementTree as ET

import pytest

from gradrewrite import viz
from gradrewrite.ir.joint_graph import JointGraph
from gradrewrite.viz import _graph_view, _ladder, _overview

from models.clips import step_of
from models.graphs import EACH, recurrent, three_layers, transformer

Make = Callable[[], JointGraph]
SVG = "{http://www.w3.org/2000/svg}"


def overview_of(graph: JointGraph) -> _ladder.Ladder:
    return _overview.build_overview(_graph_view.read_graph(graph))


def texts(ladder: _ladder.Ladder, column: str = "forward") -> list[str]:
    return [part.text for row in ladder.rows for part in row if part.column == column and not part.edits]


@EACH
def test_it_has_every_edit_and_every_node_once(make: Make) -> None:
    graph = make()
    ladder = overview_of(graph)
    parts = [part for row in ladder.rows for part in row]
    svg = ET.fromstring(viz.draw(graph, "overview")._repr_svg_())

    assert sorted(n for part in parts for n in (*part.edits, *part.figures)) == list(range(len(graph.edits)))
    assert len(ladder.rows) <= _overview.MOST
    names = Counter(name for part in parts for name in part.nodes)
    assert set(names.values()) <= {1}
    assert {name for edit in graph.edits for name in edit.nodes} <= set(names)
    drawn = Counter(e.get("data-edit") for e in svg.iter(f"{SVG}g") if e.get("data-edit"))
    assert drawn == Counter(str(edit.site) for edit in graph.edits)
    inserted = {name for edit in graph.edits for name in edit.nodes}
    assert {e.get("data-node") for e in svg.iter(f"{SVG}g") if e.get("data-node")} >= inserted


@pytest.mark.slow
def test_blocks_and_calls_are_folded() -> None:
    assert "blocks.[0-23].attn x 24" in texts(overview_of(transformer(24)))
    assert "blocks.[0-23].mlp x 24" in texts(overview_of(transformer(24)))
    assert {"step.read x 40", "step.keep x 40", "step/add, tanh x 40"} <= set(texts(overview_of(recurrent())))


def test_edges_count_tensors() -> None:
    ladder = overview_of(three_layers())
    boxes = [part for row in ladder.rows for part in row if part.column == "forward" and not part.edits]
    keys = {part.text: part.key for part in reversed(boxes)}  # the first of two tanh
    (edge,) = [e for e in ladder.edges if (e.source, e.target) == (keys["first"], keys["/tanh"])]

    assert edge.tensors == 1
    assert sum(e.tensors for e in ladder.edges) <= len(ladder.graph_view.edges)
    assert any(e.kind == "saved" for e in ladder.edges)


def test_equal_edits_of_a_row_are_one_box_with_the_strongest_figures() -> None:
    records = {"norm@gradient:second.weight": 4.0, "total_norm@group:default": 8.0, "bound@group:default": 1.0}
    drawing = viz.draw(three_layers(), "overview", monitor=[step_of(n, records) for n in range(4)])
    (row,) = [row for row in drawing._overview.ladder.rows if row[0].text == "second"]
    (box,) = [part for part in row if part.text.startswith("ClipByGlobalNorm")]

    assert (box.text, box.small) == (
        "ClipByGlobalNorm(1.0) x 2",
        "gradient:second.* \u00b7 100 % \u00b7 \u00d70.12",
    )


@pytest.mark.slow
def test_the_box_of_several_edits_names_the_strongest() -> None:
    norms = {"error:step": 2.0, "error:step#7": 4.0, "error:step#39": 3.0}
    records = {f"norm@{site}": norm for site, norm in norms.items()} | {f"bound@{site}": 1.0 for site in norms}
    drawing = viz.draw(recurrent(), "overview", monitor=[step_of(n, records) for n in range(4)])
    (box,) = [part for part in drawing._overview.ladder.parts if part.text == "ClipByNorm(1.0) x 40"]

    assert box.small == "error:step ... error:step#39 \u00b7 step#7: 100 % \u00b7 \u00d70.25"


@pytest.mark.parametrize(
    ("names", "wanted"),
    [
        (["a.0.b", "a.1.b", "a.2.b"], "a.[0-2].b"),
        (["l.0", "l.2", "l.3"], "l.[0,2,3]"),
        (["x.0.1", "x.1.1"], "x.[0-1].1"),
        ([f"l.{n}" for n in range(12) if n != 4], "l.[0-3,5-11]"),
        (["error:h.0.a", "error:h.1.b"], "error:h.[0-1].*"),
        (["error:a", "gradient:b"], "error:a ... gradient:b"),
        (["a.b", "a.b"], "a.b"),
        (["a", "a.b"], "a ... a.b"),
    ],
)
@pytest.mark.pure
def test_names_are_folded(names: list[str], wanted: str) -> None:
    assert _ladder.fold_names(names) == wanted
