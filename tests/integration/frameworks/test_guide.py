"""The scripts of docs/frameworks.md run as they stand."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

from helpers import ROOT

PAGE = ROOT / "docs" / "frameworks.md"
SECTIONS = {
    title: block
    for title, text in re.findall(r"^## (.+?)\n(.*?)(?=^## |\Z)", PAGE.read_text(), re.MULTILINE | re.DOTALL)
    for block in re.findall(r"```python\n(.*?)```", text, re.DOTALL)
}


@pytest.mark.slow
@pytest.mark.parametrize("framework", ["transformers", "lightning", "accelerate"])
def test_script(framework: str, tmp_path: Path) -> None:
    pytest.importorskip(framework, reason=f"{framework} is not installed")
    (script,) = (text for title, text in SECTIONS.items() if title.lower() == framework)
    command = [sys.executable, "-W", "error::gradrewrite.RewriteWarning", "-c", script]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True)

    assert done.returncode == 0, done.stderr


@pytest.mark.pure
def test_every_script_is_run() -> None:
    assert {title.lower() for title in SECTIONS} == {"transformers", "lightning", "accelerate"}
