"""The page of a run in a real browser: graph, curves and report as tabs; needs playwright and Chromium."""

from __future__ import annotations

import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import gradrewrite as gr
from gradrewrite import viz
from gradrewrite.diagnostics.run_log import Step

from helpers import node_modules
from models.clips import step_of
from models.drawn import recurrence
from models.graphs import three_layers, transformer

MODULES = node_modules()
pytestmark = pytest.mark.browser
SIZES = [(1600, 1000), (1000, 800)]


def steps_of(graph: gr.JointGraph, count: int = 40, growth: float = 1.1) -> list[Step]:
    """A run with a loss, and norms at all modules and gradients that grow towards the input; its end is infinite."""
    sites = [str(site) for site in graph.sites if site.kind == "gradient" or (site.kind == "error" and site.output_of)]
    steps = []
    for n in range(count):
        norms = {f"norm@{site}": growth ** (len(sites) - at) * (1 + n / 10) for at, site in enumerate(sites)}
        steps.append(step_of(n, norms | {"loss@run": 4.0 - n / 20}))
    bad = {f"norm@{site}": math.inf for site in sites[:3]} | {"loss@run": math.nan}
    return [*steps, step_of(count, bad)]


GRAPHS = {"transformer": lambda: transformer(12), "recurrence": lambda: recurrence(80)}


