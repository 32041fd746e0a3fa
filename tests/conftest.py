"""Fixtures that every test file shares."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

sys.path.insert(0, str(Path(__file__).parent))

from models.shell import NUMBERS, SOURCE, Shell


@pytest.fixture(autouse=True)
def _fresh_torch() -> Iterator[None]:
    """Each test has its own random numbers, and no compiled code of the test before."""
    torch.manual_seed(0)
    yield
    torch.compiler.reset()


@pytest.fixture
def shell(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Iterator[Shell]:
    name = f"models_of_the_command_line_{next(NUMBERS)}"
    (tmp_path / f"{name}.py").write_text(SOURCE)
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    yield Shell(tmp_path, name, capsys)
    sys.modules.pop(name, None)


@pytest.fixture
def plain() -> nn.Module:
    """A small model without random numbers."""
    return nn.Sequential(nn.Linear(4, 3), nn.Tanh(), nn.Dropout(0.5), nn.Linear(3, 2)).eval()


@pytest.fixture
def x() -> Tensor:
    """Its input."""
    return torch.randn(5, 4)
