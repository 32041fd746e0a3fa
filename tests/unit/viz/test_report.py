"""The health report as a page."""

from __future__ import annotations

import math
import re
from html.parser import HTMLParser
from pathlib import Path

import pytest
import torch
from torch import nn

import gradrewrite as gr
from gradrewrite import Step, viz
from gradrewrite.diagnostics.trials import Trial
from gradrewrite.passes import CheckFinite, ClipByNorm

from models.clips import step_of
from models.small import Lambda

RECORDS = {"norm@error:layers.1": 4.0, "bound@error:layers.1": 1.0, "norm@error:layers.0": 0.5, "loss@run": 2.0}
STEPS = [step_of(n, RECORDS) for n in range(30)]


class Page(HTMLParser):
    """Elements of a page with their attributes, and their texts."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.elements: list[tuple[str, dict[str, str | None]]] = []
        self.texts: list[str] = []
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.elements.append((tag, dict(attrs)))

    def handle_data(self, data: str) -> None:
        self.texts.append(data)

    def count(self, tag: str) -> int:
        return sum(name == tag for name, _ in self.elements)


def page_of(report: viz.Report, folder: Path, *, reload: int = 0) -> Page:
    path = report.render(folder / "report", reload=reload)
    assert path == str(folder / "report.html")
    return Page(Path(path).read_text(encoding="utf-8"))


@pytest.mark.pure
def test_the_verdict_comes_first(tmp_path: Path) -> None:
    report = viz.report(STEPS, title="<run> & co")
    page = page_of(report, tmp_path)
    body = " ".join(" ".join(page.texts).split())

    assert repr(report) == "Report('<run> & co': Clipping bound too low)"
    assert (
        body.index("<run> & co") < body.index(report.health.verdict.headline) < body.index(report.health.verdict.text)
    )
    assert body.index(report.health.verdict.text) < body.index("Loss and norm")
    assert 'gr.on("error:layers.1", ClipByNorm(4))' in body
    assert page.count("h1") == 1
    assert page.count("table") == page.count("caption") == 1
    (image,) = [attributes for tag, attributes in page.elements if tag == "img"]  # for readers without scripts
    assert image["alt"] == f"loss and norm by step. {report.health.loss}"
    assert [a["id"] for _, a in page.elements if a.get("role") == "tab"] == ["tab-report", "tab-curves"]


@pytest.mark.pure
def test_a_healthy_run_has_no_bound_to_try(tmp_path: Path) -> None:
    falls = [step_of(s.step, s.records | {"loss@run": 4.0 - s.step / 10}) for s in STEPS]
    page = page_of(viz.report(falls), tmp_path)

    assert "Healthy" in page.texts
    assert "keep" in page.texts
    assert not any("gr.on(" in text for text in page.texts if not text.startswith(("gr.on(...)", '"use strict"')))


@pytest.mark.pure
def test_the_page_loads_nothing(tmp_path: Path) -> None:
    page = page_of(viz.report(STEPS), tmp_path)
    (policy,) = [a["content"] for tag, a in page.elements if a.get("http-equiv") == "Content-Security-Policy"]

    assert policy == "default-src 'none'; style-src 'unsafe-inline'; script-src 'unsafe-inline'; img-src data:"
    assert page.count("script") == 2  # the data, and the code
    loaded = [value for _, a in page.elements for name, value in a.items() if name in ("src", "href")]
    assert all(str(value).startswith("data:") for value in loaded)
    assert not any(re.search(r"\{\{\w+\}\}", text) for text in page.texts)


@pytest.mark.pure
def test_the_page_reloads_where_it_is_asked_to(tmp_path: Path) -> None:
    page = page_of(viz.report(STEPS), tmp_path, reload=3)

    assert page.count("script") == 3
    assert any("setTimeout(() => location.reload(), 3000)" in text for text in page.texts)


@pytest.mark.pure
def test_baseline_and_a_value_that_is_not_finite(tmp_path: Path) -> None:
    bad = [*STEPS, step_of(30, {"norm@error:layers.1": math.nan, "nonfinite@error:layers.1": 3.0})]
    page = page_of(viz.report(bad, baseline=STEPS), tmp_path)
    body = " ".join(page.texts)

    assert "Values are not finite" in body
    assert "First at error:layers.1 in step 30, 3 elements." in body
    assert "They end alike" in body
    assert "compared with baseline" in body


@pytest.mark.pure
def test_an_empty_run(tmp_path: Path) -> None:
    page = page_of(viz.report([]), tmp_path)

    assert "Nothing to judge" in page.texts


@pytest.mark.pure
def test_more_code_than_fits_beside_the_verdict(tmp_path: Path) -> None:
    sites = [f"error:layers.{n}" for n in range(25)]
    records = {f"norm@{site}": 4.0 for site in sites} | {f"bound@{site}": 1.0 for site in sites}
    page = page_of(viz.report([step_of(n, records) for n in range(30)]), tmp_path)

    assert any(text.endswith("# 5 more in the table") for text in page.texts)
    assert sum(text.startswith('gr.on("error:layers.') for text in page.texts) == 26


@pytest.mark.pure
def test_the_page_explains_its_words(tmp_path: Path) -> None:
    body = " ".join("".join(page_of(viz.report(STEPS), tmp_path).texts).split())

    assert "step:group:default is all gradients together, as the optimizer gets them." in body
    assert "given to gr.transform(model, policy), in place of the rule that clips there now; gr is import" in body
    assert "A dash: nothing to tell." in body
    assert "Factor: the size after the clip over the size before it" in body


@pytest.mark.pure
def test_the_column_of_shares_is_left_out_where_no_site_has_one(tmp_path: Path) -> None:
    shares = [step_of(s.step, s.records | {"norm_share@gradient:w": 0.5}) for s in STEPS]

    assert "share" not in page_of(viz.report(STEPS), tmp_path).texts
    page = page_of(viz.report(shares), tmp_path)
    assert "share" in page.texts
    assert "50 % of the squared total norm" in page.texts


@pytest.mark.pure
@pytest.mark.parametrize("loss", [1e308, 1e300, -1e308])
def test_losses_near_the_largest_number_are_drawn(tmp_path: Path, loss: float) -> None:
    for low in (-loss, 1.0):
        steps = [step_of(n, {"loss@run": low if n % 2 else loss, "norm@error:a": 1.0}) for n in range(30)]
        assert page_of(viz.report(steps), tmp_path).count("img") == 1


@pytest.mark.pure
def test_names_are_text(tmp_path: Path) -> None:
    name = "a<b>\x00&'"
    page = page_of(viz.report([step_of(n, {f"norm@error:{name}": 1.0}) for n in range(3)]), tmp_path)

    assert page.count("b") == 0
    assert not any("\0" in text for text in page.texts)
    assert any("a<b>" in text for text in page.texts)


@pytest.mark.broad
@pytest.mark.pure
def test_it_is_written_at_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    report = viz.report(STEPS)
    path = Path(report.render(tmp_path / "r"))
    before = path.read_bytes()
    assert Path(report.render(tmp_path / "r")).read_bytes() == before  # equal runs give equal bytes
    assert [file.name for file in tmp_path.iterdir()] == ["r.html"]
    with pytest.raises(OSError, match="exists"):
        report.render(tmp_path / "r.html" / "r")


@pytest.mark.pure
def test_a_notebook_shows_the_page_in_a_frame() -> None:
    (frame,) = re.findall(r'srcdoc="([^"]*)"', viz.report(STEPS)._repr_html_())
    assert "Clipping bound too low" in frame


def test_a_monitor_that_can_replay_names_the_op() -> None:

    net = Lambda(lambda net, x: net.first(x).sub(net.first(x)).sqrt().sum(), first=nn.Linear(2, 2))
    model = gr.transform(net, [gr.on("gradient:*", [CheckFinite("record"), ClipByNorm(1.0)])])
    model(torch.ones(2, 2)).backward()

    report = viz.report(model.monitor)
    assert report.health.verdict.kind == "non-finite op"
    assert "sqrt" in report.cause
    assert viz.report(model.monitor.steps()).cause == ""


def test_trials_are_lines_of_text_beside_the_curves(tmp_path: Path) -> None:
    losses = [2.0, 1.5, math.nan]
    trials = {"as it is": Trial(losses, is_bad=True), "<b>clip</b>": Trial(losses, is_bad=True)}
    health = viz.report([Step(n, {"norm@gradient:w": 1.0}) for n in range(3)]).health
    page = Path(viz.Report(health, "diagnosis", trials=trials).render(tmp_path / "page")).read_text(encoding="utf-8")

    _, report, curves = page.split('role="tabpanel"')[:3]
    for part in (report, curves):
        assert "as it is: 3 steps; loss 2 -&gt; NaN" in part
        assert "&lt;b&gt;clip&lt;/b&gt;: 3 steps" in part
        assert "stops in step 2, as without it: a clip does not mend NaN" in part
    assert "<b>clip</b>: 3" not in page
