"""``Monitor.log``: scalars of the user's own in the rows of the backwards."""

from __future__ import annotations

import logging
import math
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import gradrewrite as gr
from gradrewrite.diagnostics.run_file import read_jsonl
from gradrewrite.diagnostics.run_log import Step
from gradrewrite.passes import ClipByGlobalNorm, ClipByValue, Observe


def watched(**settings: int) -> gr.RewrittenModule:
    return gr.transform(nn.Linear(2, 1), gr.on("gradient:bias", Observe("norm")), monitor=gr.Monitor(**settings))


def backward(model: nn.Module, rows: int = 1) -> torch.Tensor:
    """The gradient of the bias is the number of rows."""
    loss = model(torch.ones(rows, 2)).sum()
    loss.backward()
    return loss


@pytest.mark.broad
def test_value_goes_to_the_last_backward() -> None:
    model = watched()
    backward(model)
    model.monitor.log("loss", 3.5)
    backward(model, 2)
    backward(model, 3)
    model.monitor.log("loss", torch.tensor([[-1.25]]))

    assert model.monitor.history("loss@run") == pytest.approx([3.5, math.nan, -1.25], nan_ok=True)
    assert model.monitor.latest() == {"norm@gradient:bias": 3.0, "loss@run": -1.25}
    assert "loss@run" in str(model.monitor.table())


def test_value_is_copied_at_once() -> None:
    model = watched()
    loss = backward(model)
    want = loss.item()
    model.monitor.log("loss", loss)
    loss.data.fill_(7.0)

    assert model.monitor.latest()["loss@run"] == want
    (added,) = model.monitor._recorder.records[-1].late.values()
    assert not added.pack.requires_grad


@pytest.mark.broad
@pytest.mark.parametrize(
    ("value", "want"),
    [
        (math.nan, math.nan),
        (torch.tensor(-math.inf), -math.inf),
        (True, 1.0),
        (2**40 + 1, 2.0**40 + 1),
        (torch.tensor(2**40 + 1), 2.0**40 + 1),
        (torch.tensor(0.1, dtype=torch.float64), 0.1),
        (torch.tensor(0.5, dtype=torch.bfloat16), 0.5),
    ],
)
def test_what_a_value_may_be(value: Any, want: float) -> None:
    model = watched()
    backward(model)
    model.monitor.log("x", value)

    assert model.monitor.latest()["x@run"] == pytest.approx(want, abs=0, nan_ok=True)


def test_last_of_two_values_stands_whatever_they_are() -> None:
    model = watched()
    backward(model)
    for value in (1.0, torch.tensor(2.0), 3.0):
        model.monitor.log("loss", value)
        model.monitor.log("other", -value)
        assert model.monitor.latest()["loss@run"] == value
    assert model.monitor.latest()["other@run"] == -3.0
    assert len(model.monitor._recorder.records[-1].late) == 2


def test_row_that_was_read_still_grows() -> None:
    model = watched(every=1)
    backward(model)
    assert "loss@run" not in model.monitor.latest()
    model.monitor.log("loss", 1.0)
    assert model.monitor.latest()["loss@run"] == 1.0
    assert model.monitor.history("loss@run") == [1.0]
    model.monitor.log("loss", 2.0)
    assert model.monitor.steps() == [Step(0, {"norm@gradient:bias": 1.0, "loss@run": 2.0})]


@pytest.mark.broad
@pytest.mark.parametrize("every", [1, 3])
def test_file_has_what_was_logged(tmp_path: Path, every: int) -> None:
    path = tmp_path / "run.jsonl"
    model = gr.transform(
        nn.Linear(2, 1), gr.on("gradient:*", ClipByValue(1.0, log=True)), monitor=gr.Monitor(every=every)
    )
    model.monitor.to_jsonl(path)
    for step in range(7):
        model(torch.ones(1, 2)).sum().backward()
        model.monitor.latest()
        model.monitor.log("loss", torch.tensor(float(step)))
    model.monitor.flush()
    steps = read_jsonl(path)

    assert [(step.step, step.records["loss@run"]) for step in steps] == [(n, float(n)) for n in range(7)]


def test_value_that_comes_after_the_file_is_said_once(tmp_path: Path) -> None:
    path = tmp_path / "run.jsonl"
    model = watched()
    model.monitor.to_jsonl(path)
    backward(model)
    model.monitor.flush()
    with pytest.warns(gr.RewriteWarning, match=r"loss@run came after step 0 had been written"):
        model.monitor.log("loss", 1.0)
    model.monitor.log("loss", 2.0)
    backward(model)
    model.monitor.log("loss", 3.0)
    model.monitor.flush()
    records = [step.records for step in read_jsonl(path)]

    assert [r.get("loss@run") for r in records] == [None, 3.0]
    assert model.monitor.history("loss@run") == [2.0, 3.0]