@pytest.fixture(scope="module", params=list(GRAPHS))
def path(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The page of a run of a GPT with 12 layers, and of a recurrence with 80 calls."""
    graph = GRAPHS[request.param]()
    baseline = [step_of(n, {"loss@run": 4.0 - n / 10}) for n in range(40)]
    report = viz.report(steps_of(graph), baseline={"clipped": baseline}, title=request.param, graph=graph)
    return Path(report.render(tmp_path_factory.mktemp("pages") / request.param))


@pytest.fixture
def open_page(browser: Any) -> Iterator[Any]:
    """Open pages that say nothing and ask for one file alone."""
    pages, heard = [], []

    def opened(path: Path, size: tuple[int, int] = SIZES[0], scheme: str = "light") -> Any:
        viewport = {"width": size[0], "height": size[1]}
        page = browser.new_page(bypass_csp=True, viewport=viewport, color_scheme=scheme)
        page.on("console", lambda message: heard.append(message.text))
        page.on("pageerror", lambda error: heard.append(str(error)))
        page.on("request", lambda request: heard.append(request.url) if request.url != path.as_uri() else None)
        page.goto(path.as_uri())
        page.wait_for_function("document.documentElement.dataset.ready === 'yes'")
        pages.append(page)
        return page

    yield opened
    for page in pages:
        page.close()
    assert [text for text in heard if not text.startswith("data:")] == []


@pytest.mark.slow
@pytest.mark.parametrize("size", SIZES)
def test_it_is_small_and_opens_within_a_second(browser: Any, path: Path, size: tuple[int, int]) -> None:
    assert path.stat().st_size < 3_000_000
    page = browser.new_page(viewport={"width": size[0], "height": size[1]})
    session = page.context.new_cdp_session(page)
    session.send("Performance.enable", {"timeDomain": "threadTicks"})
    page.goto(path.as_uri())
    page.wait_for_function("document.documentElement.dataset.ready === 'yes'")
    for tab in ("curves", "overview", "ladder", "report"):
        page.click(f"#tab-{tab}")
    metrics = session.send("Performance.getMetrics")["metrics"]
    assert next(m["value"] for m in metrics if m["name"] == "TaskDuration") < 1  # with all four tabs
    assert page.evaluate("document.documentElement.scrollWidth <= innerWidth")
    page.close()


@pytest.mark.slow
@pytest.mark.skipif(MODULES is None, reason="npm packages are not installed: run npm install in tests/page")
@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize("size", SIZES)
def test_axe_finds_no_violation(open_page: Any, path: Path, size: tuple[int, int], scheme: str) -> None:
    assert MODULES is not None
    page = open_page(path, size, scheme)
    page.add_script_tag(path=str(MODULES / "axe-core" / "axe.min.js"))
    for tab in ("report", "curves", "overview", "ladder"):
        page.click(f"#tab-{tab}")
        found = page.evaluate("axe.run().then((result) => result.violations)")
        assert [(tab, one["id"], [node["html"][:200] for node in one["nodes"]]) for one in found] == []


@pytest.mark.slow
def test_it_opens_at_the_last_finite_step_and_a_pointer_on_a_curve_moves_it(open_page: Any, path: Path) -> None:
    page = open_page(path)
    assert page.inner_text("#stepname") == "step 39"  # step 40 is not finite
    page.click("#tab-curves")
    assert "this run" in page.inner_text("#charts h3 >> nth=0")
    assert "clipped" in page.inner_text("#charts h3 >> nth=0")
    chart = page.query_selector("#charts svg.curve").bounding_box()
    page.mouse.move(chart["x"] + 62, chart["y"] + 50)
    assert page.inner_text("#stepname") == "step 0"
    assert "step 0: this run 4, clipped 4" in page.text_content("#charts svg.curve >> nth=0")
    page.mouse.move(chart["x"] + chart["width"] - 7, chart["y"] + 50)
    assert page.inner_text("#stepname") == "step 40"
    assert "this run NaN" in page.text_content("#charts svg.curve >> nth=0")


@pytest.mark.slow
def test_a_row_of_the_heat_map_selects_the_box(open_page: Any, path: Path) -> None:
    page = open_page(path)
    page.click("#tab-curves")
    page.focus("#heat")
    for key in ("ArrowDown", "ArrowDown", "ArrowRight", "ArrowLeft"):
        page.keyboard.press(key)
    site, record = page.evaluate("run.records.rows[1]")
    assert f"{site}, step 39: {record} " in page.inner_text("#heat-value")
    page.keyboard.press("Enter")
    assert page.get_attribute("#tab-ladder", "aria-selected") == "true"
    assert site in page.evaluate("[...selected.sites, ...selected.cells.flatMap((cell) => cell[1])]")
    assert f"{record}@{site}" in page.inner_text("#details")


@pytest.mark.slow
def test_bars_follow_the_step(open_page: Any, path: Path) -> None:
    page = open_page(path)
    page.click("#tab-overview")
    texts = "(all) => all.map((one) => one.textContent).filter((text) => text.includes('norm '))"
    seen = []
    for step in (0, 39):
        page.evaluate("(step) => setStep(step)", step)
        seen.append(page.eval_on_selector_all("#overview text.note, #overview text.small", texts))
    assert len(seen[0]) == len(seen[1]) > 0
    assert all(a != b for a, b in zip(*seen, strict=True))
    assert page.locator("#overview .mark").count() > 20
    page.evaluate("setStep(40)")
    fills = page.eval_on_selector_all("#overview .mark", "(all) => all.map((one) => one.getAttribute('style'))")
    assert "fill:var(--not-finite)" in fills
    assert "fill:var(--no-data)" in fills  # what that step did not record


@pytest.mark.slow
def test_the_ladder_s_folded_bands_are_strips(open_page: Any, path: Path) -> None:
    page = open_page(path)
    page.click("#tab-ladder")
    page.click("#fold")
    cells = page.eval_on_selector_all(
        "#graph .summary", "(all) => all.map((one) => one.querySelectorAll('.mark title').length)"
    )
    assert max(cells) in (12, 80)


def test_the_table_shows_ten_rows_sorts_filters_and_groups_by_rule(open_page: Any, tmp_path: Path) -> None:
    sites = [f"error:layers.{n}" for n in range(30)] + [f"error:other{'x' * n}" for n in range(5)]
    records = {f"norm@{site}": 1.0 + at for at, site in enumerate(sites)} | {f"bound@{sites[0]}": 0.5}
    path = Path(viz.report([step_of(n, records) for n in range(30)]).render(tmp_path / "r"))
    page = open_page(path)
    rows = page.locator("#report tbody tr")

    assert rows.count() == 7  # one clip, five others, and one for 29 layers
    assert "error:layers.0" in rows.first.inner_text()  # its clip always acts
    assert "+ 28 of error:layers.*" in page.inner_text("#report tbody")
    page.click("text=+ 28 of error:layers.*")
    assert rows.count() == 35  # what was unfolded is not cut off
    assert page.inner_text("#row-count") == "35 of 35 rows"
    page.fill("#filter", "layers.2")
    assert rows.count() == 11
    page.fill("#filter", "nothing")
    assert page.inner_text("#row-count") == "no row matches"
    page.fill("#filter", "")
    page.click("#all-rows")
    assert rows.count() == 35
    page.click("#report thead button >> text=p50")
    assert "error:otherxxxx" in rows.first.inner_text()
    assert page.get_attribute("#report thead th[aria-sort]", "aria-sort") == "descending"
    page.click("#report thead button >> text=p50")
    assert "error:layers.0" in rows.first.inner_text()


def test_the_verdict_leads_to_the_box_and_the_step(open_page: Any, tmp_path: Path) -> None:
    graph = recurrence(40)
    sites = [str(site) for site in graph.sites if site.kind == "error" and site.name == "cell.keep"]
    norms = {f"norm@{site}": 2.0 ** (len(sites) - n) for n, site in enumerate(sites)}
    steps = [step_of(n, norms | {"loss@run": 4.0}) for n in range(30)]
    page = open_page(Path(viz.report(steps, graph=graph).render(tmp_path / "r")))

    assert "in step 0 " in page.inner_text("#where")
    assert ".py:" in page.inner_text("#where code")  # the line of the forward
    page.click("#where button")
    assert page.get_attribute("#tab-ladder", "aria-selected") == "true"
    assert page.inner_text("#stepname") == "step 0"
    assert "error:cell.keep" in page.inner_text("#details")


def test_one_run_that_diverges_does_not_stretch_the_axis(open_page: Any, tmp_path: Path) -> None:
    good = [step_of(n, {"loss@run": 4.0 - n / 20}) for n in range(30)]
    bad = [step_of(n, {"loss@run": 4.0 * 10.0**n}) for n in range(20)] + [step_of(20, {"loss@run": math.inf})]
    page = open_page(Path(viz.report(good, baseline={"plain": bad}).render(tmp_path / "r")))

    assert page.evaluate("axisOf(run.panels[0].lines).high") < 60
    assert page.locator("#loss-chart .bad").count() == 1


def test_the_views_of_a_graph_without_a_run_have_no_step(open_page: Any, tmp_path: Path) -> None:
    page = open_page(Path(viz.draw(three_layers()).render(tmp_path / "p", "html")))

    assert page.locator("#steps").is_hidden()
    assert page.locator("[role=tab]").all_inner_texts() == ["overview", "ladder"]
    assert page.locator("#graph .mark").count() == 0
