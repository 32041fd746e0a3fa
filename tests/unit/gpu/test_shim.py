"""Whether the GPU can be simulated, and the reason if not."""

from __future__ import annotations

import shutil
from importlib.metadata import PackageNotFoundError
from pathlib import Path

import pytest

from gpu import shim

pytestmark = pytest.mark.pure


@pytest.mark.parametrize(
    ("found", "reason"),
    [
        ({"torch": "2.13.0+cpu", "triton": "3.7.1"}, ""),
        ({"torch": "2.11.0", "triton": "3.7.1"}, "needs torch 2.13.0, and 2.11.0 is installed"),
        ({"torch": "2.13.0", "triton": "3.9.0"}, "needs triton 3.7.1, and 3.9.0 is installed"),
        ({"torch": "2.13.0"}, "needs triton 3.7.1, which is not installed"),
    ],
)
def test_versions(found: dict[str, str], reason: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    def version(package: str) -> str:
        if package not in found:
            raise PackageNotFoundError(package)
        return found[package]

    monkeypatch.setattr(shim, "version", version)
    monkeypatch.setattr(shutil, "which", lambda _: "/usr/bin/g++")
    monkeypatch.setattr(shim, "_torch_folder", lambda: tmp_path)
    assert shim.why_not().endswith(reason)
    assert bool(shim.why_not()) == bool(reason)


def test_a_missing_compiler(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shim, "version", shim.VERSIONS.__getitem__)
    monkeypatch.setattr(shutil, "which", lambda _: None)
    assert shim.why_not() == "the simulated GPU needs g++"


def test_a_wheel_with_cuda(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(shim, "version", shim.VERSIONS.__getitem__)
    monkeypatch.setattr(shutil, "which", lambda _: "/usr/bin/g++")
    monkeypatch.setattr(shim, "_torch_folder", lambda: tmp_path)
    (tmp_path / "lib").mkdir()
    (tmp_path / "lib" / "libtorch_cuda.so").touch()
    assert shim.why_not().endswith("needs the CPU wheel of torch; this one has CUDA")


def test_what_the_environment_asks_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(shim.VARIABLE, raising=False)
    assert shim.wanted() is None
    monkeypatch.setenv(shim.VARIABLE, "compiled")
    assert shim.wanted() == "compiled"
    monkeypatch.setenv(shim.VARIABLE, "1")
    with pytest.raises(ValueError, match="GRADREWRITE_GPU is one of interpreted, compiled; got '1'"):
        shim.wanted()


def test_torch_must_not_be_imported_before() -> None:
    with pytest.raises(RuntimeError, match="before torch is imported"):
        shim.register("compiled")