def test_before_any_backward() -> None:
    model = watched()
    with pytest.raises(RuntimeError, match=r"call it after loss\.backward\(\)"):
        model.monitor.log("loss", 1.0)
    backward(model)
    assert "loss@run" not in model.monitor.latest()


@pytest.mark.broad
@pytest.mark.parametrize(
    ("name", "value", "error", "words"),
    [
        ("", 1.0, ValueError, "without '@'"),
        ("loss@run", 1.0, ValueError, "without '@'"),
        (3, 1.0, TypeError, "name is a string, got int"),
        ("loss", torch.ones(2), ValueError, r"one element, got shape \(2,\)"),
        ("loss", torch.ones(0), ValueError, r"one element, got shape \(0,\)"),
        ("loss", "1.0", TypeError, "got str"),
        ("loss", None, TypeError, "got NoneType"),
        ("loss", torch.tensor(1j), TypeError, "complex64"),
    ],
)
def test_what_is_refused(name: Any, value: Any, error: type[Exception], words: str) -> None:
    model = watched()
    backward(model)
    with pytest.raises(error, match=words):
        model.monitor.log(name, value)
    assert model.monitor.latest() == {"norm@gradient:bias": 1.0}


def test_steps_have_bounds() -> None:
    model = gr.transform(nn.Linear(2, 1), gr.on("gradient:*", ClipByGlobalNorm(0.5)))
    backward(model)
    (step,) = model.monitor.steps()

    assert step.records["bound@group:default"] == 0.5
    assert step.records["total_norm@group:default"] == pytest.approx(math.sqrt(3))


@pytest.mark.cuda
def test_nothing_waits_for_the_device(tmp_path: Path) -> None:
    path = tmp_path / "run.jsonl"
    model = gr.transform(
        nn.Linear(2, 2).cuda(), gr.on("gradient:*", Observe("norm")), monitor=gr.Monitor(capacity=8, every=2)
    )
    optimizer = gr.guard(torch.optim.AdamW(model.parameters(), fused=True), model, update_ratios=True)
    model.monitor.to_jsonl(path)
    x, losses = torch.ones(1, 2, device="cuda"), []
    for step in range(9):
        torch.cuda.set_sync_debug_mode("error" if step > 2 else "default")
        loss = model(x).square().sum()
        loss.backward()
        model.monitor.log("loss", loss)
        optimizer.step()
        optimizer.zero_grad()
        torch.cuda.set_sync_debug_mode("default")
        losses.append(loss.detach().clone())
    model.monitor.flush()
    records = [step.records for step in read_jsonl(path)]

    assert [r["loss@run"] for r in records] == [float(loss) for loss in losses]
    assert all(0 < r["update_ratio@gradient:weight"] < 1 for r in records)


def test_a_handler_of_log_lines_sees_the_step_that_it_is_told_of() -> None:
    model = gr.transform(nn.Linear(2, 1, bias=False), gr.on("gradient:*", ClipByValue(0.1, log=True)))
    seen: list[float] = []

    class Handler(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            seen.append(model.monitor.latest()["max_abs@gradient:weight"])
            model.monitor.log("seen", 1.0)

    logger, handler = logging.getLogger("gradrewrite.monitor"), Handler()
    level = logger.level
    logger.addHandler(handler)
    logger.setLevel(logging.INFO)
    try:
        for factor in (1.0, 2.0):
            model.zero_grad()
            (model(torch.ones(1, 2)) * factor).sum().backward()
    finally:
        logger.removeHandler(handler)
        logger.setLevel(level)
    assert seen == [1.0, 2.0]
    assert [step.records.get("seen@run") for step in model.monitor.steps()] == [1.0, 1.0]


@pytest.mark.slow
def test_a_backward_that_outlives_its_model_is_written_and_warned_of(tmp_path: Path) -> None:
    program = f"""
import torch, gradrewrite as gr
from gradrewrite.passes import CheckFinite
def loss():
    model = gr.transform(torch.nn.Linear(2, 1), gr.on("gradient:*", CheckFinite("warn")))
    model.monitor.to_jsonl({str(tmp_path / "run.jsonl")!r})
    return model(torch.full((1, 2), torch.inf)).sum()
loss().backward()
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)

    assert len(gr.read_jsonl(tmp_path / "run.jsonl")) == 1
    assert "RewriteWarning: step 0: first non-finite: gradient:weight" in done.stderr
