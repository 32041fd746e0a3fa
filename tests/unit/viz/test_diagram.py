"""The overview and the neighbourhood of a site: as DOT source, as Graphviz draws them, and in our own layout."""

from __future__ import annotations

import json
import os
import re
import stat
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any
from xml.etree import ElementTree as ET

import pytest

from gradrewrite import viz
from gradrewrite.errors import NoSuchSiteError
from gradrewrite.ir.joint_graph import JointGraph
from gradrewrite.viz import _diagram, _diagram_dot, _graph_view, _graphviz, _overview

from models.graphs import EACH, odd_names, recurrent, three_layers, transformer

Make = Callable[[], JointGraph]
SVG = "{http://www.w3.org/2000/svg}"


def inserted_in(graph: JointGraph) -> Counter[str]:
    return Counter(node.name for node in _graph_view.read_graph(graph).nodes.values() if node.mark)


def objects(drawing: viz.Drawing) -> list[dict[str, Any]]:
    """What Graphviz laid out, as its JSON tells it."""
    found = json.loads(_graphviz.run_dot(drawing._bytes("dot").decode(), "json"))
    keys = {f"data_{kind}" for kind in ("inserted", "node", "edit", "edits")}
    return [one for one in found["objects"] if not keys.isdisjoint(one)]


def pieces(one: dict[str, Any], name: str) -> str:
    keys = [name, *sorted((k for k in one if re.fullmatch(rf"{name}_\d+", k)), key=lambda k: int(k.rpartition("_")[2]))]
    return " ".join(one[key] for key in keys if key in one)


@EACH
def test_overview_has_every_inserted_node_and_edit_once(make: Make) -> None:
    graph = make()
    found = objects(viz.draw(graph, "overview"))
    names = Counter(name for one in found for name in pieces(one, "data_inserted").split())
    edits = Counter(int(n) for one in found for n in pieces(one, "data_edits").split())

    assert names == inserted_in(graph)
    assert set(edits) == set(range(len(graph.edits)))
    assert set(edits.values()) <= {1}


@EACH
def test_overview_in_svg_has_them_too_with_their_number(make: Make) -> None:
    graph = make()
    groups = [g for g in ET.fromstring(viz.draw(graph, "overview")._repr_svg_()).iter(f"{SVG}g")]
    marked = [g for g in groups if g.get("data-inserted") is not None]

    assert Counter(name for g in marked for name in (g.get("data-inserted") or "").split()) == inserted_in(graph)
    for group in marked:
        text = " ".join(t.text or "" for t in group.iter(f"{SVG}text"))
        count = len((group.get("data-inserted") or "").split())
        assert f"+{count} inserted" in text or "without nodes" in text


@EACH
def test_overview_fits_on_one_screen(make: Make) -> None:
    diagram = _overview.overview_diagram(_graph_view.read_graph(make()), {}, "")

    assert len(diagram.items) <= 2 * _overview.MOST + 1
    assert len({item.row for item in diagram.items}) <= _overview.MOST + 1
    svg = ET.fromstring(viz.draw(make(), "overview")._repr_svg_())
    assert float((svg.get("height") or "").removesuffix("px")) <= 1000


@pytest.mark.slow
def test_overview_folds_what_is_alike() -> None:
    deep = _overview.overview_diagram(_graph_view.read_graph(transformer()), {}, "")
    steps = _overview.overview_diagram(_graph_view.read_graph(recurrent()), {}, "")

    assert {"blocks.0", "blocks.1"} <= {item.text for item in deep.items}  # two fit unfolded
    assert any(item.text.startswith("step/add, tanh x 40") for item in steps.items)


@pytest.mark.slow
def test_overview_of_24_layers() -> None:
    diagram = _overview.overview_diagram(_graph_view.read_graph(transformer(24)), {}, "")
    texts = [item.text for item in diagram.items if item.column == "forward"]

    assert "blocks.[0-23].attn x 24" in texts
    assert "blocks.[0-23].mlp x 24" in texts
    assert len(texts) <= _overview.MOST


def test_overview_counts_tensors() -> None:
    graph_view = _graph_view.read_graph(three_layers())
    diagram = _overview.overview_diagram(graph_view, {}, "")
    first, tanh = (
        next(i.key for i in diagram.items if i.text == text and i.column == "forward") for text in ("first", "/tanh")
    )
    (link,) = [n for n in diagram.links if (n.source, n.target) == (first, tanh)]
    total = sum(n.tensors for n in diagram.links)

    assert link.tensors == 1
    lanes = {name: (node.lane, node.order) for name, node in graph_view.nodes.items() if node.role == "op"}
    assert 0 < total < sum(a in lanes and b in lanes for a, b in graph_view.edges)


