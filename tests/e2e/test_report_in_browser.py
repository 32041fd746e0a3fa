"""The health report in a real browser; needs playwright and Chromium, and for one test axe-core (npm)."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from gradrewrite import viz
from gradrewrite.diagnostics.run_log import Step

from helpers import node_modules
from models.clips import step_of

MODULES = node_modules()
pytestmark = pytest.mark.browser

SITES = [f"error:layers.{n}" for n in range(30)]
RECORDS = {f"norm@{site}": 4.0 for site in SITES} | {f"bound@{site}": 1.0 for site in SITES} | {"loss@run": 2.0}
STEPS = [step_of(n, RECORDS | {"nonfinite@error:layers.3": 0.0}) for n in range(30)]
BAD = [*STEPS, step_of(30, {"nonfinite@error:layers.3": 2.0})]


@pytest.fixture
def opened(browser: Any) -> Iterator[Any]:
    """A page that says nothing and asks for one file alone, however often."""
    page = browser.new_page(viewport={"width": 1200, "height": 800})
    said: list[str] = []
    asked: list[str] = []
    page.on("console", lambda message: said.append(message.text))
    page.on("pageerror", lambda error: said.append(str(error)))
    page.on("request", lambda request: asked.append(request.url))
    yield page
    page.close()
    assert said == []
    assert {url for url in asked if not url.startswith("data:")} == {url for url in asked if url.endswith("/r.html")}


def wait(page: Any, condition: str) -> None:
    """Wait for a condition; the page's policy forbids playwright's own way."""
    for _ in range(100):
        if page.evaluate(condition):
            return
        page.wait_for_timeout(50)
    pytest.fail(condition)


def test_it_opens_and_prints(opened: Any, tmp_path: Path) -> None:
    opened.goto(Path(viz.report(BAD, baseline=STEPS, title="a run").render(tmp_path / "r")).as_uri())

    assert opened.title() == "a run"
    assert opened.locator("#verdict h2").inner_text() == "Values are not finite"
    assert opened.locator("#verdict pre").is_hidden()  # no code to show
    headings = opened.eval_on_selector_all("h1, h2", "all => all.map((one) => one.tagName)")
    assert headings == ["H1", *["H2"] * 9]  # two of them hidden: trials and the origin, of a log with them
    assert opened.locator("#loss-chart svg.curve polyline").count() == 2
    assert opened.locator("#charts").is_hidden()  # another tab
    assert opened.evaluate("document.documentElement.scrollWidth") <= 1200
    opened.emulate_media(media="print")
    assert opened.locator("#curves").is_visible()
    assert opened.locator("header button").first.is_hidden()
    assert opened.locator(".scroll").evaluate("(one) => getComputedStyle(one).overflowX") == "visible"
    opened.emulate_media(media="screen")
    opened.set_viewport_size({"width": 500, "height": 800})  # the table scrolls by itself, by keys too
    assert opened.evaluate("document.documentElement.scrollWidth") <= 500
    opened.locator(".scroll").focus()
    opened.keyboard.press("ArrowRight")
    wait(opened, "document.querySelector('.scroll').scrollLeft > 0")


def test_it_needs_no_script(browser: Any, tmp_path: Path) -> None:
    page = browser.new_page(java_script_enabled=False)
    page.goto(Path(viz.report(STEPS).render(tmp_path / "r", reload=600)).as_uri())

    assert page.locator("#verdict h2").inner_text() == "Clipping bound too low"
    assert page.locator("tbody tr").count() == 30
    assert page.locator("#curves img").is_visible()
    assert page.locator("#filter, #heat, [role=tab]").first.is_hidden()
    page.close()


@pytest.mark.parametrize("has_script", [True, False])
def test_an_open_page_shows_what_is_new_and_keeps_its_place(browser: Any, tmp_path: Path, has_script: bool) -> None:
    page = browser.new_page(java_script_enabled=has_script, viewport={"width": 1200, "height": 800})
    page.goto(Path(viz.report(STEPS[:25]).render(tmp_path / "r", reload=1)).as_uri())
    assert "Steps 0 to 24." in page.locator(".subtitle").inner_text()
    page.mouse.move(600, 400)
    page.mouse.wheel(0, 300)
    viz.report(STEPS).render(tmp_path / "r")

    page.locator(".subtitle", has_text="Steps 0 to 29.").wait_for(state="attached", timeout=20_000)
    if has_script:
        wait(page, "scrollY === 300")
        assert page.locator("head script").count() == 0  # the last one does not reload
    page.close()


def test_a_page_that_reloads_is_silent(opened: Any, tmp_path: Path) -> None:
    opened.goto(Path(viz.report(STEPS[:25]).render(tmp_path / "r", reload=1)).as_uri())
    viz.report(STEPS).render(tmp_path / "r")
    opened.locator(".subtitle", has_text="Steps 0 to 29.").wait_for(state="attached", timeout=20_000)


@pytest.mark.skipif(MODULES is None, reason="npm packages are not installed: run npm install in tests/page")
@pytest.mark.parametrize("steps", [STEPS, BAD, []])
def test_axe_finds_no_violation(browser: Any, tmp_path: Path, steps: list[Step]) -> None:
    page = browser.new_page(bypass_csp=True, viewport={"width": 900, "height": 800})
    page.goto(Path(viz.report(steps, baseline=STEPS).render(tmp_path / "r")).as_uri())
    assert MODULES is not None
    page.add_script_tag(path=str(MODULES / "axe-core" / "axe.min.js"))
    found = page.evaluate("axe.run().then((result) => result.violations)")
    assert [(one["id"], [node["html"] for node in one["nodes"]]) for one in found] == []
    page.close()
