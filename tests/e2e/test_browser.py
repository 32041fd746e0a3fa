"""The page in a real browser; needs playwright and Chromium."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from gradrewrite import viz
from gradrewrite.diagnostics.run_log import Step
from gradrewrite.viz import _graph_view

from models.graphs import odd_names, three_layers, transformer

sync_api = pytest.importorskip("playwright.sync_api", reason="playwright is not installed")
CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
pytestmark = [pytest.mark.browser, pytest.mark.skipif(CHROMIUM is None, reason="Chromium is not installed")]

STEPS = [
    Step(n, {"max_abs@error:second": 10.0**n, "mean_abs@error:second": 1.0, "clipped@error:second": float(n == 2)})
    for n in range(4)
] + [Step(4, {"max_abs@error:second": float("inf"), "mean_abs@error:second": 1.0, "clipped@error:second": 0.0})]


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    with sync_api.sync_playwright() as driver:
        found = driver.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox"])
        yield found
        found.close()


class Opened:
    """A page, and what it said and asked for."""

    def __init__(self, browser: Any, path: str) -> None:
        self.page = browser.new_page(viewport={"width": 1400, "height": 900})
        self.said: list[str] = []
        self.asked: list[str] = []
        self.page.on("console", lambda message: self.said.append(message.text))
        self.page.on("pageerror", lambda error: self.said.append(str(error)))
        self.page.on("dialog", lambda dialog: self.said.append(f"dialog {dialog.message}"))
        self.page.on("request", lambda request: self.asked.append(request.url))
        self.page.goto(Path(path).as_uri())
        self.page.wait_for_function("document.documentElement.dataset.ready === 'yes'")

    def count(self, selector: str) -> int:
        """How many elements of the page match and are shown."""
        shown = "(all) => all.filter((element) => element.getClientRects().length > 0).length"
        return int(self.page.eval_on_selector_all(selector, shown))

    def details(self) -> str:
        return str(self.page.inner_text("#details"))

    def close(self) -> None:
        assert self.said == []
        assert [url for url in self.asked if not url.startswith(("file:", "data:"))] == []
        assert len([url for url in self.asked if url.startswith("file:")]) == 1
        self.page.close()


@pytest.fixture
def opened(browser: Any, tmp_path: Path) -> Iterator[Opened]:
    found = Opened(
        browser, viz.draw(three_layers(), monitor=STEPS, title="three layers").render(tmp_path / "p", "html")
    )
    yield found
    found.close()


def test_it_loads_and_shows_every_node(opened: Opened) -> None:
    graph_view = _graph_view.read_graph(three_layers())

    assert opened.page.title() == "three layers"
    assert opened.count("#graph [data-node]") == len(set(graph_view.nodes) - _graph_view.hidden_reshapes(graph_view))
    assert opened.count("#edits button") == len(graph_view.edits)


def test_search_finds_sites_ops_modules_and_sources(opened: Opened) -> None:
    graph_view = _graph_view.read_graph(three_layers())
    for text, wanted in (
        ("error:second", {n for e in graph_view.edits if str(e.site) == "error:second" for n in e.nodes}),
        ("mse_loss", {n.name for n in graph_view.nodes.values() if n.op == "mse_loss" and not n.reshapes}),
        ("aten.tanh", {n.name for n in graph_view.nodes.values() if n.target.startswith("aten.tanh")}),
    ):
        opened.page.fill("#search", text)
        hits = {e.get_attribute("data-node") for e in opened.page.query_selector_all("#graph .node.hit")}
        assert wanted <= hits
        assert hits
        assert opened.page.inner_text("#count") == f"{len(hits)} found"
    opened.page.fill("#search", "graphs.py")  # a source line
    assert opened.count("#graph .node.hit") > 10
    opened.page.fill("#search", "second")
    opened.page.press("#search", "Enter")
    first = opened.page.get_attribute("#graph .selected", "data-node")
    opened.page.press("#search", "Enter")
    assert opened.page.get_attribute("#graph .selected", "data-node") != first
    assert "2 of" in opened.page.inner_text("#count")
    opened.page.click("#previous")
    assert opened.page.get_attribute("#graph .selected", "data-node") == first
    opened.page.press("#search", "Escape")
    assert opened.count("#graph .node.hit") == 0


def test_a_click_shows_records_code_and_partner(opened: Opened) -> None:
    (clip,) = [e for e in three_layers().edits if e.text.startswith("ClipByValue")]
    opened.page.click(f'#graph [data-node="{clip.nodes[0]}"]')

    text = opened.details()
    assert "aten.clamp_min.default" in text
    assert "ClipByValue(0.5, log=True) at error:second" in text
    assert f"{clip.nodes[0]}: " in text  # its code
    assert "max_abs@error:second" in text
    assert opened.count("#details svg.curve") == 3
    assert len(opened.page.query_selector_all("#details svg.curve .bad")) == 1  # the infinity is marked
    partner = opened.page.query_selector("#details [data-partner]")
    assert partner is not None
    name = partner.get_attribute("data-partner")
    partner.click()
    assert opened.page.get_attribute("#graph .selected", "data-node") == name
    assert "lane\nforward" in opened.details().replace("\n\n", "\n")


def test_curves_are_enlarged(opened: Opened) -> None:
    assert opened.page.evaluate("document.querySelector('#curves img').naturalWidth") > 300
    opened.page.click("#enlarge")
    assert opened.count("#large img") == 1
    opened.page.keyboard.press("Escape")
    assert opened.count("#large img") == 0


def test_edits_jump_to_their_nodes(opened: Opened) -> None:
    graph = three_layers()
    for number, edit in enumerate(graph.edits):
        opened.page.click(f'#edits [data-jump="{number}"]')
        selected = opened.page.query_selector("#graph .selected")
        assert selected is not None
        if edit.nodes:
            assert selected.get_attribute("data-node") == edit.nodes[0]
        box, view = selected.bounding_box(), opened.page.query_selector("#view").bounding_box()
        assert view["y"] <= box["y"] <= view["y"] + view["height"]


def test_lanes_and_saved_edges_are_switched_off(opened: Opened) -> None:
    before = {lane: opened.count(f"#graph .node.{lane}") for lane in ("forward", "backward")}
    saved = opened.count("#graph path.saved")
    assert min(*before.values(), saved) > 0

    opened.page.uncheck("#saved")
    assert opened.count("#graph path.saved") == 0
    opened.page.uncheck("#lane-forward")
    assert opened.count("#graph .node.forward") == 0
    assert opened.count("#graph .node.backward") == before["backward"]
    opened.page.check("#lane-forward")
    opened.page.check("#saved")
    assert opened.count("#graph path.saved") == saved


def test_the_slider_colors_by_step(opened: Opened) -> None:
    (clip,) = [e for e in three_layers().edits if e.text.startswith("ClipByValue")]
    style = f'() => document.querySelector(\'[data-node="{clip.nodes[0]}"] rect\').getAttribute("style")'
    opened.page.select_option("#metric", label="largest error")
    colors = []
    for step in range(6):
        opened.page.evaluate(
            "n => { const s = document.getElementById('step'); s.value = n; s.dispatchEvent(new Event('input')); }",
            step,
        )
        colors.append(opened.page.evaluate(style))
    assert opened.page.inner_text("#stepname") == "all steps"
    assert len(set(colors[:4])) == 4  # a logarithmic scale from 1 to 1000
    assert colors[4] == colors[5]  # infinite, and so in all
    assert colors[4] not in colors[:4]
    assert "logarithmic" in opened.page.inner_text("#legend")
    opened.page.select_option("#metric", label="clip rate")
    assert "every step" in opened.page.inner_text("#legend")


def test_it_is_operated_by_keys(opened: Opened) -> None:
    opened.page.keyboard.press("/")
    assert opened.page.evaluate("document.activeElement.id") == "search"
    opened.page.keyboard.type("third")
    opened.page.keyboard.press("Enter")
    opened.page.keyboard.press("Escape")
    assert opened.page.evaluate("document.activeElement.id") == "view"
    chosen = opened.page.get_attribute("#graph .selected", "data-node")
    opened.page.keyboard.press("n")
    assert opened.page.get_attribute("#graph .selected", "data-node") != chosen
    opened.page.keyboard.press("p")
    assert opened.page.get_attribute("#graph .selected", "data-node") == chosen
    lane = opened.page.get_attribute("#graph .selected", "class")
    opened.page.keyboard.press("o")
    assert opened.page.get_attribute("#graph .selected", "class") != lane
    opened.page.keyboard.press("e")
    assert "edit 1 of" in opened.page.inner_text("#status")
    opened.page.keyboard.press("E")
    assert f"edit {len(three_layers().edits)} of" in opened.page.inner_text("#status")
    opened.page.uncheck("#saved")
    opened.page.keyboard.press("e")  # a box that was clicked takes no keys
    assert "edit 1 of" in opened.page.inner_text("#status")
    width = float(opened.page.get_attribute("#graph", "width"))
    opened.page.keyboard.press("+")
    assert float(opened.page.get_attribute("#graph", "width")) > width
    opened.page.keyboard.press("?")
    assert opened.page.query_selector("#keys").is_visible()
    opened.page.keyboard.press("Escape")
    reached = set()
    for _ in range(60):
        opened.page.keyboard.press("Tab")
        reached.add(opened.page.evaluate("document.activeElement.id"))
    assert {"search", "fold", "unfold", "in", "out", "fit", "saved", "metric", "step", "help", "view"} <= reached


def test_it_pans_and_zooms_with_the_mouse(opened: Opened) -> None:
    opened.page.click("#in")
    opened.page.click("#in")
    opened.page.click("#in")
    place = opened.page.query_selector("#view").bounding_box()
    x, y = place["x"] + 300, place["y"] + 300
    opened.page.mouse.move(x, y)
    opened.page.mouse.down()
    opened.page.mouse.move(x - 120, y - 90, steps=4)
    opened.page.mouse.up()
    assert opened.page.evaluate("[view.scrollLeft > 100, view.scrollTop > 70]") == [True, True]
    before = opened.page.evaluate("scale")
    opened.page.keyboard.down("Control")
    opened.page.mouse.wheel(0, -200)
    opened.page.keyboard.up("Control")
    assert opened.page.evaluate("scale") > before


def test_modules_fold_and_unfold(browser: Any, tmp_path: Path) -> None:
    opened = Opened(browser, viz.draw(transformer()).render(tmp_path / "p", "html"))
    bands = opened.page.evaluate("bands.map((band) => [band.key, band.depth])")
    outer = [key for key, depth in bands if depth == 0]
    assert outer == ["blocks.0", "blocks.1"]

    assert opened.page.evaluate("bands.every((band) => band.folded)") is True  # large: it opens folded
    folded = opened.count("#graph [data-node]")
    assert opened.count("#graph .summary") == 4
    opened.page.click('[data-band="blocks.0"] [role="button"]')
    some = opened.count("#graph [data-node]")
    opened.page.click("#unfold")
    graph_view = _graph_view.read_graph(transformer())
    everything = opened.count("#graph [data-node]")
    assert folded < some < everything == len(set(graph_view.nodes) - _graph_view.hidden_reshapes(graph_view))
    opened.page.click("#fold")
    assert opened.count("#graph [data-node]") == folded
    inserted = sum(bool(n.mark) for n in graph_view.nodes.values() if n.calls and n.calls[0][0] == "blocks.1")
    texts = [e.text_content() for e in opened.page.query_selector_all("#graph .summary") if e.is_visible()]
    assert any(f", {inserted} inserted" in text for text in texts)
    assert opened.count("#edits details") == 2
    opened.page.fill("#search", "blocks.1.mlp.act/gelu")
    opened.page.press("#search", "Enter")  # a hit inside a folded module unfolds what is around it
    assert opened.page.query_selector("#graph .selected").is_visible()
    assert opened.page.evaluate("bands.find((band) => band.key === 'blocks.0').folded") is True
    opened.close()


def test_folded_modules_have_the_strongest_color(browser: Any, tmp_path: Path) -> None:
    steps = [Step(0, {"max_abs@error:blocks.0.norm1": 1.0, "max_abs@error:blocks.1.norm1": 100.0})]
    opened = Opened(browser, viz.draw(transformer(), monitor=steps).render(tmp_path / "p", "html"))
    fills = opened.page.evaluate(
        "bands.filter((band) => band.depth === 0).map((band) => band.summary[1].rect.getAttribute('style'))"
    )
    stops = opened.page.evaluate("data.palette.stops")
    assert fills == [f"fill:{stops[0]}", f"fill:{stops[-1]}"]
    opened.close()


def test_lines_join_the_boxes_that_are_shown(browser: Any, tmp_path: Path) -> None:
    opened = Opened(browser, viz.draw(transformer()).render(tmp_path / "p", "html"))
    ends = """lines.filter((line) => !line.element.classList.contains("gone")).every((line) => {
      const [x, y] = line.element.getAttribute("d").match(/-?[\\d.]+/g).map(Number);
      const from = standIn(line.from);
      return x >= from.x - 1 && x <= from.x + from.width + 1 && y >= from.y - 1 && y <= from.y + from.height + 1;
    })"""
    for action in ("foldAll(true)", "foldAll(false)"):
        opened.page.evaluate(action)
        assert opened.page.evaluate(ends) is True
        assert opened.count("#graph .lines path") > 10
    opened.close()


def test_names_with_markup_do_nothing(browser: Any, tmp_path: Path) -> None:
    opened = Opened(browser, viz.draw(odd_names(), title="<script>alert(1)</script>").render(tmp_path / "p", "html"))
    opened.page.fill("#search", "<script>alert(1)</script>")
    opened.page.press("#search", "Enter")

    assert opened.page.title() == "<script>alert(1)</script>"
    assert "<script>alert(1)</script>" in opened.details()
    assert opened.count("#graph .node.hit") > 0
    opened.close()


@pytest.mark.slow
def test_a_large_graph_is_usable(browser: Any, tmp_path: Path) -> None:
    opened = Opened(browser, viz.draw(transformer(24, clips_gradients=False)).render(tmp_path / "p", "html"))
    took = "(() => { const start = performance.now(); %s; return performance.now() - start; })()"

    assert opened.page.evaluate("data.boxes.length") > 2500
    assert opened.page.evaluate(took % "foldAll(false)") < 3000
    assert opened.page.evaluate(took % "search('softmax')") < 500
    assert opened.page.evaluate(took % "select(boxes[1500])") < 1500
    frame = """(async () => { const start = performance.now();
      for (let n = 0; n < 20; n++) { view.scrollTop += 200; await new Promise(requestAnimationFrame); }
      return (performance.now() - start) / 20; })()"""
    assert opened.page.evaluate(frame) < 250
    opened.close()
