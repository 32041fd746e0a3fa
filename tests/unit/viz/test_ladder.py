"""The ladder: everything is in it once, what was inserted is marked, and nothing else is."""

from __future__ import annotations

import itertools
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from xml.etree import ElementTree as ET

import pytest

from gradrewrite import viz
from gradrewrite.ir.joint_graph import JointGraph
from gradrewrite.viz import _graph_view, _ladder_drawing, _ladder_layout

from helpers import mostly_slow
from models.graphs import EACH, ODD_NAMES, live_thresholds, odd_names, recurrent, three_layers, transformer

Make = Callable[[], JointGraph]
SVG = "{http://www.w3.org/2000/svg}"


def svg_of(graph: JointGraph) -> ET.Element:
    return ET.fromstring(viz.draw(graph)._repr_svg_())


def nodes_of(svg: ET.Element) -> list[ET.Element]:
    return [e for e in svg.iter(f"{SVG}g") if "node" in (e.get("class") or "").split()]


def classes(element: ET.Element) -> set[str]:
    return set((element.get("class") or "").split())


@EACH
def test_every_node_is_drawn_once_and_only_what_was_inserted_is_marked(make: Make) -> None:
    graph = make()
    graph_view = _graph_view.read_graph(graph)
    drawn = Counter(e.get("data-node") for e in nodes_of(svg_of(graph)) if e.get("data-node"))
    marked = {e.get("data-node") for e in nodes_of(svg_of(graph)) if classes(e) & {"inserted", "records"}} - {None}

    assert set(drawn.values()) == {1}
    assert set(drawn) == set(graph_view.nodes) - _graph_view.hidden_reshapes(graph_view)
    assert graph.before is not None
    assert marked == set(graph_view.nodes) - set(_graph_view.read_graph(graph.before).nodes)


@EACH
def test_every_edit_is_drawn_once_with_its_nodes(make: Make) -> None:
    graph = make()
    groups = [e for e in svg_of(graph).iter(f"{SVG}g") if "edit" in classes(e)]

    assert sorted(int(e.get("data-edit") or -1) for e in groups) == list(range(len(graph.edits)))
    for group in groups:
        edit = graph.edits[int(group.get("data-edit") or -1)]
        inside = [e.get("data-node") for e in nodes_of(group)]
        assert sorted(filter(None, inside)) == sorted(edit.nodes)
        assert len(inside) == max(len(edit.nodes), 1)  # an edit without nodes has a box all the same
        assert (group.get("data-site"), group.get("data-action")) == (str(edit.site), edit.text)
        assert all("inserted" in classes(e) for e in nodes_of(group))


def test_titles_name_the_node_the_op_the_shape_and_the_line() -> None:
    graph = three_layers()
    titles = {e.get("data-node"): (e.findtext(f"{SVG}title") or "").splitlines() for e in nodes_of(svg_of(graph))}
    (clip,) = [e for e in graph.edits if e.text.startswith("ClipByValue")]
    clamp = clip.nodes[0]

    assert titles[clamp][0] == f"{clamp}: aten.clamp_min.default"
    assert titles[clamp][1] == "second/linear, backward"
    assert titles[clamp][2] == "[2, 8] float32"
    assert titles[clamp][3] == "inserted: ClipByValue(0.5, log=True) at error:second"
    assert titles[clamp][4].startswith("graphs.py:")
    assert titles[clamp][4].endswith('"return functional.mse_loss(self.third(torch.tanh(self.second(h))), x[:, :1])"')


def test_labels_are_the_user_s_words() -> None:
    boxes = {e.get("data-node"): [t.text for t in e.iter(f"{SVG}text")] for e in nodes_of(svg_of(three_layers()))}

    assert ["tanh", "(model)"] in boxes.values()
    assert ["linear: mm", "second"] in boxes.values()
    assert ["first.weight"] in boxes.values()


@pytest.mark.slow
def test_a_backward_stands_beside_its_forward() -> None:
    ladder = _ladder_layout.lay_out_ladder(_graph_view.read_graph(recurrent()))
    rows: dict[str, set[int]] = {}
    for cell in ladder.cells:
        if cell.node is not None and cell.node.role == "op" and ("step", 17) in cell.node.calls:
            rows.setdefault(_ladder_layout.lane_of(cell), set()).add(cell.row)
    (band,) = [band for band in ladder.bands if band.path == (("step", 17),)]

    assert rows["forward"] <= set(range(band.first, band.last + 1))
    assert rows["backward"] <= set(range(band.first, band.last + 1))
    assert sum(len(band.path) == 1 for band in ladder.bands) == 40


