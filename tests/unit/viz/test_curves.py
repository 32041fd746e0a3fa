"""``viz.plot``: a run in a picture."""

from __future__ import annotations

import copy
import math
import subprocess
import sys
from collections.abc import Mapping, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

import matplotlib
import numpy as np
import pytest
import torch
from matplotlib.backends.backend_agg import FigureCanvasAgg
from torch import nn

import gradrewrite as gr
from gradrewrite import viz
from gradrewrite.diagnostics.run_log import Run, Step, last_run
from gradrewrite.passes import CheckFinite, ClipByGlobalNorm, ClipByValue, Observe
from gradrewrite.viz import _curve_data
from gradrewrite.viz._fonts import displayable
from gradrewrite.viz._heat import factor_map, heat_map
from gradrewrite.viz._panels import colors_of

from models.clips import step_of

NAN, INF = math.nan, math.inf


def run_of(*rows: Mapping[str, float], first: int = 0) -> Run:
    return last_run([step_of(first + n, row) for n, row in enumerate(rows)])


@pytest.mark.pure
def test_events_are_marked_in_all_other_panels() -> None:
    rows = [{"loss@run": 1.0, "norm@gradient:w": NAN if n in (3, 4, 5, 9) else 1.0} for n in range(12)]
    curves = viz.plot([step_of(n, row) for n, row in enumerate(rows)])
    assert curves.panels == ("loss", "gradient norm", "non-finite")
    by_panel = [[a for a in ax.get_children() if a.get_gid() == "event"] for ax in curves.figure().axes[:3]]
    lines = [[a.get_xdata()[0] for a in found if hasattr(a, "get_xdata")] for found in by_panel]
    assert lines == [[3, 9], [3, 9], []]
    assert [len(found) for found in by_panel] == [3, 3, 0]  # and a band over steps 3 to 5


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(3, 3), nn.Linear(3, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return gr.tap(self.second(self.first(x).tanh()).square().mean(), "loss")


@pytest.mark.slow
def test_a_real_run_equals_eager_training(tmp_path: Path) -> None:
    plain = Net()
    watch = gr.on("gradient:*", [CheckFinite("skip"), Observe("norm"), ClipByGlobalNorm(0.5)])
    model = gr.transform(copy.deepcopy(plain), [watch, gr.on("error:first", ClipByValue(1e-2, log=True))])
    optimizer = gr.guard(torch.optim.SGD(model.parameters(), lr=0.0), model, update_ratios=True)
    xs = [torch.full((2, 3), NAN) if n == 4 else torch.randn(2, 3) for n in range(8)]
    norms, largest = [], []
    for x in xs:
        optimizer.zero_grad()
        loss = model(x)
        loss.backward()
        model.monitor.log("loss", loss)
        optimizer.step()
        plain.zero_grad()
        errors: list[torch.Tensor] = []
        hidden = plain.first(x)
        hidden.register_hook(errors.append)
        plain.second(hidden.tanh()).square().mean().backward()
        largest.append(float(errors[0].abs().max()))
        assert plain.second.weight.grad is not None
        norms.append(float(plain.second.weight.grad.norm()))
    curves = viz.plot(model.monitor)
    heat = heat_map(curves.run, "gradient")
    total, bound = _curve_data.total_norms(curves.run)

    assert heat is not None
    row = heat.values[heat.rows.index("second.weight")]
    want = np.where(np.isnan(norms), INF, norms)
    np.testing.assert_allclose(row, want, rtol=1e-4)
    np.testing.assert_array_equal(bound.values, [0.5] * 8)
    factors = factor_map(curves.run)
    assert factors is not None
    shown = factors.values[factors.rows.index("group:default")]
    np.testing.assert_allclose(shown, [min(1.0, 0.5 / n) if n < INF else INF for n in total.values], rtol=1e-4)
    acted = factors.values[factors.rows.index("error:first")] < 1.0
    np.testing.assert_array_equal(acted, [1e-2 < n for n in largest])
    seen = _curve_data.events(curves.run)
    assert (seen.steps.tolist(), seen.skipped.tolist()) == ([4], [4])
    assert curves.panels == (
        "loss",
        "total norm, bound",
        "gradient norm",
        "error norm",
        "factor",
        "non-finite",
        "update ratio",
    )
    model.monitor.to_jsonl(tmp_path / "run.jsonl")
    again = viz.plot(str(tmp_path / "run.jsonl"), title="training run")
    assert (
        Path(again.render(tmp_path / "b", "svg")).read_bytes()
        == Path(curves.render(tmp_path / "a", "svg")).read_bytes()
    )


@pytest.mark.pure
def test_last_run_of_a_file() -> None:
    steps = [step_of(0, {"loss@run": 9.0}), step_of(1, {"loss@run": 9.0}), step_of(0, {"loss@run": 1.0})]
    curves = viz.plot(steps)

    assert curves.run.steps == steps[2:]
    heading = curves.figure().get_suptitle()
    assert heading == "training run\nsteps 0 to 0, 1 row; the last of 2 runs in the file"
    ax = curves.figure().axes[0]
    left, right = ax.get_xlim()
    assert [tick for tick in ax.get_xticks() if left <= tick <= right] == [0.0]


def everything(names: Sequence[str]) -> list[Step]:
    kinds = {"norm@gradient:": 1.0, "max_abs@error:": 0.0, "clipped@error:": 1.0, "update_ratio@gradient:": INF}
    row = {f"{head}{name}": value for name in names for head, value in kinds.items()}
    row |= {f"norm@error:{name}": NAN for name in names} | {"loss@run": 1.0, "skipped@optimizer:0": 1.0}
    return [step_of(n, row) for n in range(3)]


STRANGE = [
    "$\\bad$",
    r"\frac{1}{0}",
    "\u4f60\u597d",
    "\U0001f600",
    "tab\tline\n",
    "x" * 300,
    "_hidden",
    "e\u0301",
    "\u202e",
]


@pytest.mark.parametrize("format", ["png", "svg", "pdf"])
@pytest.mark.slow
def test_strange_names_and_equal_bytes(tmp_path: Path, format: Any) -> None:
    before = dict(matplotlib.rcParams)
    curves = viz.plot(everything(STRANGE), title=r"$\bad$ \u4f60 \U0001f600" + "\u4f60" * 200)
    first, second = (curves.render(tmp_path / name, format) for name in ("a", "b.c"))

    assert (first, second) == (str(tmp_path / f"a.{format}"), str(tmp_path / f"b.c.{format}"))
    assert Path(first).read_bytes() == Path(second).read_bytes()
    assert dict(matplotlib.rcParams) == before


@pytest.mark.pure
def test_legible() -> None:
    assert displayable("decoder.0", 20) == "decoder.0"
    assert displayable("\u4f60$\n", 99) == "\\u4f60$\\u000a"
    assert displayable("abcdefghijklmnop", 9) == "abc...nop"
    assert displayable("\xe9", 5) == "\xe9"


@pytest.mark.parametrize(
    ("steps", "words"),
    [([], "No rows"), ([step_of(0, {"zeros@activation:a": 0.5})], "the 1 records are none of norms")],
)
@pytest.mark.pure
def test_nothing_to_draw(tmp_path: Path, steps: list[Step], words: str) -> None:
    curves = viz.plot(steps)
    assert curves.panels == ()
    assert any(words in text.get_text() for text in curves.figure().texts)
    curves.render(tmp_path / "empty")


@pytest.mark.slow
def test_no_text_lies_on_other_text() -> None:
    names = [f"blocks.{n}.{w}.weight" for n in range(12) for w in ("attention", "up", "down", "norm")]
    rows = [step.records for step in everything(names)] * 400
    rows[7] = {**rows[7], **{f"bound@gradient:{name}": float(n + 1) for n, name in enumerate(names)}}
    figure = viz.Curves(run_of(*rows, {"norm@gradient:x": 0.0, "max_abs@gradient:y": 1.0}), "").figure()
    renderer = FigureCanvasAgg(figure).get_renderer()
    figure.draw(renderer)
    for ax in figure.axes:
        title, legend = ax._left_title.get_window_extent(renderer), ax.get_legend()  # type: ignore[attr-defined]
        if legend is not None:
            assert title.x1 < legend.get_window_extent(renderer).x0, ax.get_title("left")
        labels = [t.get_window_extent(renderer) for t in ax.get_yticklabels() if t.get_text()]
        assert all(box.x0 >= 0 for box in labels)
        assert all(abs(a.y0 - b.y0) > 0.9 * a.height for a, b in pairwise(labels))


@pytest.mark.slow
def test_figures_are_new_and_show_in_notebooks() -> None:
    curves = viz.plot(everything(["w"]))
    assert curves.figure() is not curves.figure()
    assert curves._repr_svg_() == curves._repr_svg_()
    assert curves._repr_svg_().lstrip().startswith("<?xml")


@pytest.mark.pure
def test_refuses(tmp_path: Path) -> None:
    curves = viz.plot([])
    with pytest.raises(ValueError, match="one of png, svg, pdf, got 'gif'"):
        curves.render(tmp_path / "a", "gif")
    with pytest.raises(OSError, match="nowhere"):
        curves.render(tmp_path / "nowhere" / "a")
    with pytest.raises(OSError, match="none"):
        viz.plot(tmp_path / "none.jsonl")
    for source in (3, [1, 2], None):
        with pytest.raises(TypeError, match=r"takes a Monitor, the path"):
            viz.plot(source)


@pytest.mark.slow
def test_pyplot_is_never_imported() -> None:
    program = """
import sys, tempfile
from gradrewrite import viz
from gradrewrite.diagnostics.run_log import Step
viz.plot([Step(0, {"loss@run": 1.0})]).render(tempfile.mkdtemp() + "/a")
sys.exit("matplotlib.pyplot" in sys.modules)
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


BASELINE = [
    step_of(n, {"loss@run": 3.0 if n else NAN, "norm@gradient:a": 3.0, "norm@gradient:b": 4.0}) for n in range(14)
]
RUN = [step_of(n, {"loss@run": 2.0, "total_norm@group:default": 1.0, "bound@group:default": 0.5}) for n in range(10)]


@pytest.mark.pure
@pytest.mark.parametrize(("run", "baseline", "last"), [(RUN, BASELINE, 13.5), (BASELINE, RUN, 13.5), (RUN, RUN, 9.5)])
def test_a_baseline_is_drawn_into_the_panels_of_loss_and_norm(
    run: list[Step], baseline: list[Step], last: float
) -> None:
    curves = viz.plot(run, baseline=baseline)

    assert curves.panels[:2] == ("loss", "total norm")
    loss, norm = curves.figure().axes[:2]
    for ax in (loss, norm):
        drawn = [line for line in ax.lines if line.get_gid() is None]
        assert [line.get_label() for line in drawn] == ["this run", "baseline"]
        assert [len(line.get_xdata()) for line in drawn] == [len(run), len(baseline)]
        assert ax.get_xlim() == (-0.5, last)
    sizes = {10: 1.0, 14: 5.0}
    assert [set(line.get_ydata()) for line in norm.lines[:2]] == [{sizes[len(run)]}, {sizes[len(baseline)]}]


@pytest.mark.pure
def test_files_name_the_runs(tmp_path: Path) -> None:
    for folder, name in (("a", "run.jsonl"), ("b", "run.jsonl"), ("b", "plain.jsonl")):
        (tmp_path / folder).mkdir(exist_ok=True)
        (tmp_path / folder / name).write_text('{"step": 0, "records": {"loss@run": 1.0}}\n')
    for other, names in (
        ("plain.jsonl", ["run.jsonl", "plain.jsonl"]),
        ("run.jsonl", ["run.jsonl", "run.jsonl (baseline)"]),
    ):
        (ax,) = viz.plot(tmp_path / "a" / "run.jsonl", baseline=tmp_path / "b" / other).figure().axes
        assert [line.get_label() for line in ax.lines] == names


@pytest.mark.pure
def test_a_baseline_without_common_records_or_steps() -> None:
    assert viz.plot(RUN, baseline=[step_of(0, {"own@error:a": 1.0})]).panels == ("loss", "total norm, bound", "factor")
    assert viz.plot([], baseline=BASELINE).panels == ("loss",)
    viz.plot([], baseline=BASELINE).figure()
    assert viz.plot([], baseline=[]).panels == ()
    with pytest.raises(TypeError, match="got int"):
        viz.plot(RUN, baseline=5)


@pytest.mark.pure
def test_factors_by_site_and_step() -> None:
    sizes = np.array([[1.0, 2.0, 4.0, INF], [0.5, 0.25, 8.0, 1.0]])
    steps = [
        step_of(
            n,
            {f"norm@error:{site}": row[n] for site, row in zip("ab", sizes, strict=True)}
            | {"bound@error:a": 1.0, "bound@error:b": 1.0},
        )
        for n in range(4)
    ]
    heat = factor_map(last_run(steps))

    assert heat is not None
    assert heat.rows == ["error:b", "error:a"]  # the backward comes to the last first
    np.testing.assert_array_equal(heat.values, [[1.0, 1.0, 0.125, 1.0], [1.0, 0.5, 0.25, INF]])
    assert factor_map(last_run([step_of(0, {"norm@error:a": 1.0})])) is None


@pytest.mark.pure
def test_a_small_range_of_factors_is_not_stretched_over_all_colors() -> None:
    scale, colors = colors_of(np.array([[1.0, 0.95], [INF, NAN]]), "factor")

    assert (scale.norm.vmin, scale.norm.vmax) == (0.1, 1.0)
    assert np.abs(colors[0, 0] - colors[0, 1]).max() < 0.05
    assert np.abs(colors_of(np.array([[1.0, 0.01]]), "factor")[1][0, 1] - scale.cmap(0.0)).max() == 0
