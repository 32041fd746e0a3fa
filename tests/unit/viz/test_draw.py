"""``draw``: what it is given, what it writes, and what colors say."""

from __future__ import annotations

import math
from pathlib import Path

import pytest
import torch
from torch import nn

import gradrewrite as gr
from gradrewrite import viz
from gradrewrite.diagnostics.run_log import Step, last_run
from gradrewrite.passes import CheckFinite, ClipByGlobalNorm, ClipByNorm, ClipByValue, Observe
from gradrewrite.viz import _graph_view, _metric_colors, _theme

from helpers import mostly_slow
from models.graphs import Three, three_layers


@pytest.mark.parametrize("form", ["svg", "png", "pdf", "dot", "html"])
@pytest.mark.parametrize("view", ["ladder", "overview", "site"])
def test_render_writes_the_file_and_returns_its_path(tmp_path: Path, view: str, form: viz.Format) -> None:
    site = "error:second" if view == "site" else None
    drawing = viz.draw(three_layers(), view, site=site)
    path = drawing.render(tmp_path / "a.b", form)

    assert path == str(tmp_path / f"a.b.{form}")
    starts = {"svg": b"<", "png": b"\x89PNG", "pdf": b"%PDF", "dot": b"digraph", "html": b"<!DOCTYPE html>"}
    assert Path(path).read_bytes().startswith(starts[form])


def test_wrong_arguments(tmp_path: Path) -> None:
    graph = three_layers()
    with pytest.raises(TypeError, match=r"as model\.trace.* got Three"):
        viz.draw(Three())
    with pytest.raises(ValueError, match="view='tree': choose one of 'ladder', 'overview', 'site'"):
        viz.draw(graph, "tree")
    with pytest.raises(ValueError, match="format='gif': choose one of 'svg'"):
        viz.draw(graph).render(tmp_path / "x", "gif")
    with pytest.raises(ValueError, match="hops is a whole number >= 0, got -1"):
        viz.draw(graph, hops=-1)
    with pytest.raises(TypeError, match=r"monitor is a Monitor .* got int"):
        viz.draw(graph, monitor=3)
    with pytest.raises(ValueError, match="color_by='loss': choose one of 'clip rate', 'largest error', 'not finite'"):
        viz.draw(graph, monitor=gr.Monitor(), color_by="loss")
    with pytest.raises(ValueError, match=r"the monitor has no records for that \(it has nothing\)"):
        viz.draw(graph, monitor=gr.Monitor(), color_by="clip rate")
    with pytest.raises(FileNotFoundError):
        viz.draw(graph).render(tmp_path / "missing" / "x")


def trained(policy: gr.Policy, factors: list[float]) -> tuple[gr.RewrittenModule, _graph_view.GraphView]:
    torch.manual_seed(0)
    model = gr.transform(Three(), policy)
    for factor in factors:
        model.zero_grad()
        (model(torch.ones(2, 4)) * factor).backward()
    return model, _graph_view.read_graph(model.trace(torch.ones(2, 4)))


def measured(model: gr.RewrittenModule, graph_view: _graph_view.GraphView) -> dict[str, _metric_colors.SiteMetric]:
    return {one.metric: one for one in _metric_colors.site_metrics(last_run(model.monitor.steps()), graph_view)}


def test_clip_rates_are_those_of_the_clips() -> None:
    policy = [gr.on("error:second", ClipByValue(1e-2, log=True)), gr.on("gradient:*", ClipByGlobalNorm(1.0))]
    model, graph_view = trained(policy, [1e-4, 1e-4, 1e3, 1e-4])
    rates = measured(model, graph_view)["clip rate"]

    assert rates.totals["error:second"] == 0.25
    assert {rates.totals[f"gradient:{n}"] for n, _ in Three().named_parameters()} == {0.25}  # the group's
    assert rates.by_site["error:second"] == {0: 0.0, 1: 0.0, 2: 1.0, 3: 0.0}


def test_the_largest_error_is_that_of_eager_autograd() -> None:
    model, graph_view = trained(gr.on("error:second", Observe("max_abs")), [1.0, 3.0, 2.0])
    torch.manual_seed(0)
    plain = Three()
    seen: list[torch.Tensor] = []

    def watch(_: nn.Module, __: object, output: torch.Tensor) -> None:
        output.register_hook(lambda g: seen.append(g.abs().max()))

    plain.second.register_forward_hook(watch)
    (plain(torch.ones(2, 4)) * 3.0).backward()

    found = measured(model, graph_view)["largest error"]
    assert found.totals["error:second"] == pytest.approx(float(seen[0]), rel=1e-6)


