"""The code of docs/cheatsheet.md runs, and does what the page says."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import gradrewrite as gr
from gradrewrite import passes, viz
from gradrewrite.testing import assert_matches_eager

from helpers import ROOT

PAGE = (ROOT / "docs" / "cheatsheet.md").read_text()
BLOCKS = re.findall(r"```python\n(.*?)```", PAGE, re.DOTALL)
CODE = re.findall(r"`(gr\.on\(.*?\))`(?=[,;: |])", PAGE)


def names() -> dict[str, Any]:
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 2))
    x, y = torch.randn(8, 3), torch.randint(2, (8,))
    return {
        **{name: getattr(passes, name) for name in passes.__all__},
        "gr": gr, "torch": torch, "nn": nn, "viz": viz, "Path": Path, "assert_matches_eager": assert_matches_eager,
        "net": net, "x": x, "y": y, "device": "cpu", "criterion": nn.CrossEntropyLoss(), "f": lambda g: g * 2,
        "loader": [[(x[:4], y[:4]), (x[4:], y[4:])]] * 3,
    }  # fmt: skip


def run(block: str, known: dict[str, Any]) -> dict[str, Any]:
    exec(block.replace("model.compile()", "model.eval"), known)  # op by op; tests/e2e/test_readme.py compiles
    return known


@pytest.mark.broad
def test_the_loop_trains_resumes_and_reports(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    first = run(BLOCKS[0], names())
    assert (tmp_path / "report.html").exists()
    assert gr.state_dict(first["model"])["step"] == 3
    run(BLOCKS[0], names())  # goes on from the checkpoint, in the same file
    steps = gr.read_jsonl("run.jsonl")
    assert [step.update for step in steps] == [0, 0, 1, 1, 2, 2, 3, 3, 4, 4, 5, 5]
    assert steps[-1].origin is not None
    assert steps[-1].origin.config == {"lr": 1e-3}
    assert viz.plot("run.jsonl").run.resumed == (3,)


@pytest.mark.broad
def test_a_bad_update_is_left_out_and_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    known = names()
    known["loader"][1:2] = [[known["loader"][0][0], (known["x"][4:] * float("nan"), known["y"][4:])]]
    run(BLOCKS[0], known)
    said = str(viz.report("run.jsonl").health)
    assert known["model"].monitor.skipped == 1
    assert "An input of the model is not finite: data:input (12 elements), in update 1, micro-batch 2 of 2" in said
    assert "1 update was skipped, in update 1 (not finite, first at data:input in micro-batch 2 of 2)" in said


@pytest.mark.parametrize("code", CODE)
def test_rules_are_rules(code: str) -> None:
    known = names()
    rule = eval(code, known)
    assert isinstance(rule, type(gr.on("error:*", known["f"])))


def test_the_table_has_rules() -> None:
    assert len(CODE) >= 9


def test_lengths() -> None:
    known = run(BLOCKS[2], names())
    assert known["padded"](torch.ones(2, 70, 3)).shape == (2, 128, 3)
    known["policy"] = gr.on("error:0", passes.Observe("norm"))
    model = run(BLOCKS[1], known)["model"]
    for size in (5, 7, 9):
        model(torch.ones(size, 3)).sum().backward()
    assert len(model.explain().graphs) == 1


def test_the_policy_matches_eager() -> None:
    known = names()
    known["policy"] = [gr.on("error:*", passes.ClipByNorm(1.0)), gr.on("gradient:*", passes.CheckFinite("record"))]
    run(BLOCKS[3].replace("net, policy[:2], x", "net, policy[:2], x, compiled=False"), known)