@pytest.mark.parametrize(
    ("names", "wanted"),
    [
        (["a.0.b", "a.1.b", "a.2.b"], "a.[0-2].b"),
        (["l.0", "l.2", "l.3"], "l.[0,2-3]"),
        (["x.0.1", "x.1.1"], "x.[0-1].1"),
    ],
)
@pytest.mark.pure
def test_names_with_ranges(names: list[str], wanted: str) -> None:
    assert _overview._pattern(names) == wanted


def site_objects(graph: JointGraph, site: str) -> dict[str, list[dict[str, Any]]]:
    found = objects(viz.draw(graph, "site", site=site))
    return {side: [one for one in found if one["data_side"] == side] for side in ("before", "after")}


@pytest.mark.parametrize("site", ["error:second", "gradient:first.weight", "activation:second", "error:first"])
def test_site_shows_what_was_inserted_after_and_not_before(site: str) -> None:
    graph = three_layers()
    sides = site_objects(graph, site)
    own = [(n, edit) for n, edit in enumerate(graph.edits) if str(edit.site) == site]

    after = Counter(one["data_node"] for one in sides["after"] if "data_node" in one)
    assert set(after.values()) == {1}
    assert all(after[name] == 1 for _, edit in own for name in edit.nodes)
    shown_edits = {int(one["data_edit"]) for one in sides["after"] if "data_edit" in one}
    assert {n for n, _ in own} <= shown_edits
    assert not [one for one in sides["before"] if "data_edit" in one]
    assert graph.before is not None
    before = set(_graph_view.read_graph(graph.before).nodes)
    marked = {one["data_node"] for one in sides["after"] if "data_node" in one and one["class"].find("inserted") >= 0}
    assert not marked & before


def test_site_crosses_out_the_edge_that_was_replaced() -> None:
    graph = three_layers()
    (site,) = [s for s in graph.sites if str(s) == "error:second"]
    (clip,) = [e for e in graph.edits if e.site == site]
    diagram = viz.draw(graph, "site", site=site)._diagram
    anchor = graph.provenance.anchors[site].node
    cut = [link for link in diagram.links if link.kind == "cut"]

    assert cut
    assert {link.source for link in cut} == {f"before {anchor}"}
    after = {(link.source, link.target) for link in diagram.links}
    assert all((f"after {anchor}", link.target.replace("before", "after")) not in after for link in cut)
    assert (f"after {anchor}", f"after {clip.nodes[0]}") in after
    svg = viz.draw(graph, "site", site=site)._repr_svg_()
    assert svg.count('class="cross"') == 2 * len(cut)


def test_a_gradient_that_is_returned_is_replaced_too() -> None:
    graph = three_layers()
    (site,) = [s for s in graph.sites if str(s) == "gradient:second.bias"]
    diagram = viz.draw(graph, "site", site=site)._diagram
    (cut,) = [link for link in diagram.links if link.kind == "cut"]
    into = [link.source for link in diagram.links if link.target == "after gradient of second.bias"]
    clip = next(e for e in graph.edits if e.site == site and e.text.startswith("ClipByGlobalNorm"))

    assert cut.target == "before gradient of second.bias"
    assert into == [f"after {clip.nodes[-1]}"]


def test_site_without_an_edit_crosses_out_nothing() -> None:
    diagram = viz.draw(three_layers(), "site", site="error:third")._diagram

    assert not [link for link in diagram.links if link.kind == "cut"]
    assert "no edit stands here" in diagram.caption


def test_hops() -> None:
    sizes = [len(viz.draw(three_layers(), "site", site="error:second", hops=n)._diagram.items) for n in range(4)]

    assert sizes == sorted(sizes)
    assert sizes[0] < sizes[1] < sizes[3]


def test_which_site_is_meant() -> None:
    graph = three_layers()

    with pytest.raises(NoSuchSiteError, match="nearest sites: error:second"):
        viz.draw(graph, "site", site="error:secnd")
    with pytest.raises(ValueError, match="names 3 sites; give one of them: error:first, error:second, error:third"):
        viz.draw(graph, "site", site="error:*")
    with pytest.raises(ValueError, match="needs a site: there is no monitor"):
        viz.draw(graph, "site")
    with pytest.raises(ValueError, match="belongs to view='site'"):
        viz.draw(graph, "ladder", site="error:second")
    assert str(viz.draw(graph, "site", site="error:sec*").site) == "error:second"


