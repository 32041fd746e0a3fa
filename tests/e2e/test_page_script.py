"""The page's script under the TypeScript compiler and ESLint; ``npm install`` in ``tests/page`` brings both."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import pytest

from helpers import ROOT, node_modules

MODULES = node_modules()
pytestmark = [
    pytest.mark.browser,
    pytest.mark.skipif(MODULES is None, reason="npm packages are not installed: run npm install in tests/page"),
]


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    for name in ("tsconfig.json", "eslint.config.mjs"):
        shutil.copy(ROOT / "tests" / "page" / name, tmp_path)
    for name in ("run.js", "graph.js"):
        shutil.copy(ROOT / "viz" / "page" / name, tmp_path)
    assert MODULES is not None
    (tmp_path / "node_modules").symlink_to(MODULES)
    return tmp_path


@pytest.mark.parametrize(
    "command", [["tsc", "--project", "tsconfig.json"], ["eslint", "run.js", "graph.js"]], ids=lambda c: c[0]
)
def test_the_script_is_typed_and_clean(folder: Path, command: list[str]) -> None:
    done = subprocess.run([f"node_modules/.bin/{command[0]}", *command[1:]], cwd=folder, capture_output=True, text=True)

    assert (done.stdout, done.returncode) == ("", 0)


def test_a_wrong_type_would_be_found(folder: Path) -> None:
    path = folder / "graph.js"
    path.write_text(path.read_text().replace("let atEdit = -1;", "let atEdit = 'none';"))
    done = subprocess.run(
        ["node_modules/.bin/tsc", "--project", "tsconfig.json"], cwd=folder, capture_output=True, text=True
    )

    assert "is not assignable" in done.stdout
