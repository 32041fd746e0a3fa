"""Norms on boxes: their values, bars and strips, and the blocks that differ."""

from __future__ import annotations

import copy
import math

import pytest
import torch
from torch import Tensor, nn

import gradrewrite as gr
from gradrewrite import viz
from gradrewrite.diagnostics.run_log import last_run
from gradrewrite.passes import CheckFinite, ClipByNorm, Observe
from gradrewrite.viz import _norms, _overview, _theme
from gradrewrite.viz._graph_view import read_graph
from gradrewrite.viz._norms import Cell, differing

from models.clips import step_of
from models.graphs import recurrent, three_layers


class Blocks(nn.Module):
    """Twelve equal blocks, two of which multiply what flows back by forty."""

    def __init__(self, bad: tuple[int, ...] = (3, 8)) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 8)) for _ in range(12))
        self.head = nn.Linear(8, 1)
        with torch.no_grad():
            for number, block in enumerate(self.blocks):
                for layer in (block[0], block[2]):
                    layer.weight.copy_(torch.linalg.qr(torch.randn(8, 8))[0])
                    layer.weight.mul_(1.3 * (6 if number in bad else 1))
                block[2].bias.zero_()

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x) * 1e-3  # keeps tanh where it is linear
        return self.head(x).sum()


class Loops(nn.Module):
    """A loop written in the root module, of ops alone."""

    def __init__(self) -> None:
        super().__init__()
        self.w = nn.Parameter(torch.eye(4))

    def forward(self, x: Tensor) -> Tensor:
        x = x.exp()
        for _ in range(9):
            x = torch.tanh(x @ self.w)
        return x.sum()


def observed(model: nn.Module, x: Tensor) -> tuple[gr.RewrittenModule, gr.JointGraph]:
    rewritten = gr.transform(model, lambda site: [Observe("norm")] if site.kind == "error" else None)
    rewritten(x).backward()
    return rewritten, rewritten.trace(x)


def rows_of(graph: gr.JointGraph, monitor: gr.Monitor | None = None) -> list[str]:
    ladder = viz.draw(graph, "overview", monitor=monitor)._overview.ladder
    return [part.text for row in ladder.rows for part in row if part.column == "forward"]


@pytest.mark.pure
@pytest.mark.parametrize(
    ("blocks", "wanted"),
    [
        ([[1.0], [1.0], [1.0], [1.0]], set()),
        ([[64.0], [16.0], [4.0], [1.0]], set()),  # steady growth
        ([[50.0], [50.0], [1.0], [1.0], [1.0]], {2}),  # through the third
        ([[1.0], [0.001], [1.0], [1.0], [1.0]], {1, 2}),
        ([[1.0, 1.0], [1.0, 9.0, 1.0], [1.0, 1.0], [1.0, 1.0]], {1}),  # inside
        ([[1.0], [math.inf], [1.0], [1.0]], {1}),
        ([[math.inf], [math.inf], [math.inf], [1.0]], set()),  # most of them: the rule
        ([[], [1.0], []], set()),
    ],
)
def test_blocks_that_change_the_size_unlike_their_siblings(blocks: list[list[float]], wanted: set[int]) -> None:
    assert differing(blocks) == wanted


@pytest.mark.broad
def test_bad_blocks_are_unfolded() -> None:
    model, graph = observed(Blocks(), torch.full((2, 8), 0.1))
    plain, seen = rows_of(graph), rows_of(graph, model.monitor)

    assert not [text for text in plain if text.startswith(("blocks.3", "blocks.8"))]
    assert [text for text in seen if text.startswith(("blocks.3", "blocks.8"))]
    assert not [text for text in seen if text.startswith(("blocks.2.", "blocks.6.", "blocks.11."))]
    assert len(seen) <= _overview.MOST


@pytest.mark.broad
def test_healthy_blocks_stay_folded() -> None:
    model, graph = observed(Blocks(bad=()), torch.full((2, 8), 0.1))

    assert rows_of(graph, model.monitor) == rows_of(graph)


def test_a_loop_of_ops_in_the_root_folds() -> None:
    graph = gr.transform(Loops(), []).trace(torch.ones(2, 4))
    bands = viz.draw(graph)._ladder.ladder.bands

    assert "/matmul, tanh x 9" in rows_of(graph)
    assert [band.name.partition(" (")[0] for band in bands if band.depth == 0] == ["loop x 9"]
    assert len([band for band in bands if band.depth == 1]) == 9