def fake_dot(folder: Path, script: str, monkeypatch: pytest.MonkeyPatch) -> None:
    folder.mkdir(exist_ok=True)
    program = folder / "dot"
    program.write_text(f"#!/bin/sh\n{script}\n")
    program.chmod(program.stat().st_mode | stat.S_IXUSR)
    monkeypatch.setenv("PATH", f"{folder}{os.pathsep}{os.environ['PATH']}")


@pytest.mark.parametrize(
    ("script", "notice"),
    [
        ("exec sleep 60", "did not end within 0.5 s"),
        ("kill -SEGV $$", "crashed .signal 11."),
        ("echo no good >&2; exit 3", "failed .status 3.: no good"),
        ("exit 0", "it said nothing"),
        ("echo garbage", "something that is no (svg|png): b'garbage"),
    ],
    ids=["hangs", "crashes", "refuses", "says nothing", "writes nonsense"],
)
@pytest.mark.parametrize("form", ["svg", "png"])
def test_graphviz_that_fails_is_said_and_replaced(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, script: str, notice: str, form: viz.Format
) -> None:
    fake_dot(tmp_path / "bin", script, monkeypatch)
    monkeypatch.setattr(_graphviz.run_dot, "__kwdefaults__", {"time_limit": 0.5})
    graph = three_layers()

    with pytest.warns(viz.DrawingWarning, match=f"{notice}.*own layout"):
        path = viz.draw(graph, "overview").render(tmp_path / "picture", form)
    if form == "png":
        assert Path(path).read_bytes().startswith(b"\x89PNG")
        return
    svg = ET.parse(path).getroot()
    names = [g.get("data-inserted") or "" for g in svg.iter(f"{SVG}g")]
    assert Counter(" ".join(names).split()) == inserted_in(graph)
    assert any(re.search(notice, text.text or "") for text in svg.iter(f"{SVG}text"))


def test_own_layout_of_a_site(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    fake_dot(tmp_path / "bin", "exit 1", monkeypatch)
    graph = three_layers()
    with pytest.warns(viz.DrawingWarning):
        svg = ET.fromstring(viz.draw(graph, "site", site="error:second")._repr_svg_())
    (clip,) = [e for e in graph.edits if str(e.site) == "error:second"]

    drawn = Counter(
        g.get("data-node") for g in svg.iter(f"{SVG}g") if g.get("data-edit") is not None or g.get("data-node")
    )
    assert all(drawn[name] == 1 for name in clip.nodes)
    assert len([p for p in svg.iter(f"{SVG}path") if p.get("class") == "cross"]) >= 2


def test_graphviz_that_is_not_there(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setattr(_graphviz.importlib.util, "find_spec", lambda name: None)  # type: ignore[attr-defined]

    with pytest.warns(viz.DrawingWarning, match="neither on PATH nor in pygraphviz; pip install pygraphviz"):
        viz.draw(three_layers(), "overview")._repr_svg_()


@pytest.mark.pure
def test_without_a_system_dot_pygraphviz_draws(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))

    command = _graphviz.find_graphviz("svg")
    assert command is not None
    assert command[1] == "-c"
    assert b"<svg" in _graphviz.run_dot("digraph { a -> b }", "svg")


@pytest.mark.parametrize(
    "text", ['a"b', "<b>", "a\\nb", "x|y{z}", "a\x07b", "\u5c64", "</td>", "p" * 300, "&amp;", "a:b"]
)
@pytest.mark.pure
def test_any_text_can_stand_in_a_label(text: str) -> None:
    item = _diagram.Item("k:1", "forward", 0, text, text, "", (), text, {"node": text})
    diagram = _diagram.Diagram(text, ("forward",), [item], [], [text])
    svg = _diagram_dot.finish_svg(_graphviz.run_dot(_diagram_dot.diagram_dot(diagram), "svg"), diagram)

    (group,) = [g for g in ET.fromstring(svg).iter(f"{SVG}g") if g.get("data-node") is not None]
    assert group.get("data-node") == _graph_view.xml_safe(text)
    assert group.findtext(f"{SVG}title") == _graph_view.xml_safe(text)
    shown = "".join(t.text or "" for t in group.iter(f"{SVG}text")).replace("\xa0", " ")
    assert shown.startswith(_graph_view.shorten(_graph_view.xml_safe(text), _diagram.MAX_LABEL))


def test_odd_names_survive_graphviz() -> None:
    for view, site in (("overview", None), ("site", "error:percent%s{{code}}")):
        drawing = viz.draw(odd_names(), view, site=site)
        assert "<svg" in drawing._repr_svg_()
