"""The view of a site: one drawing with the edits, the edges that they replaced, and Graphviz or our own layout."""

from __future__ import annotations

import os
import re
import stat
from collections import Counter
from pathlib import Path
from xml.etree import ElementTree as ET

import pytest

from gradrewrite import viz
from gradrewrite.errors import NoSuchSiteError
from gradrewrite.ir import graph_view as _graph_view
from gradrewrite.ir.joint_graph import JointGraph
from gradrewrite.viz import _dot, _fonts, _graphviz, _scene

from models.graphs import odd_names, three_layers

SVG = "{http://www.w3.org/2000/svg}"


def scene_of(graph: JointGraph, site: str, hops: int = 3) -> _scene.Scene:
    return viz.draw(graph, "site", site=site, hops=hops)._scene()


@pytest.mark.parametrize("site", ["error:second", "gradient:first.weight", "activation:second", "error:first"])
def test_the_edits_of_the_site_are_in_it_and_every_node_once(site: str) -> None:
    graph = three_layers()
    svg = ET.fromstring(viz.draw(graph, "site", site=site)._repr_svg_())
    edits = [e for e in svg.iter(f"{SVG}g") if e.get("data-edit")]

    own = Counter(edit.text for edit in graph.edits if str(edit.site) == site)
    assert Counter(e.get("data-action") for e in edits if e.get("data-edit") == site) == own
    drawn = Counter(e.get("data-node") for e in svg.iter(f"{SVG}g") if e.get("data-node"))
    assert set(drawn.values()) == {1}
    assert {name for edit in graph.edits if str(edit.site) == site for name in edit.nodes} <= set(drawn)


def test_the_edges_that_were_replaced_are_crossed_out() -> None:
    graph = three_layers()
    (site,) = [s for s in graph.sites if str(s) == "error:second"]
    number = next(n for n, e in enumerate(graph.edits) if e.site == site)
    anchor = graph.provenance.anchors[site].node
    lines = scene_of(graph, "error:second").lines
    cut = {(line.source, line.target) for line in lines if line.classes == ("cut",)}
    kept = {(line.source, line.target) for line in lines if line.classes in ((), ("saved",))}

    before = _graph_view.read_graph(graph.before or graph)
    readers = {b for a, b in _graph_view.contracted_edges(before, _graph_view.hidden_nodes(before)) if a == anchor}
    assert cut == {(anchor, reader) for reader in readers}
    assert (anchor, f"edit {number}") in kept
    assert {b for a, b in kept if a == f"edit {number}"} == readers
    assert sum(line.classes == ("cross",) for line in lines) == 2 * len(cut)


def test_a_gradient_that_is_returned_is_replaced_too() -> None:
    graph = three_layers()
    (site,) = [s for s in graph.sites if str(s) == "gradient:second.bias"]
    lines = scene_of(graph, "gradient:second.bias").lines
    into = [line for line in lines if line.target == "gradient:second.bias" and "cross" not in line.classes]
    clip = next(n for n, e in enumerate(graph.edits) if e.site == site and e.text.startswith("ClipByGlobalNorm"))

    assert {(line.source, line.classes) for line in into} == {
        (graph.provenance.anchors[site].node, ("cut",)),
        (f"edit {clip}", ()),
    }


def test_a_site_without_an_edit_has_no_crosses() -> None:
    scene = scene_of(three_layers(), "error:third")

    assert not [line for line in scene.lines if "cut" in line.classes]
    assert "no edit acts on this site" in [label.text for label in scene.labels]


def test_hops() -> None:
    sizes = [len(scene_of(three_layers(), "error:second", hops=n).boxes) for n in range(4)]

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
        ("echo garbage", "something that is no plain: b'garbage"),
    ],
    ids=["hangs", "crashes", "refuses", "says nothing", "writes nonsense"],
)
def test_graphviz_that_fails_is_said_and_replaced(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, script: str, notice: str
) -> None:
    fake_dot(tmp_path / "bin", script, monkeypatch)
    monkeypatch.setattr(_graphviz.run_dot, "__kwdefaults__", {"time_limit": 0.5})
    graph = three_layers()
    with pytest.warns(viz.DrawingWarning, match=f"{notice}.*own layout"):
        path = viz.draw(graph, "site", site="error:second").render(tmp_path / "picture")
    svg = ET.parse(path).getroot()
    (clip,) = [e for e in graph.edits if str(e.site) == "error:second"]

    assert {g.get("data-node") for g in svg.iter(f"{SVG}g")} >= set(clip.nodes)
    assert any(re.search(notice, text.text or "") for text in svg.iter(f"{SVG}text"))
    assert len([p for p in svg.iter(f"{SVG}path") if p.get("class") == "cross"]) >= 2


def test_graphviz_that_is_not_there(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setattr(_graphviz.importlib.util, "find_spec", lambda name: None)  # type: ignore[attr-defined]

    with pytest.warns(viz.DrawingWarning, match="neither on PATH nor in pygraphviz; pip install pygraphviz"):
        viz.draw(three_layers(), "site", site="error:second")._repr_svg_()
    assert viz.draw(three_layers(), "overview")._repr_svg_()  # needs none


@pytest.mark.pure
def test_without_a_system_dot_pygraphviz_draws(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))

    command = _graphviz.find_graphviz("svg")
    assert command is not None
    assert command[1] == "-c"
    assert b"<svg" in _graphviz.run_dot("digraph { a -> b }", "svg")
    assert _graphviz.run_dot("digraph { a -> b }", "plain").startswith(b"graph ")


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
    drawn = ET.fromstring(_graphviz.run_dot(_dot.scene_dot(scene), "svg"))
    shown = ["".join(t.itertext()).replace("\xa0", " ") for t in drawn.iter(f"{SVG}text")]
    assert _fonts.xml_safe(fitted.text) in shown


def test_odd_names_are_drawn() -> None:
    for view, site in (("overview", None), ("site", "error:percent%s{{code}}")):
        assert "<svg" in viz.draw(odd_names(), view, site=site)._repr_svg_()
