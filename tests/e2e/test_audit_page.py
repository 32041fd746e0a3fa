"""The code of docs/audit.md runs, and prints the output of the page; the command's exit status."""

from __future__ import annotations

import re
import sys
from pathlib import Path
from typing import Any

import pytest

from gradrewrite.cli import main

from helpers import ROOT

PAGE = (ROOT / "docs" / "audit.md").read_text()
(BLOCK,) = re.findall(r"```python\n(.*?)```", PAGE, re.DOTALL)
(OUTPUT,) = re.findall(r"```text\n(.*?)```", PAGE, re.DOTALL)
MODELS = """
import torch
from torch import nn

class Net(nn.Module):
    def __init__(self, cut):
        super().__init__()
        self.a, self.b, self.cut = nn.Linear(2, 2), nn.Linear(2, 2), cut

    def forward(self, x):
        h = self.a(x)
        return self.b(h.detach() if self.cut else h).square().mean()

def sound():
    return Net(False)

def cut():
    return Net(True)

def batch():
    return torch.ones(3, 2)

def optimizer(parameters):
    return torch.optim.SGD(parameters, lr=0.1)

def layer():
    return nn.Linear(2, 2)

def loss(output, batch):
    return (output.detach() - batch).square().mean()

def compute_loss(model, x):
    return (model(x) - x).square().mean()
"""


def test_the_page(capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    path = tmp_path / "audit.py"
    path.write_text(BLOCK)
    known: dict[str, Any] = {}
    exec(compile(BLOCK, str(path), "exec"), known)
    printed = capsys.readouterr().out

    assert printed.startswith(OUTPUT)
    assert (tmp_path / "audit.html").exists()


def test_the_command(capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "models_to_audit.py").write_text(MODELS)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [str(tmp_path), *sys.path])
    given = ["--input", "models_to_audit:batch"]

    assert main(["audit", "models_to_audit:sound", *given, "--optimizer", "models_to_audit:optimizer"]) == 0
    assert capsys.readouterr().out == "4 of 4 parameters are trained; no fault was found.\n"
    assert main(["audit", "models_to_audit:cut", *given, "--out", "found.html"]) == 1
    assert "a.weight, a.bias" in (tmp_path / "found.html").read_text()
    assert 'models_to_audit.py:12 "return self.b(h.detach()' in capsys.readouterr().out
    assert main(["audit", "models_to_audit:sound", *given, "--trained", "a.*"]) == 1
    assert main(["audit", "models_to_audit:sound", *given, "--json", "--steps", "0"]) == 0
    assert '"verdict": "trained"' in capsys.readouterr().out
    assert main(["audit", "models_to_audit:layer", *given, "--loss", "models_to_audit:loss"]) == 1
    assert main(["audit", "models_to_audit:layer", *given, "--compute-loss", "models_to_audit:compute_loss"]) == 0
    assert main(["audit", "models_to_audit:sound", *given, "--trained", "lora"]) == 2
    assert "trained='lora' matches no parameter" in capsys.readouterr().err