def test_bars_are_the_norms_of_eager_autograd() -> None:
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 1))
    x = torch.randn(5, 3)
    plain = copy.deepcopy(net)
    model = gr.transform(net, gr.on("error:*", [Observe("norm"), ClipByNorm(100.0)]))
    model(x).sum().backward()
    drawing = viz.draw(model.trace(x), monitor=model.monitor)
    seen: list[Tensor] = []
    plain[0].register_forward_hook(lambda module, args, output: output.register_hook(seen.append) and None)
    plain(x).sum().backward()
    norms = _norms.norms_of(last_run(model.monitor.steps()), drawing._view)

    assert norms is not None
    assert norms.value(["error:0"], 0) == pytest.approx(float(seen[0].norm()), rel=1e-6)
    assert norms.bounds == {"error:0": 100.0, "error:1": 100.0, "error:2": 100.0}
    texts = [part.small for part in drawing._scene().boxes if part.marks]
    assert f"0 \u00b7 norm {float(seen[0].norm()):.3g}" in texts


def test_values_without_data_are_grey_and_only_nan_is_red() -> None:
    second = [1.0, 1.0, 1.0, math.nan]
    steps = [step_of(n, {"norm@error:first": 10.0**n, "norm@error:second": value}) for n, value in enumerate(second)]
    norms = _norms.norms_of(last_run(steps), read_graph(three_layers()))
    assert norms is not None

    assert (norms.start, norms.now) == (0, 2)  # step 3 is not finite
    assert norms.value(["error:first"], norms.now) == 100.0
    assert norms.value(["error:second"], 3) == math.inf
    assert norms.value(["error:third"], norms.now) is None
    cells = [Cell(name, (f"error:{name}",)) for name in ("first", "second", "third")]
    colors = [mark.color for mark in norms.marks(cells, 36.0, 230.0)]
    scale = _theme.palette()
    assert colors == [scale[-1], scale[0], _theme.NO_DATA]  # from 1 to 100, the largest until step 2
    assert norms.color(math.inf) == _theme.NOT_FINITE


def test_errors_count_before_gradients() -> None:
    records = {"norm@error:second": 2.0, "norm@gradient:second.weight": 50.0, "norm@gradient:third.weight": 3.0}
    norms = _norms.norms_of(last_run([step_of(0, records)]), read_graph(three_layers()))
    assert norms is not None

    assert norms.value(["gradient:second.weight", "error:second"], 0) == 2.0
    assert norms.value(["gradient:third.weight"], 0) == 3.0


@pytest.mark.broad
def test_a_folded_recurrence_has_a_cell_a_call() -> None:
    graph = recurrent()
    sites = [str(site) for site in graph.sites if site.kind == "error" and "step" in site.output_of]
    steps = [step_of(0, {f"norm@{site}": 1.5**n for n, site in enumerate(sites)})]
    drawing = viz.draw(graph, "overview", monitor=steps)
    strips = [box for box in drawing._scene().boxes if len(box.marks) > 3]

    assert len(strips) == 1
    assert len(strips[0].marks) == 40
    assert "norm 1 to " in strips[0].small
    assert len({mark.color for mark in strips[0].marks}) == _theme.STOPS


def test_an_observed_op_is_no_edit_in_the_picture_and_a_clip_that_never_acts_is_calm() -> None:
    net = nn.Sequential(nn.Linear(3, 4), nn.Linear(4, 1))
    clips = [ClipByNorm(1e9), CheckFinite("record")]
    model = gr.transform(net, [gr.on("error:0", Observe("norm")), gr.on("gradient:1.weight", clips)])
    model(torch.ones(2, 3)).sum().backward()
    graph = model.trace(torch.ones(2, 3))
    boxes = [box for box in viz.draw(graph, monitor=model.monitor)._scene().boxes if "inserted" in box.classes]

    assert len(graph.edits) == 3
    assert [box.text for box in boxes] == ["ClipByNorm(1000000000.0)", "CheckFinite(on_failure='record')"]
    assert all("idle" in box.classes for box in boxes)
    bad = [step_of(0, {"nonfinite@gradient:1.weight": 1.0})]
    assert not [box for box in viz.draw(graph, monitor=bad)._scene().boxes if "idle" in box.classes]
    assert "Observe('norm') at error:0" in viz.draw(graph)._repr_svg_()
