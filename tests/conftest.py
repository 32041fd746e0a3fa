"""Fixtures that every test file shares, and the markers that follow from the folder of a test."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from hypothesis import settings
from torch import Tensor, nn
from torch._dynamo.utils import compilation_time_metrics

sys.path.insert(0, str(Path(__file__).parent))

from models.shell import NUMBERS, SOURCE, Shell

TESTS = Path(__file__).parent
KINDS = ("pure", "aot_eager", "inductor")  # each test has one of them: what it compiles
FOLDERS = {
    "integration/inductor": ("inductor",),
    "integration/cuda": ("inductor", "cuda"),
    "integration/distributed": ("distributed",),
    "upstream": ("upstream",),
}

settings.register_profile("dev", max_examples=20, deadline=None)
settings.register_profile("ci", max_examples=200, deadline=None)
settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", "dev"))


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Add the markers of the folder; a test that says nothing else is ``aot_eager``, and one of Inductor is slow."""
    for item in items:
        explicit = [mark.name for mark in item.iter_markers() if mark.name in KINDS]
        folder = item.path.relative_to(TESTS).parent.as_posix()
        for name in FOLDERS.get(folder, ()):
            if name not in KINDS or not explicit:
                item.add_marker(name)
        kinds = {mark.name for mark in item.iter_markers() if mark.name in KINDS}
        if len(kinds) > 1:
            raise pytest.UsageError(f"{item.nodeid} is marked {' and '.join(sorted(kinds))}: one of {KINDS} is wanted")
        if not kinds:
            item.add_marker("aot_eager")
        if "inductor" in kinds:
            item.add_marker("slow")


@pytest.fixture(autouse=True)
def _fresh_torch(request: pytest.FixtureRequest) -> Iterator[None]:
    """Each test has its own random numbers, no compiled code of the test before, and compiles what its marker says."""
    torch.manual_seed(0)
    yield
    timed = set(compilation_time_metrics)  # what was compiled since the last reset
    if timed:
        torch.compiler.reset()
    if timed and request.node.get_closest_marker("pure"):
        pytest.fail("a test that is marked pure compiles nothing, and torch.compile ran: mark it aot_eager")
    if "compile_fx_inner" in timed and not request.node.get_closest_marker("inductor"):
        pytest.fail("Inductor ran in a test that is not marked inductor")


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
