"""``draw``: what it is given, what it writes, and what colors say."""

from __future__ import annotations

import math
from pathlib import Path
from xml.etree import ElementTree as ET

import pytest
import torch
from torch import nn

import gradrewrite as gr
from gradrewrite import viz
from gradrewrite.diagnostics.clipping import clips_by_edit
from gradrewrite.diagnostics.run_log import Step, last_run
from gradrewrite.passes import L2, CheckFinite, ClipByGlobalNorm, ClipByNorm, ClipByValue, Observe
from gradrewrite.viz import _graph_view, _metric_colors, _theme

from helpers import mostly_slow
from models.graphs import Three, three_layers
from models.small import Lambda


@pytest.mark.long
@pytest.mark.parametrize("form", ["svg", "png", "pdf", "dot", "html"])
@pytest.mark.parametrize("view", ["ladder", "overview"])
def test_render_writes_the_file_and_returns_its_path(tmp_path: Path, view: str, form: viz.Format) -> None:
    drawing = viz.draw(three_layers(), view)
    path = drawing.render(tmp_path / "a.b", form)

    assert path == str(tmp_path / f"a.b.{form}")
    assert drawing.render(path, form) == path  # its extension is there
    starts = {"svg": b"<", "png": b"\x89PNG", "pdf": b"%PDF", "dot": b"digraph", "html": b"<!DOCTYPE html>"}
    assert Path(path).read_bytes().startswith(starts[form])


def test_wrong_arguments(tmp_path: Path) -> None:
    graph = three_layers()
    with pytest.raises(TypeError, match=r"as model\.trace.* got Three"):
        viz.draw(Three())
    with pytest.raises(ValueError, match="view='tree': choose one of 'ladder', 'overview'"):
        viz.draw(graph, "tree")
    with pytest.raises(ValueError, match="format='gif': choose one of 'svg'"):
        viz.draw(graph).render(tmp_path / "x", "gif")
    with pytest.raises(TypeError, match=r"a run is a Monitor, .* got int"):
        viz.draw(graph, monitor=3)
    with pytest.raises(
        ValueError, match="color_by='loss': choose one of 'clip strength', 'largest error', 'not finite'"
    ):
        viz.draw(graph, monitor=gr.Monitor(), color_by="loss")
    with pytest.raises(ValueError, match=r"the monitor has no records for that \(it has nothing\)"):
        viz.draw(graph, monitor=gr.Monitor(), color_by="clip strength")
    (tmp_path / "file").touch()
    with pytest.raises(FileExistsError):
        viz.draw(graph).render(tmp_path / "file" / "x")


def root_of_zero() -> Lambda:
    """The backward of a square root of zero is not finite."""
    return Lambda(lambda net, x: (net.lin(x) * 0.0).sqrt().sum(), lin=nn.Linear(4, 4))


def trained(policy: gr.Policy, factors: list[float]) -> tuple[gr.RewrittenModule, _graph_view.GraphView]:
    torch.manual_seed(0)
    model = gr.transform(Three(), policy)
    for factor in factors:
        model.zero_grad()
        (model(torch.ones(2, 4)) * factor).backward()
    return model, _graph_view.read_graph(model.trace(torch.ones(2, 4)))


def measured(model: gr.RewrittenModule, graph_view: _graph_view.GraphView) -> dict[str, _metric_colors.SiteMetric]:
    return {one.metric: one for one in _metric_colors.site_metrics(last_run(model.monitor.steps()), graph_view)}


@pytest.mark.broad
def test_clip_strengths_are_those_of_the_clips() -> None:
    policy = [gr.on("error:second", ClipByValue(1e-2, log=True)), gr.on("gradient:*", ClipByGlobalNorm(1.0))]
    model, graph_view = trained(policy, [1e-4, 1e-4, 1e3, 1e-4])
    strengths = measured(model, graph_view)["clip strength"]

    (factor,) = {
        f for site, f in strengths.totals.items() if str(graph_view.edits[int(site[5:])].site) != "error:second"
    }
    assert factor == min(model.monitor.history("factor@group:default")) < 1.0  # those of gradients have the group's
    first = next(n for n, edit in enumerate(graph_view.edits) if str(edit.site) == "error:second")
    assert [v < 1.0 for v in strengths.by_site[f"edit {first}"].values()] == [False, False, True, False]


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
    assert found.describe(0.25) == "largest share of elements not finite: 0.25"


