"""``viz.plot``: a run in a picture."""

from __future__ import annotations

import copy
import math
import subprocess
import sys
from collections.abc import Mapping, Sequence
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
from gradrewrite.passes import CheckFinite, ClipByGlobalNorm
from gradrewrite.viz._fonts import displayable
from gradrewrite.viz._panels import Baseline, panels_of

from models.clips import step_of
from models.small import Lambda

NAN, INF = math.nan, math.inf


def run_of(*rows: Mapping[str, float], first: int = 0) -> Run:
    return last_run([step_of(first + n, row) for n, row in enumerate(rows)])


@pytest.mark.pure
def test_steps_that_are_not_finite_are_marked_in_all_panels() -> None:
    plain = {"loss@run": 1.0, "norm@gradient:w": 1.0, "inf@activation:mask": 4.0}  # expected: every step has it
    rows = [{**plain, "norm@gradient:w": NAN if n in (3, 4, 9) else 1.0} for n in range(12)]
    figure = viz.Curves(run_of(*rows), "").figure()

    assert len(figure.axes) == 2
    for ax in figure.axes:
        (marks,) = ax.collections
        assert [path.vertices[0, 0] for path in marks.get_paths()] == [3, 4, 9]
    assert figure.get_suptitle() == "steps 0 to 11; not finite (red): 3"


@pytest.mark.slow
def test_a_real_run_equals_eager_training(tmp_path: Path) -> None:
    plain = Lambda(
        lambda net, x: gr.tap(net.second(net.first(x).tanh()).square().mean(), "loss"),
        first=nn.Linear(3, 3),
        second=nn.Linear(3, 1),
    )
    watch = gr.on("gradient:*", [CheckFinite("skip"), ClipByGlobalNorm(0.5)])
    model = gr.transform(copy.deepcopy(plain), watch)
    optimizer = gr.guard(torch.optim.SGD(model.parameters(), lr=0.0), model)
    xs = [torch.full((2, 3), NAN) if n == 4 else torch.randn(2, 3) for n in range(8)]
    norms = []
    for x in xs:
        optimizer.zero_grad()
        loss = model(x)
        loss.backward()
        model.monitor.log("loss", loss)
        optimizer.step()
        plain.zero_grad()
        plain(x).backward()
        norms.append(math.hypot(*(float(p.grad.norm()) for p in plain.parameters() if p.grad is not None)))
    curves = viz.plot(model.monitor)
    loss, norm = panels_of(curves.run)

    assert curves.panels == ("loss", "norm")
    assert [step for step, value in dict(loss.lines)["this run"].items() if math.isnan(value)] == [4]
    lines = dict(norm.lines)
    want = np.where(np.isnan(norms), INF, norms)
    np.testing.assert_allclose([*lines["this run"].values()], want, rtol=1e-4)
    assert lines["bound"] == dict.fromkeys(range(8), 0.5)
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
    assert heading == "training run\nsteps 0 to 0; the last of 2 runs in the file"
    ax = curves.figure().axes[0]
    left, right = ax.get_xlim()
    assert [tick for tick in ax.get_xticks() if left <= tick <= right] == [0.0]


def everything(names: Sequence[str]) -> list[Step]:
    kinds = {"norm@gradient:": 1.0, "max_abs@error:": 0.0, "clipped@error:": 1.0}
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
    [([], "No steps"), ([step_of(0, {"zeros@activation:a": 0.5})], "neither a loss nor norms")],
)
@pytest.mark.pure
def test_nothing_to_draw(tmp_path: Path, steps: list[Step], words: str) -> None:
    curves = viz.plot(steps)
    assert curves.panels == ()
    assert any(words in text.get_text() for text in curves.figure().texts)
    curves.render(tmp_path / "empty")


@pytest.mark.slow
def test_no_text_lies_on_other_text() -> None:
    rows = [{"max_abs@gradient:w": NAN if n == 7 else 10.0**n} for n in range(9)]
    baseline = Baseline(run_of(*rows), "a file with a long name " * 4)
    figure = viz.Curves(run_of(*rows), "a title", baselines=(baseline,)).figure()
    renderer = FigureCanvasAgg(figure).get_renderer()
    figure.draw(renderer)
    (ax,) = figure.axes
    title, legend = ax._left_title.get_window_extent(renderer), ax.get_legend()  # type: ignore[attr-defined]
    assert legend is not None
    assert title.x1 < legend.get_window_extent(renderer).x0
    labels = [t.get_window_extent(renderer) for t in ax.get_yticklabels() if t.get_text()]
    assert all(box.x0 >= 0 for box in labels)


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
    (tmp_path / "file").touch()
    with pytest.raises(OSError, match=r"file/a\.png"):
        curves.render(tmp_path / "file" / "a")
    with pytest.raises(OSError, match="none"):
        viz.plot(tmp_path / "none.jsonl")
    for source in (3, [1, 2], None):
        with pytest.raises(TypeError, match=r"a run is a Monitor, the path"):
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
@pytest.mark.parametrize(("run", "baseline"), [(RUN, BASELINE), (BASELINE, RUN), (RUN, RUN)])
def test_a_baseline_is_drawn_into_both_panels(run: list[Step], baseline: list[Step]) -> None:
    curves = viz.plot(run, baseline=baseline)

    assert curves.panels == ("loss", "norm")
    axes = curves.figure().axes
    bound = ["bound"] if run is RUN else []
    for ax, more in zip(axes, ([], bound), strict=True):
        drawn = [line for line in ax.lines if line.get_label() != "not finite"]
        assert [line.get_label() for line in drawn] == ["this run", "baseline", *more]
        assert [len(line.get_xdata()) for line in drawn[:2]] == [len(run), len(baseline)]
    sizes = {10: 1.0, 14: 5.0}
    assert [set(line.get_ydata()) for line in axes[1].lines[:2]] == [{sizes[len(run)]}, {sizes[len(baseline)]}]


@pytest.mark.pure
def test_the_file_names_the_baseline(tmp_path: Path) -> None:
    for name in ("run.jsonl", "plain.jsonl"):
        (tmp_path / name).write_text('{"step": 0, "records": {"loss@run": 1.0}}\n')
    curves = viz.plot(tmp_path / "run.jsonl", baseline=tmp_path / "plain.jsonl")

    assert curves.title == "run.jsonl"
    (ax,) = curves.figure().axes
    assert [line.get_label() for line in ax.lines] == ["this run", "plain.jsonl"]


@pytest.mark.pure
def test_a_baseline_without_common_records_or_steps() -> None:
    figure = viz.plot(RUN, baseline=[step_of(0, {"own@error:a": 1.0})]).figure()
    assert [[line.get_label() for line in ax.lines] for ax in figure.axes] == [["this run"], ["this run", "bound"]]
    assert viz.plot([], baseline=BASELINE).panels == ("loss",)
    viz.plot([], baseline=BASELINE).figure()
    assert viz.plot([], baseline=[]).panels == ()
    with pytest.raises(TypeError, match="got int"):
        viz.plot(RUN, baseline=5)
