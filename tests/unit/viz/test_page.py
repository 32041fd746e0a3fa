"""The page as a file: everything is in it, once, and nothing of it comes from outside."""

from __future__ import annotations

import json
import re
from collections import Counter
from collections.abc import Callable
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest

from gradrewrite import viz
from gradrewrite.ir.joint_graph import JointGraph
from gradrewrite.viz import _graph_view
from gradrewrite.viz.page import _html

from models.clips import step_of
from models.graphs import EACH, ODD_NAMES, odd_names, three_layers

Make = Callable[[], JointGraph]


class Reader(HTMLParser):
    """Elements of a page with their attributes, and the text of each script."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.elements: list[tuple[str, dict[str, str | None]]] = []
        self.scripts: list[str] = []
        self._in_script = False
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.elements.append((tag, dict(attrs)))
        if tag == "script":
            self._in_script = True
            self.scripts.append("")

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.elements.append((tag, dict(attrs)))

    def handle_endtag(self, tag: str) -> None:
        self._in_script = self._in_script and tag != "script"

    def handle_data(self, data: str) -> None:
        if self._in_script:
            self.scripts[-1] += data


def page_of(graph: JointGraph, **options: Any) -> tuple[Reader, dict[str, Any]]:
    reader = Reader(viz.draw(graph, **options)._bytes("html").decode())
    return reader, json.loads(reader.scripts[0], parse_constant=pytest.fail)


@pytest.mark.long
@EACH
def test_every_edit_is_in_the_page_with_the_names_of_its_nodes(make: Make) -> None:
    graph = make()
    reader, data = page_of(graph)

    assert [(e["site"], tuple(e["nodes"])) for e in data["edits"]] == [(str(e.site), e.nodes) for e in graph.edits]
    overview = [a["data-edit"] for tag, a in reader.elements if tag == "g" and "data-edit" in a]
    assert Counter(overview) == Counter(str(edit.site) for edit in graph.edits)


@EACH
def test_the_data_is_that_of_the_graph(make: Make) -> None:
    graph = make()
    _, data = page_of(graph)
    hidden = _graph_view.hidden_nodes(_graph_view.read_graph(graph))
    in_edits = {name for edit in graph.edits for name in edit.nodes}

    assert list(data["nodes"]) == [n.name for n in graph.graph_module.graph.nodes if n.op != "output"]
    names = Counter(name for part in data["parts"] for name in part["nodes"])
    assert set(names.values()) == {1}
    assert set(names) == (set(data["nodes"]) - hidden) | in_edits
    assert [part["edits"] for part in data["parts"] if part["edits"]] == [
        [number] for _, number in sorted((p["row"], p["edits"][0]) for p in data["parts"] if p["edits"])
    ]
    for part in data["parts"]:
        assert 0 <= part["row"] < len(data["rows"])
        assert part["y"] + part["height"] <= data["rows"][part["row"]]
        assert set(part["shown"]) <= set(part["nodes"])
    for source, target, _, tensors, points in data["lines"]:
        assert max(source, target) < len(data["parts"])
        assert tensors >= 1
        assert {end for _, end, _ in points} == {0, 1}
    for edit in graph.edits:
        for name in edit.nodes:
            assert data["nodes"][name]["code"].startswith(name)
            assert data["nodes"][name]["code"].endswith(f"# {edit.text} at {edit.site}")


def test_an_edit_has_the_edges_that_it_replaced() -> None:
    graph = three_layers()
    _, data = page_of(graph)
    before = _graph_view.read_graph(graph.before or graph)
    hidden = _graph_view.hidden_nodes(before)
    box = {name: part["key"] for part in data["parts"] for name in part["nodes"]}
    for number, edit in enumerate(graph.edits):
        found = {(data["parts"][a]["key"], data["parts"][b]["key"]) for a, b in data["edits"][number]["replaced"]}
        anchor = before.anchors[edit.site]
        readers = [box[b] for a, b in _graph_view.contracted_edges(before, hidden - {anchor}) if a == anchor]
        outputs = [f"returned {label}" for label, _ in before.returned if label == str(edit.site)]
        is_change = edit.text.startswith(("ClipByValue", "ClipByGlobalNorm"))
        ends = [*readers, *outputs] if is_change else []
        assert [b for _, b in sorted(found)] == sorted(set(ends)), str(edit.site)
        assert len({a for a, _ in found}) == int(is_change)
        assert not is_change or anchor in hidden or {a for a, _ in found} == {box[anchor]}


def test_nothing_comes_from_outside() -> None:
    reader, _ = page_of(three_layers(), monitor=[step_of(0, {"loss@run": 1.0})])

    for _, attributes in reader.elements:
        for name in ("src", "href", "data", "action", "xlink:href"):
            assert (attributes.get(name) or "data:").startswith("data:")
    assert [t for t, _ in reader.elements if t in ("link", "iframe", "object", "embed", "base")] == ["link"]  # the icon
    policy = next(a["content"] for t, a in reader.elements if t == "meta" and "content" in a and "http-equiv" in a)
    assert policy is not None
    assert policy.startswith("default-src 'none';")


def test_names_with_markup_stay_text() -> None:
    reader, data = page_of(odd_names(), title="<script>alert(2)</script>{{data}}")

    assert len(reader.scripts) == 3
    assert Counter(t for t, _ in reader.elements)["script"] == 3
    for name in ODD_NAMES:
        assert any(name in module for module in data["modules"])
    assert "<" not in reader.scripts[0]


@pytest.mark.slow
def test_records_and_metrics_are_in_it() -> None:
    steps = [
        step_of(
            n, {"max_abs@error:second": 0.5 + n, "clipped@error:second": float(n > 1), "mean_abs@error:second": 0.1}
        )
        for n in range(4)
    ]
    steps.append(step_of(4, {"max_abs@error:second": float("nan"), "clipped@error:second": 0.0}))
    reader, data = page_of(three_layers(), monitor=steps)

    assert data["records"]["steps"] == [0, 1, 2, 3, 4]
    assert data["records"]["values"]["error:second"]["max_abs"] == [0.5, 1.5, 2.5, 3.5, "NaN"]
    assert data["records"]["values"]["error:second"]["mean_abs"] == [0.1, 0.1, 0.1, 0.1, None]
    (largest,) = data["metrics"]
    assert (largest["name"], data["color_by"]) == ("largest error", "largest error")
    assert (largest["weak"], largest["strong"]) == (0.5, 5.0)
    assert largest["values"]["error:second"] == {"total": 3.5, "steps": [0.5, 1.5, 2.5, 3.5, "NaN"]}
    assert data["records"]["first"] == 3  # the page opens with the last finite step
    assert data["records"]["rows"] == [["error:second", "max_abs"]]
    assert data["norms"] == {
        "record": "max_abs",
        "low": 0.5,
        "high": 5.0,
        "bounds": {},
        "start": 0,
        "now": 3,
    }
    assert [a["id"] for _, a in reader.elements if a.get("role") == "tab"] == [
        "tab-overview",
        "tab-ladder",
        "tab-report",
        "tab-curves",
    ]


def test_of_many_steps_those_that_were_not_finite_stay() -> None:
    steps = [
        step_of(n, {"nonfinite@error:second": float(n in (7, 501, 998)), "norm@error:second": 1.0}) for n in range(1000)
    ]
    _, data = page_of(three_layers(), monitor=steps)

    assert len(data["records"]["steps"]) <= _html.MOST_STEPS
    assert {0, 7, 501, 998, 999} <= set(data["records"]["steps"])


def test_records_of_a_group_are_those_of_its_members() -> None:
    _, data = page_of(three_layers())
    edit = next(e for e in three_layers().edits if e.text.startswith("ClipByGlobalNorm"))
    (box,) = [part for part in data["parts"] if edit.nodes[0] in part["nodes"]]

    assert "group:default" in box["sites"]


def test_without_a_monitor_there_are_no_colors(tmp_path: Path) -> None:
    reader, data = page_of(three_layers())

    assert data["metrics"] == []
    assert data["records"] == {"steps": [], "values": {}, "first": 0, "rows": []}
    assert data["norms"] is None
    assert [a["id"] for _, a in reader.elements if a.get("role") == "tab"] == ["tab-overview", "tab-ladder"]


@pytest.mark.pure
def test_the_code_and_style_are_plain() -> None:
    folder = Path(_html.__file__).parent
    code = "".join((folder / name).read_text(encoding="utf-8") for name in ("run.js", "graph.js"))

    assert not re.search(
        r"innerHTML|outerHTML|insertAdjacentHTML|document\.write|eval\(|fetch\(|XMLHttpRequest|import\(", code
    )
    assert "</script" not in code
    for name in ("run.js", "graph.js", "page.css", "page.html", "graph.html", "report.html"):
        assert not re.search(r"https?://(?!www\.w3\.org/2000/svg)", (folder / name).read_text(encoding="utf-8"))
