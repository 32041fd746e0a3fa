"""The ladder and its layout: everything is in it once, each edit is one box, and no text overlaps another."""

from __future__ import annotations

import itertools
import re
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from xml.etree import ElementTree as ET

import pytest
from drawing import assert_readable, read_by_graphviz

from gradrewrite import viz
from gradrewrite.ir.joint_graph import JointGraph
from gradrewrite.viz import _dot, _fonts, _graph_view, _ladder, _layout, _scene

from helpers import mostly_slow
from models.graphs import EACH, ODD_NAMES, live_thresholds, odd_names, recurrent, three_layers, transformer

Make = Callable[[], JointGraph]
SVG = "{http://www.w3.org/2000/svg}"


def svg_of(graph: JointGraph) -> ET.Element:
    return ET.fromstring(viz.draw(graph)._repr_svg_())


def boxes_of(svg: ET.Element) -> list[ET.Element]:
    return [e for e in svg.iter(f"{SVG}g") if "node" in (e.get("class") or "").split()]


def ladder_of(graph: JointGraph) -> _ladder.Ladder:
    return _ladder.build_ladder(_graph_view.read_graph(graph))


def scene_of(graph: JointGraph) -> _scene.Scene:
    return _layout.draw_ladder(_layout.LadderLayout(ladder_of(graph)), "title", "a note")


@pytest.mark.long
@EACH
def test_every_node_is_drawn_once_and_every_edit_is_one_box(make: Make) -> None:
    graph = make()
    graph_view = _graph_view.read_graph(graph)
    svg = svg_of(graph)
    drawn = Counter(e.get("data-node") for e in svg.iter(f"{SVG}g") if e.get("data-node"))
    in_edits = {name for edit in graph.edits for name in edit.nodes}

    assert set(drawn.values()) == {1}
    assert set(drawn) == (set(graph_view.nodes) - _graph_view.hidden_nodes(graph_view)) | in_edits
    edited = [e for e in boxes_of(svg) if "inserted" in (e.get("class") or "").split()]
    assert [e.get("data-edit") for e in edited] == [e.get("data-edit") for e in boxes_of(svg) if e.get("data-edit")]
    changes = [edit for edit in graph.edits if not _ladder.only_measures(edit)]
    assert Counter((e.get("data-edit"), e.get("data-action")) for e in edited) == Counter(
        (str(edit.site), edit.text) for edit in changes
    )
    figures = {(e.get("data-edit"), e.get("data-action")) for e in svg.iter(f"{SVG}g") if e.get("data-edit")}
    assert figures == {(str(edit.site), edit.text) for edit in graph.edits}
    by_edit = {(str(edit.site), edit.text): list(edit.nodes) for edit in graph.edits}
    for box in edited:
        inside = [e.get("data-node") for e in box.iter(f"{SVG}g") if e.get("data-node")]
        assert inside == by_edit[box.get("data-edit") or "", box.get("data-action") or ""]
        titles = [e.findtext(f"{SVG}title") or "" for e in box.iter(f"{SVG}g") if e.get("data-node")]
        assert all(title.startswith(f"{name}: ") for name, title in zip(inside, titles, strict=True))


@pytest.mark.broad
def test_titles_name_the_node_the_op_the_shape_and_the_line() -> None:
    svg = svg_of(three_layers())
    nodes = [e for e in svg.iter(f"{SVG}g") if e.get("data-node")]
    titles = {e.get("data-node"): (e.findtext(f"{SVG}title") or "").splitlines() for e in nodes}
    (clip,) = [e for e in three_layers().edits if e.text.startswith("ClipByValue")]
    clamp = clip.nodes[0]

    assert titles[clamp][0] == f"{clamp}: aten.clamp_min.default"
    assert titles[clamp][1] == "second/linear, backward"
    assert titles[clamp][2] == "[2, 8] float32"
    assert titles[clamp][3] == "inserted: ClipByValue(0.5, log=True) at error:second"
    assert titles[clamp][4].startswith("graphs.py:")
    assert titles[clamp][4].endswith('"return functional.mse_loss(self.third(torch.tanh(self.second(h))), x[:, :1])"')


def test_labels_are_the_user_s_words() -> None:
    texts = [[t.text for t in e.iter(f"{SVG}text")] for e in boxes_of(svg_of(three_layers()))]

    assert ["tanh", "(model)"] in texts
    assert ["linear", "second"] in texts
    assert ["first.weight"] in texts
    assert ["ClipByValue(0.5, log=True)", "error:second"] in texts
    assert ["lambda", "error:first"] in texts


@pytest.mark.slow
def test_a_backward_stands_beside_its_forward_and_calls_are_folded_together() -> None:
    ladder = ladder_of(recurrent())
    view = ladder.graph_view
    rows: dict[str, set[int]] = {}
    for number, row in enumerate(ladder.rows):
        for part in row:
            if part.column in ("forward", "backward") and ("step", 17) in view.nodes[part.nodes[0]].calls:
                rows.setdefault(part.column, set()).add(number)
    (band,) = [band for band in ladder.bands if band.name == "step#17"]

    assert rows["forward"] <= set(range(band.first, band.last + 1))
    assert rows["backward"] <= set(range(band.first, band.last + 1))
    (around,) = [b for b in ladder.bands if b.first <= band.first and band.last <= b.last and b is not band]
    assert re.fullmatch(r"step x \d+", around.name)
    assert (around.depth, band.depth) == (0, 1)


@pytest.mark.parametrize("make", mostly_slow([three_layers, odd_names, live_thresholds, transformer, recurrent]))
def test_nothing_overlaps(make: Make) -> None:
    scene = scene_of(make())
    places = sorted((box.x, box.y, box.y + box.height) for box in scene.boxes)

    assert_readable(scene)
    assert all(a[0] != b[0] or a[2] <= b[1] for a, b in itertools.pairwise(places))
    assert all(box.x >= 0 and box.x + box.width <= scene.width for box in scene.boxes)
    assert all(frame.y + frame.height <= scene.height for frame in scene.frames)