def test_the_share_that_is_not_finite_is_of_the_elements() -> None:
    class Leaky(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return (x * 1.0).sqrt().sum()

    model = gr.transform(Leaky(), gr.on("error:/mul", CheckFinite("record")))
    x = torch.tensor([0.0, 1.0, 4.0, 9.0], requires_grad=True)
    model(x).backward()
    found = measured(model, _graph_view.read_graph(model.trace(x)))["not finite"]

    assert found.totals == {"error:/mul": 0.25}
    assert found.describe(0.25) == "at most 25.000% of the elements not finite"


@pytest.mark.slow
def test_colors_stand_at_the_nodes_of_the_site_and_nowhere_else() -> None:
    model, graph_view = trained(gr.on("error:second", ClipByValue(1e-2, log=True)), [1e3])
    found = _metric_colors.node_colors(graph_view, measured(model, graph_view)["clip rate"])
    (edit,) = graph_view.edits

    assert set(found) == set(edit.nodes)  # the node that holds the error is of the next op
    assert {sample.color for sample in found.values()} == {_metric_colors.palette()[-1]}
    drawing = viz.draw(model.trace(torch.ones(2, 4)), monitor=model.monitor)
    assert drawing.color_by == "clip rate"
    assert drawing._repr_svg_().count(f"fill:{_metric_colors.palette()[-1]}") == len(found) + 1  # and the legend
    assert "clip acted in every step" in drawing._repr_svg_()


@pytest.mark.parametrize(
    ("view", "site"), mostly_slow([("ladder", None), ("overview", None), ("site", "error:second")])
)
def test_every_view_has_colors_and_a_legend(view: str, site: str | None) -> None:
    model, _ = trained(gr.on("error:second", ClipByValue(1e-2, log=True)), [1e3, 1e-9])
    svg = viz.draw(model.trace(torch.ones(2, 4)), view, site=site, monitor=model.monitor)._repr_svg_()

    assert "clip acted in every step" in svg
    assert "clip never acted" in svg
    assert svg.count(_metric_colors.palette()[4]) > 0  # half of the steps


def test_reshaping_ops_are_shown_if_asked_for() -> None:
    graph = three_layers()
    graph_view = _graph_view.read_graph(graph)
    shown = viz.draw(graph, reshapes=True)._repr_svg_()

    assert shown.count("data-node=") == len(graph_view.nodes)
    assert viz.draw(graph)._repr_svg_().count("data-node=") == len(graph_view.nodes) - len(
        _graph_view.hidden_reshapes(graph_view)
    )


def test_scales() -> None:
    steps = [
        Step(n, {"max_abs@error:a": v, "max_abs@error:b": w}) for n, (v, w) in enumerate([(1e-4, 1e2), (1e-1, 1e2)])
    ]
    graph_view = _graph_view.read_graph(three_layers())
    (largest,) = _metric_colors.site_metrics(last_run(steps), graph_view)

    assert [largest.position(v) for v in (1e-4, 1e-1, 1e2)] == pytest.approx([0.0, 0.5, 1.0])
    assert largest.position(0.0) == 0.0
    assert largest.color(math.nan) == largest.color(math.inf) == _theme.NOT_FINITE
    bad = _metric_colors.site_metrics(last_run([Step(0, {"max_abs@error:a": math.nan})]), graph_view)[0]
    assert bad.legend()[-1].text == "NaN or infinite"
    assert math.isnan(bad.totals["error:a"])


@pytest.mark.slow
def test_of_several_clips_at_a_site_any_counts() -> None:
    policy = [
        gr.on("gradient:first.weight", ClipByNorm(1e-9)),
        gr.on("gradient:*", ClipByGlobalNorm(1e9)),
        gr.on("error:second", [ClipByValue(1e-9, log=True), ClipByNorm(1e9)]),
    ]
    model, graph_view = trained(policy, [1.0, 1.0])
    rates = measured(model, graph_view)["clip rate"].totals

    assert rates["gradient:first.weight"] == rates["error:second"] == 1.0
    assert rates["gradient:second.weight"] == 0.0


def test_the_largest_error_is_one_measure_of_what_the_first_clip_met() -> None:
    steps = [Step(0, {"norm@error:a": 9.0, "max_abs@error:b": 3.0, "max_abs.2@error:b": 0.1})]
    (largest,) = _metric_colors.site_metrics(last_run(steps), _graph_view.read_graph(three_layers()))

    assert largest.totals == {"error:b": 3.0}
    assert largest.legend()[0].text == "largest absolute value: 3 or less"


def test_a_share_of_zero_is_no_color() -> None:
    steps = [Step(0, {"nonfinite@error:second": 0.0, "nonfinite@error:third": 1.0})]
    graph_view = _graph_view.read_graph(three_layers())
    (found,) = _metric_colors.site_metrics(last_run(steps), graph_view)

    assert found.color(found.totals["error:second"]) == "#ffffff"
    assert found.color(found.totals["error:third"]) != "#ffffff"
    assert found.legend()[0].text == "all elements finite"


def test_an_edit_without_nodes_is_colored_too() -> None:
    steps = [Step(0, {"max_abs@error:first": 2.0})]
    graph_view = _graph_view.read_graph(three_layers())
    (largest,) = _metric_colors.site_metrics(last_run(steps), graph_view)
    number = next(n for n, e in enumerate(graph_view.edits) if str(e.site) == "error:first")

    assert f"edit {number}" in _metric_colors.node_colors(graph_view, largest)


def test_pdf_does_not_say_when_it_was_made(tmp_path: Path) -> None:
    for view, site in (("overview", None), ("site", "error:second")):
        data = Path(viz.draw(three_layers(), view, site=site).render(tmp_path / "a", "pdf")).read_bytes()
        assert b"/CreationDate (D:19700101" in data or b"/CreationDate" not in data


def test_a_monitor_without_records_colors_nothing() -> None:
    assert viz.draw(three_layers(), monitor=gr.Monitor()).color_by is None


@pytest.mark.slow
def test_the_first_failure_is_found_without_naming_a_site() -> None:
    class Root(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.lin = nn.Linear(4, 4)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return (self.lin(x) * 0.0).sqrt().sum()

    model = gr.transform(Root(), gr.on("error:*/*", CheckFinite("record")))
    x = torch.ones(2, 4)
    model(x).backward()
    graph = model.trace(x)
    drawing = viz.draw(graph, "site", monitor=model.monitor)
    failure = model.monitor.failure()

    assert failure is not None
    assert drawing.site == failure.site
    origins = graph.provenance.origins
    assert {(origins[n].op, origins[n].lane) for n in drawing.root_cause} == {("sqrt", "backward")}
    assert "nonfinite, step 0 = 8" in drawing._repr_svg_()
    # from records alone, as of a file
    assert viz.draw(graph, "site", monitor=model.monitor.steps()).site is not None


def test_of_records_alone_the_first_site_in_the_order_of_execution_counts() -> None:
    steps = [
        Step(0, {"nonfinite@error:first": 0.0, "nonfinite@error:second": 0.0}),
        Step(1, {"nonfinite@error:first": 4.0, "nonfinite@error:second": 4.0}),  # the backward meets second first
        Step(2, {"nonfinite@error:first": 0.0, "nonfinite@error:second": 0.0}),
    ]

    assert str(viz.draw(three_layers(), "site", monitor=steps).site) == "error:second"


@pytest.mark.slow
def test_nothing_failed() -> None:
    model, _ = trained(gr.on("gradient:*", ClipByNorm(1.0)), [1.0])
    with pytest.raises(ValueError, match="nothing non-finite was recorded; give site="):
        viz.draw(model.trace(torch.ones(2, 4)), "site", monitor=model.monitor)


@pytest.mark.slow
def test_the_overview_shows_the_strongest_color_of_a_module() -> None:
    policy = [gr.on("error:second", ClipByValue(1e-9, log=True)), gr.on("error:/tanh#0", ClipByValue(1e9, log=True))]
    model, _ = trained(policy, [1.0])
    diagram = viz.draw(model.trace(torch.ones(2, 4)), "overview", monitor=model.monitor)._diagram
    fills = {item.text: item.fill for item in diagram.items if item.column == "backward" and item.fill}

    assert _metric_colors.palette()[-1] in fills.values()
    assert _metric_colors.palette()[0] in fills.values()