def test_boxes_do_not_overlap() -> None:
    for make in (three_layers, odd_names, transformer):
        ladder = _ladder_layout.lay_out_ladder(_graph_view.read_graph(make()))
        scene = _ladder_drawing.draw_ladder(ladder, {}, [], "")
        places = sorted((box.y, box.x, box.x + box.width) for box in scene.boxes)
        assert all(a[0] != b[0] or a[2] <= b[1] for a, b in itertools.pairwise(places))
        assert all(box.x >= 0 and box.x + box.width <= scene.width for box in scene.boxes)
        assert all(frame.y + frame.height <= scene.height for frame in scene.frames)


@pytest.mark.parametrize("make", mostly_slow([transformer, recurrent]), ids=["transformer", "recurrent"])
def test_bands_enclose_their_module_and_nothing_else(make: Make) -> None:
    graph_view = _graph_view.read_graph(make())
    scene = _ladder_drawing.draw_ladder(_ladder_layout.lay_out_ladder(graph_view), {}, [], "")
    runs = {
        box.key: {_graph_view.call_name(run) for run in graph_view.nodes[box.key].calls}
        for box in scene.boxes
        if box.key in graph_view.nodes
    }

    assert scene.frames
    for frame in scene.frames:
        module = frame.key.split("/")[-1]
        boxes = [box for box in scene.boxes if box.key in runs]
        inside = {b.key for b in boxes if frame.y <= b.y and b.y + b.height <= frame.y + frame.height}
        assert inside == {key for key, around in runs.items() if module in around}
        assert not [b for b in boxes if b.y < frame.y < b.y + b.height]


def test_an_edit_without_nodes_does_not_break_its_band() -> None:
    ladder = _ladder_layout.lay_out_ladder(_graph_view.read_graph(live_thresholds()))
    (band,) = [band for band in ladder.bands if band.path == (("inner", 0),)]
    (cell,) = [cell for cell in ladder.cells if cell.node is None and cell.edit >= 0]

    assert band.first <= cell.row <= band.last


def test_odd_names_are_kept() -> None:
    text = "\n".join(e.findtext(f"{SVG}title") or "" for e in nodes_of(svg_of(odd_names())))

    for name in ODD_NAMES:
        assert name in text


def test_hidden_nodes_are_read_through() -> None:
    graph_view = _graph_view.read_graph(three_layers())
    hidden = _graph_view.hidden_reshapes(graph_view)
    direct = set(_graph_view.contracted_edges(graph_view, hidden))

    assert hidden
    assert not any(name in hidden for edge in direct for name in edge)
    for a, b in graph_view.edges:
        if a not in hidden and b not in hidden:
            assert (a, b) in direct
    (source,) = {a for a, b in graph_view.edges if b in hidden and graph_view.nodes[a].argument == "second.weight"}
    readers = {b for a, b in direct if a == source}
    assert {graph_view.nodes[b].aten for b in readers} == {"addmm", "mm"}


@pytest.mark.slow
def test_the_same_graph_gives_the_same_bytes(tmp_path: Path) -> None:
    for form in ("svg", "png", "pdf", "dot", "html"):
        first = Path(viz.draw(three_layers()).render(tmp_path / "a", form)).read_bytes()
        assert Path(viz.draw(three_layers()).render(tmp_path / "b", form)).read_bytes() == first


def test_dot_has_every_node_once() -> None:
    for make in (three_layers, odd_names):
        graph = make()
        source = viz.draw(graph)._bytes("dot").decode()
        for edit in graph.edits:
            for name in edit.nodes:
                assert source.count(f"data_node={name} ") == 1
        assert source.count("penwidth=2") == len(graph.record_nodes) + sum(max(len(e.nodes), 1) for e in graph.edits)
        assert "dir=back" in source
        assert "nslimit=1" in source


@pytest.mark.slow
def test_large_graphs_take_seconds(tmp_path: Path) -> None:
    for clips, fewest, limits in ((False, 3500, (2.0, 5.0, 3.0)), (True, 9_500, (5.0, 10.0, 6.0))):
        graph = transformer(24, clips_gradients=clips)
        assert len(graph.graph_module.graph.nodes) >= fewest
        takes = []
        for view, form in (("ladder", "svg"), ("overview", "svg"), ("ladder", "html")):
            each = []
            for _ in range(3):
                start = time.monotonic()
                viz.draw(graph, view).render(tmp_path / "large", form)
                each.append(time.monotonic() - start)
            takes.append(min(each))
        assert all(t < limit for t, limit in zip(takes, limits, strict=True)), takes