@pytest.mark.long
@pytest.mark.parametrize("make", mostly_slow([transformer, recurrent]), ids=["transformer", "recurrent"])
def test_bands_enclose_their_module_and_nothing_else(make: Make) -> None:
    ladder = ladder_of(make())
    view = ladder.graph_view
    scene = scene_of(make())
    calls = {
        part.key: {_graph_view.call_name(call) for call in view.nodes[part.nodes[0]].calls}
        for row in ladder.rows
        for part in row
        if part.column in ("forward", "backward") and not part.edits
    }

    assert scene.frames
    for frame in scene.frames:
        module = frame.key.split("/")[-1]
        if " x " in module:
            continue
        boxes = [box for box in scene.boxes if box.key in calls]
        inside = {b.key for b in boxes if frame.y <= b.y and b.y + b.height <= frame.y + frame.height}
        assert inside == {key for key, around in calls.items() if module in around}


def test_lines_begin_and_end_at_their_boxes() -> None:
    scene = scene_of(three_layers())
    boxes = {box.key: box for box in scene.boxes}
    for line in scene.lines:
        for key, (x, y) in ((line.source, line.points[0]), (line.target, line.points[-1])):
            box = boxes[key]
            assert box.x <= x <= box.x + box.width
            assert box.y <= y <= box.y + box.height


@pytest.mark.broad
def test_an_edit_without_nodes_does_not_break_its_band() -> None:
    ladder = ladder_of(live_thresholds())
    (band,) = [band for band in ladder.bands if band.name == "inner"]
    (row,) = [n for n, row in enumerate(ladder.rows) for part in row if part.edits and not part.nodes]

    assert band.first <= row <= band.last


def test_odd_names_are_kept() -> None:
    text = "\n".join(e.findtext(f"{SVG}title") or "" for e in svg_of(odd_names()).iter(f"{SVG}g"))

    for name in ODD_NAMES:
        assert name in text


def test_hidden_nodes_are_read_through() -> None:
    graph_view = _graph_view.read_graph(three_layers())
    hidden = _graph_view.hidden_nodes(graph_view, records=True)
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


@pytest.mark.broad
@pytest.mark.parametrize("view", ["ladder", "overview"])
def test_dot_has_every_edit_with_its_nodes_and_graphviz_draws_it(view: str) -> None:
    for make in (three_layers, odd_names):
        graph = make()
        drawing = viz.draw(graph, view)
        source = drawing._bytes("dot").decode()
        assert source.count("data_action=") == source.count("data_edit=")
        for edit in graph.edits:
            for name in edit.nodes:
                assert re.search(rf"\b{name}\b", source)
        found = ET.fromstring(read_by_graphviz(source, "svg"))
        assert sum(e.get("class", "").startswith("node node") for e in found.iter()) == len(drawing._scene().boxes)


@pytest.mark.broad
@pytest.mark.parametrize(
    "text", ['a"b', "<b>", "a\\nb", "x|y{z}", "a\x07b", "\u5c64", "</td>", "p" * 300, "&amp;", "a:b"]
)
@pytest.mark.pure
def test_any_text_can_stand_in_a_box(text: str) -> None:
    box = _scene.Box("k:1", 10, 10, 200, 36, text, text, ("node",), text, {"node": text})
    (fitted,) = _scene.fit_boxes([box])
    scene = _scene.Scene(text, 300, 100, boxes=[fitted], labels=[_scene.Label(5, 90, text)])
    svg = ET.fromstring(_scene.to_svg(scene))

    (group,) = [g for g in svg.iter(f"{SVG}g") if g.get("data-node") is not None]
    assert group.get("data-node") == group.findtext(f"{SVG}title") == _fonts.xml_safe(text)
    drawn = ET.fromstring(read_by_graphviz(_dot.scene_dot(scene), "svg"))
    shown = ["".join(t.itertext()).replace("\xa0", " ") for t in drawn.iter(f"{SVG}text")]
    assert _fonts.xml_safe(fitted.text) in shown


@pytest.mark.pure
def test_shortened_labels_stay_distinct() -> None:
    names = [f"transformer.h.{n}.attn.c_attn.weight" for n in range(12)]
    short = _fonts.fit_all([(name, 90.0, 12.0) for name in names])

    assert len(set(short)) == len(names)
    assert all(_fonts.text_width(text, 12.0) <= 90.0 for text in short)
    assert _fonts.fit_all([("short", 90.0, 12.0)]) == ["short"]


NUMBERS = r"\d+(?:\.\d+)?(?:e-?\d+)?"


@pytest.mark.pure
@pytest.mark.parametrize(
    "text",
    ["ClipByNorm(1234.5678) x 12", "error:blocks.[0-23].attn \u00b7 100 % \u00b7 \u00d72.3e-10", "layers.1234567.proj"],
)
def test_no_number_is_cut(text: str) -> None:
    numbers = set(re.findall(NUMBERS, text))
    for width in range(20, 300, 4):
        shown = _fonts.fit(text, width, 12.0)
        assert set(re.findall(NUMBERS, shown.replace("..", " "))) <= numbers
        assert width < 60 or _fonts.text_width(shown, 12.0) <= width
    for limit in range(8, 30):
        shown = _fonts.displayable(text, limit)
        assert set(re.findall(NUMBERS, shown.replace("...", " "))) <= numbers
        assert len(shown) <= limit
    assert all(end in _fonts.fit(text, 120.0, 12.0) for end in (text[:3], text[-2:]))


@pytest.mark.sample(12)
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
