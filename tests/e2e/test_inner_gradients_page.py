"""The code of docs/inner-gradients.md runs, and prints the output of the page."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest

from helpers import ROOT

PAGE = (ROOT / "docs" / "inner-gradients.md").read_text()
(BLOCK,) = re.findall(r"```python\n(.*?)```", PAGE, re.DOTALL)
(OUTPUT,) = re.findall(r"```text\n(.*?)```", PAGE, re.DOTALL)


@pytest.mark.broad
def test_the_page(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    path = tmp_path / "block.py"
    path.write_text(BLOCK)
    known: dict[str, Any] = {}
    exec(compile(BLOCK, str(path), "exec"), known)
    assert capsys.readouterr().out == OUTPUT