def fills_of(svg: str, site: str) -> list[str | None]:
    """Colors of the boxes of the edits at a site."""
    groups = ET.fromstring(svg).iter("{http://www.w3.org/2000/svg}g")
    return [group[1].get("style") for group in groups if group.get("data-edit") == site and len(group) > 1]


@pytest.mark.long
def test_rate_and_factor_stand_in_the_box_of_the_edit_and_its_color_is_the_legend_s() -> None:
    model, graph_view = trained(gr.on("gradient:second.weight", ClipByNorm(1e-2)), [1e3, 1e-9, 1e3, 1e3])
    norms = model.monitor.history("norm@gradient:second.weight")
    drawing = viz.draw(model.trace(torch.ones(2, 4)), monitor=model.monitor)
    (clip,) = clips_by_edit(last_run(model.monitor.steps()), graph_view.edits).values()

    assert clip.rate == 0.75
    assert clip.median_factor == pytest.approx(1e-2 / norms[0], rel=1e-5)
    assert clip.factors[1] == 1.0
    assert drawing.color_by == "clip strength"
    svg = drawing._repr_svg_()
    assert f"gradient:second.weight \u00b7 75 % \u00b7 \u00d7{1e-2 / norms[0]:.2g}" in svg
    assert fills_of(svg, "gradient:second.weight") == [f"fill:{_theme.palette()[-1]}"]
    assert "acted in 75.0% of 4 steps" in svg


@pytest.mark.slow
def test_a_box_has_the_figures_of_its_own_records() -> None:
    policy = [
        gr.on("error:second", [ClipByValue(0.5), ClipByValue(1e-2, log=True)]),
        gr.on("gradient:second.weight", [L2(1e-4), ClipByValue(1e-3, log=True), ClipByNorm(1e-4), ClipByNorm(1e9)]),
        gr.on("gradient:first.weight", ClipByGlobalNorm(1e-6, group="a")),
        gr.on("gradient:first.bias", ClipByGlobalNorm(1e9, group="b")),
    ]
    model, graph_view = trained(policy, [1e2, 1e2])
    clips = clips_by_edit(last_run(model.monitor.steps()), graph_view.edits)
    rates = {e.text: clips[n].rate for n, e in enumerate(graph_view.edits) if n in clips}

    assert rates == {
        "ClipByValue(0.01, log=True)": 1.0,
        "ClipByValue(0.001, log=True)": 1.0,
        "ClipByNorm(0.0001)": 1.0,
        "ClipByNorm(1000000000.0)": 0.0,
        "ClipByGlobalNorm(1e-06, group='a')": 1.0,
        "ClipByGlobalNorm(1000000000.0, group='b')": 0.0,
    }
    for number, clip in clips.items():
        assert clip.key in graph_view.edits[number].records


def test_a_step_graph_shows_the_records_of_the_step() -> None:
    model = gr.transform(Three(), [gr.on("step:*", ClipByGlobalNorm(0.2)), gr.on("gradient:*", ClipByGlobalNorm(1e9))])
    optimizer = gr.guard(torch.optim.SGD(model.parameters(), lr=0.1), model)
    for _ in range(2):
        (model(torch.ones(2, 4)) * 100).backward()
        optimizer.step()
    graph = model.trace_step(optimizer)
    svg = viz.draw(graph, monitor=model.monitor)._repr_svg_()

    assert "step:first.weight \u00b7 100 %" in svg


