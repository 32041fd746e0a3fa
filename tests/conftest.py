"""Fixtures that every test file shares, and the markers that follow from the folder of a test."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
from hypothesis import settings

sys.path.insert(0, str(Path(__file__).parent))

from gpu.session import GPU, reason_to_skip  # registers the simulated GPU, before torch is imported

# isort: split
import sampling
import torch
from torch import Tensor, nn
from torch._dynamo import config as dynamo_config
from torch._dynamo.utils import compilation_time_metrics

from models.shell import NUMBERS, SOURCE, Shell

if TYPE_CHECKING:
    from gpu.log import SimulatedGpu
    from gpu.shim import Mode

dynamo_config.issue_3_13_0_warning = False  # on Python 3.13.0 alone, of slower guards; tests count warnings
TESTS = Path(__file__).parent
pytest_plugins = ("sharding",)
KINDS = ("pure", "aot_eager", "inductor")  # each test has one of them: what it compiles
FOLDERS = {
    "integration/inductor": ("inductor",),
    "integration/cuda": ("inductor", "cuda"),
    "integration/distributed": ("distributed",),
    "integration/launches": ("inductor", "launches"),
    "upstream": ("upstream",),
}

settings.register_profile("dev", max_examples=20, deadline=None)
settings.register_profile("ci", max_examples=30, deadline=None)
settings.register_profile("nightly", max_examples=200, deadline=None)
settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", "dev"))


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    """Import no file in which the expression of ``-m`` selects nothing: torch's databases alone take seconds."""
    if collection_path.suffix != ".py":
        return None
    expression = config.getoption("markexpr")
    if expression == "pure":
        return "mark.pure" not in collection_path.read_text() or None
    left_out = {folder: ["slow"] * ("inductor" in names) + list(names) for folder, names in FOLDERS.items()}
    left_out["conformance"] = ["slow"]
    found = [names for folder, names in left_out.items() if collection_path.is_relative_to(TESTS / folder)]
    return any(f"not {name}" in expression for names in found for name in names) or None


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Add the markers of the folder, and leave out what is not drawn.

    A test that says nothing else is ``aot_eager``, and one of Inductor is slow.
    """
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
        _keep_with_shared_fixtures(item)
        _skip_without_gpu(item)
        item.user_properties.append(("markers", " ".join(sorted({mark.name for mark in item.iter_markers()}))))
    _draw(config, items)


def _keep_with_shared_fixtures(item: pytest.Item) -> None:
    """Make tests that share a fixture of their file one group, which samples and shards draw as one.

    Runs distribute whole files (``--dist=loadfile``): pytest-xdist 3.8 finds no groups under pytest 9.2.
    """
    fixtures = getattr(item, "_fixtureinfo").name2fixturedefs  # noqa: B009
    if any(found.scope == "module" for definitions in fixtures.values() for found in definitions):
        item.add_marker(pytest.mark.xdist_group(item.path.relative_to(TESTS).as_posix()))


def _draw(config: pytest.Config, items: list[pytest.Item]) -> None:
    cases = [sampling.case_of(item) for item in items]
    config.stash[sampling.CASES] = cases
    number = sampling.number_of_run()
    if number is None:
        return
    ids = sampling.drawn(cases, number)
    config.hook.pytest_deselected(items=[item for item in items if item.nodeid not in ids])
    items[:] = [item for item in items if item.nodeid in ids]


def _skip_without_gpu(item: pytest.Item) -> None:
    if GPU is not None:
        item.add_marker(pytest.mark.filterwarnings("ignore:Accessing the data pointer of FakeTensor:UserWarning"))
    wanted: dict[str, Mode] = {"cuda": "interpreted", "launches": "compiled"}
    for marker, mode in wanted.items():
        has_gpu = GPU == mode or (marker == "cuda" and torch.cuda.is_available())
        if item.get_closest_marker(marker) and not has_gpu:
            item.add_marker(pytest.mark.skip(reason=reason_to_skip(mode)))


def is_pure(request: pytest.FixtureRequest) -> bool:
    """Whether a test says that it compiles nothing."""
    return request.node.get_closest_marker("pure") is not None


@pytest.fixture(autouse=True)
def _fresh_torch(request: pytest.FixtureRequest) -> Iterator[None]:
    """Each test has its own random numbers, no compiled code of the test before, and compiles what its marker says."""
    torch.manual_seed(0)
    had_library = "compile_file" in compilation_time_metrics
    yield
    # What was compiled since the last reset; a file alone is the function for statistics.
    timed = set(compilation_time_metrics) - ({"compile_file"} if had_library or not is_pure(request) else set())
    if timed:
        torch.compiler.reset()
    if timed and is_pure(request):
        pytest.fail(f"a test that is marked pure compiles nothing, and {sorted(timed)} ran: mark it aot_eager")
    if "compile_fx_inner" in timed and not request.node.get_closest_marker("inductor"):
        pytest.fail("Inductor ran in a test that is not marked inductor")


@pytest.fixture(autouse=True)
def simulation(request: pytest.FixtureRequest, _fresh_torch: None) -> Iterator[SimulatedGpu | None]:
    """Tests marked ``cuda`` run on the simulated GPU where there is one."""
    if GPU != "interpreted" or request.node.get_closest_marker("cuda") is None:
        yield None
        return
    from gpu.device import simulated_gpu  # imports triton

    with simulated_gpu(has_values=True) as gpu:
        yield gpu


@pytest.fixture
def gpu(simulation: SimulatedGpu | None) -> SimulatedGpu:
    """The log of the simulated GPU."""
    if simulation is None:
        pytest.skip("a real GPU keeps no log")
    return simulation


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
