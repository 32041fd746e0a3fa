"""The scripts of docs/frameworks.md run as they stand."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

from helpers import ROOT

# An option -W of Python knows no category of a package.
STRICT = "import warnings, gradrewrite\nwarnings.simplefilter('error', gradrewrite.RewriteWarning)\n"
PAGE = ROOT / "docs" / "frameworks.md"
SECTIONS = {
    title: block
    for title, text in re.findall(r"^## (.+?)\n(.*?)(?=^## |\Z)", PAGE.read_text(), re.MULTILINE | re.DOTALL)
    for block in re.findall(r"```python\n(.*?)```", text, re.DOTALL)
}


@pytest.mark.sample(8)
@pytest.mark.slow
@pytest.mark.parametrize("framework", ["transformers", "lightning", "accelerate"])
def test_script(framework: str, tmp_path: Path) -> None:
    pytest.importorskip(framework, reason=f"{framework} is not installed")
    (script,) = (text for title, text in SECTIONS.items() if title.lower() == framework)
    done = subprocess.run([sys.executable, "-c", STRICT + script], cwd=tmp_path, capture_output=True, text=True)

    assert done.returncode == 0, done.stderr
    if framework != "accelerate":
        assert {"run.jsonl", "run.html"} <= {path.name for path in (tmp_path / "out").iterdir()}


@pytest.mark.pure
def test_every_script_is_run() -> None:
    assert {title.lower() for title in SECTIONS} == {"transformers", "lightning", "accelerate"}