def test_non_finite_colors_are_in_the_legend_and_other_runs_color_nothing() -> None:
    steps = [Step(n, {"max_abs@error:second": v}) for n, v in enumerate([2.0, math.nan, 1.0])]
    graph = three_layers()
    texts = [entry.text for entry in viz.draw(graph, monitor=steps)._scene().legend]

    assert "NaN or infinite" in texts
    assert viz.draw(graph, monitor=[Step(0, {"max_abs@error:elsewhere": 1.0})]).color_by is None


def test_a_small_difference_is_no_other_color() -> None:
    steps = [Step(0, {"max_abs@error:first": 1.0, "max_abs@error:second": 1.05})]
    (largest,) = _metric_colors.site_metrics(last_run(steps), _graph_view.read_graph(three_layers()))

    assert largest.color(1.0) == largest.color(1.05)
    assert largest.color(0.5) == largest.color(1.0) != largest.color(3.0) != largest.color(9.0) == largest.color(50.0)


@pytest.mark.broad
@pytest.mark.parametrize("view", mostly_slow(["ladder", "overview"]))
def test_every_view_has_colors_and_a_legend(view: str) -> None:
    model, _ = trained(gr.on("error:second", ClipByValue(1e-2, log=True)), [1e3, 1e-9])
    graph = model.trace(torch.ones(2, 4))
    svg = viz.draw(graph, view, monitor=model.monitor, color_by="clip strength")._repr_svg_()

    assert "median factor: 1<" in svg
    assert "median factor: 0.01 (logarithmic between)" in svg
    assert fills_of(svg, "error:second") == [f"fill:{_theme.palette()[-1]}"]
    assert "error:second \u00b7 50 %" in svg


def test_what_is_hidden_is_shown_if_asked_for() -> None:
    graph = three_layers()
    graph_view = _graph_view.read_graph(graph)
    everything = viz.draw(graph, reshapes=True, records=True)._repr_svg_()

    assert sum(everything.count(f'data-node="{name}"') for name in graph_view.nodes) == len(graph_view.nodes)
    plain = viz.draw(graph)._repr_svg_()
    hidden = _graph_view.hidden_nodes(graph_view)
    in_edits = {name for edit in graph.edits for name in edit.nodes}
    for name, node in graph_view.nodes.items():
        assert plain.count(f'data-node="{name}"') == int(name not in hidden or name in in_edits)
        assert (name in hidden) >= (node.mark == "records" or (node.reshapes and not node.mark))
    (clip,) = [edit for edit in graph.edits if edit.text.startswith("ClipByValue")]
    assert [name for name in clip.nodes if name not in hidden] == ["clamp_min", "clamp_max"]  # the rest only logs


def test_scales() -> None:
    steps = [
        Step(n, {"max_abs@error:first": v, "max_abs@error:second": w})
        for n, (v, w) in enumerate([(1e-4, 1e2), (1e-1, 1e2)])
    ]
    graph_view = _graph_view.read_graph(three_layers())
    (largest,) = _metric_colors.site_metrics(last_run(steps), graph_view)

    assert [largest.scale.position(v) for v in (1e-4, 1e-1, 1e2)] == pytest.approx([0.0, 0.5, 1.0])
    assert largest.scale.position(0.0) == 0.0
    assert largest.color(math.nan) == largest.color(math.inf) == _theme.NOT_FINITE
    bad = _metric_colors.site_metrics(last_run([Step(0, {"max_abs@error:first": math.nan})]), graph_view)[0]
    assert bad.legend()[-1].text == "NaN or infinite"
    assert math.isnan(bad.totals["error:first"])


@pytest.mark.slow
def test_several_clips_at_a_site_have_strengths_of_their_own() -> None:
    policy = [
        gr.on("gradient:first.weight", ClipByNorm(1e-9)),
        gr.on("gradient:*", ClipByGlobalNorm(1e9)),
        gr.on("error:second", [ClipByValue(1e-9, log=True), ClipByNorm(1e9)]),
    ]
    model, graph_view = trained(policy, [1.0, 1.0])
    factors = measured(model, graph_view)["clip strength"].totals
    of = {(str(e.site), type(e.action).__name__): factors[f"edit {n}"] for n, e in enumerate(graph_view.edits)}

    assert max(of["gradient:first.weight", "ClipByNorm"], of["error:second", "ClipByValue"]) < 1.0
    assert of["gradient:first.weight", "ClipByGlobalNorm"] == of["error:second", "ClipByNorm"] == 1.0


