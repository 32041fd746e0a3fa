"""The README's example runs and prints what the README says; docstring examples too."""

from __future__ import annotations

import doctest
import importlib
import pkgutil
import re
import subprocess
import sys
from pathlib import Path

import pytest

import gradrewrite.passes
import gradrewrite.viz

from helpers import ROOT

BLOCKS = re.compile(r"^```(\w*)\n(.*?)^```$", re.M | re.S)


@pytest.mark.slow
def test_readme_example_prints_what_the_readme_says(tmp_path: Path) -> None:
    blocks = BLOCKS.findall((ROOT / "README.md").read_text())
    (code,) = (text for language, text in blocks if language == "python")
    (shown,) = (text for language, text in blocks if language == "text")
    example = tmp_path / "example.py"
    example.write_text(code)
    done = subprocess.run([sys.executable, str(example)], capture_output=True, text=True, check=True)

    assert done.stdout == shown


# ``passes`` and ``viz`` are other folders, which the path of an editable install does not have.
PACKAGES = (gradrewrite, gradrewrite.passes, gradrewrite.viz)
MODULES = {m.name for p in PACKAGES for m in pkgutil.walk_packages(p.__path__, f"{p.__name__}.")}


@pytest.mark.long
@pytest.mark.parametrize("name", sorted(MODULES - {"gradrewrite.__main__"}))
def test_docstring_examples(name: str) -> None:
    package, _, framework = name.rpartition(".")
    if package == "gradrewrite.integrations" and not framework.startswith("_"):
        pytest.importorskip(framework, reason=f"{framework} is not installed")
    module = importlib.import_module(name)
    result = doctest.testmod(module)

    assert result.failed == 0
