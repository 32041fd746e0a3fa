"""Monitors, runs and steps in a notebook: a table, and short texts."""

from __future__ import annotations

import math

import pytest
import torch

import gradrewrite as gr
from gradrewrite.diagnostics.run_log import Step, last_run
from gradrewrite.passes import ClipByNorm


@pytest.mark.pure
def test_a_run_shows_a_table_of_its_records() -> None:
    run = last_run([Step(n, {"norm@gradient:<w>": 1.0 + n, "loss@run": math.nan}) for n in range(3)])

    assert repr(run) == "Run(3 steps, 0 to 2; 2 records)"
    shown = run._repr_html_()
    assert "<caption>3 steps, 0 to 2; 2 records</caption>" in shown
    cells = ["3", "1", "2", "3", "3", "0"]  # last, smallest, median, largest, steps, not finite
    assert f'<th scope="row">norm@gradient:&lt;w&gt;</th>{"".join(f"<td>{cell}</td>" for cell in cells)}</tr>' in shown
    assert repr(last_run([])) == "Run(0 steps; 0 records)"
    assert "<caption>0 steps; 0 records</caption>" in last_run([])._repr_html_()


@pytest.mark.pure
def test_a_long_table_is_cut() -> None:
    run = last_run([Step(0, {f"norm@error:{n}": 1.0 for n in range(100)})])

    assert run._repr_html_().count("<tr>") == 1 + 40
    assert "<caption>1 step, 0 to 0; 100 records; the first 40 of 100 records</caption>" in run._repr_html_()


@pytest.mark.pure
def test_a_step_is_short() -> None:
    assert repr(Step(3, {"loss@run": 1.5})) == "Step(3, {'loss@run': 1.5})"
    assert repr(Step(3, {f"norm@error:{n}": 1.0 for n in range(5)})) == "Step(3, {5 records})"


def test_a_monitor_shows_its_table() -> None:
    model = gr.transform(torch.nn.Linear(2, 1), gr.on("gradient:weight", ClipByNorm(1.0)))
    assert repr(model.monitor) == "Monitor(capacity=1000, every=None): 0 steps"
    assert "<caption>0 of 0 steps, nothing was recorded: Observe" in model.monitor._repr_html_()
    model(torch.ones(1, 2)).sum().backward()

    assert repr(model.monitor) == "Monitor(capacity=1000, every=None): 1 steps"
    norm = f"{math.sqrt(2):.4g}"
    assert f'<th scope="row">norm@gradient:weight</th><td>{norm}</td>' in model.monitor._repr_html_()