def test_the_largest_error_is_one_measure_of_what_the_first_clip_met() -> None:
    steps = [Step(0, {"norm@error:first": 9.0, "max_abs@error:second": 3.0, "max_abs.2@error:second": 0.1})]
    (largest,) = _metric_colors.site_metrics(last_run(steps), _graph_view.read_graph(three_layers()))

    assert largest.totals == {"error:second": 3.0}
    assert largest.legend()[0].text == "largest absolute value: 3"


def test_a_share_of_zero_is_no_color() -> None:
    steps = [Step(0, {"nonfinite@error:second": 0.0, "nonfinite@error:third": 1.0})]
    graph_view = _graph_view.read_graph(three_layers())
    (found,) = _metric_colors.site_metrics(last_run(steps), graph_view)

    assert found.color(found.totals["error:second"]) == "#ffffff"
    assert found.color(found.totals["error:third"]) != "#ffffff"
    assert found.legend()[0].text == "largest share of elements not finite: 0"


def test_an_edit_without_nodes_is_colored_too() -> None:
    steps = [Step(0, {"max_abs@error:first": 2.0})]
    drawing = viz.draw(three_layers(), monitor=steps)
    number = next(n for n, e in enumerate(three_layers().edits) if str(e.site) == "error:first")
    (largest,) = _metric_colors.site_metrics(last_run(steps), drawing._view)

    assert f"edit {number}" in _metric_colors.box_colors(drawing._ladder.ladder, largest)


@pytest.mark.long
def test_pdf_does_not_say_when_it_was_made(tmp_path: Path) -> None:
    for view in ("overview", "ladder"):
        data = Path(viz.draw(three_layers(), view).render(tmp_path / "a", "pdf")).read_bytes()
        assert b"/CreationDate (D:19700101" in data or b"/CreationDate" not in data


def test_a_monitor_without_records_colors_nothing() -> None:
    assert viz.draw(three_layers(), monitor=gr.Monitor()).color_by is None


@pytest.mark.slow
def test_the_root_cause_of_the_first_failure_is_known() -> None:
    model = gr.transform(root_of_zero(), gr.on("error:*/*", CheckFinite("record")))
    x = torch.ones(2, 4)
    model(x).backward()
    graph = model.trace(x)
    drawing = viz.draw(graph, monitor=model.monitor)

    origins = graph.provenance.origins
    assert {(origins[n].op, origins[n].lane) for n in drawing.root_cause} == {("sqrt", "backward")}


def test_reprs_are_short_and_html_is_the_page() -> None:
    graph = three_layers()

    nodes = len(_graph_view.read_graph(graph).nodes)
    assert repr(graph) == f"<JointGraph of Three: {len(graph.sites)} sites, {len(graph.edits)} edits, {nodes} nodes>"
    assert len(repr(viz.draw(graph))) < 120
    assert viz.draw(graph).title == "Three"
    for shown in (graph, viz.draw(graph)):
        text = shown._repr_html_()
        assert text.startswith('<iframe title="Three"')
        assert "&lt;!DOCTYPE html&gt;" in text


@pytest.mark.slow
def test_the_op_at_fault_is_marked_in_every_view() -> None:
    model = gr.transform(root_of_zero(), gr.on("error:*/*", CheckFinite("record")))
    model(torch.ones(2, 4)).backward()
    graph = model.trace(torch.ones(2, 4))
    for view in ("ladder", "overview"):
        svg = viz.draw(graph, view, monitor=model.monitor)._repr_svg_()
        assert svg.count("root_cause") - svg.count(".root_cause") >= 1
    assert 'node backward root_cause"' in viz.draw(graph, monitor=model.monitor)._bytes("html").decode()
