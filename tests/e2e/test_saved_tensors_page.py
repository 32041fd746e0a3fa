"""The code of docs/saved-tensors.md runs, and prints what the page says."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import torch

from helpers import ROOT

PAGE = (ROOT / "docs" / "saved-tensors.md").read_text()
BLOCKS = re.findall(r"```python\n(.*?)```", PAGE, re.DOTALL)
OUTPUTS = re.findall(r"```text\n(.*?)```", PAGE, re.DOTALL)


@pytest.mark.broad
def test_the_page(capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    torch.manual_seed(0)
    known: dict[str, Any] = {}
    exec(BLOCKS[0], known)
    printed = capsys.readouterr().out

    assert OUTPUTS[0].strip("\n") in printed
    assert re.sub(r"[\d.]+%", "", OUTPUTS[1]) in re.sub(r"[\d.]+%", "", printed)
    assert (tmp_path / "memory.png").stat().st_size > 0
    exec(BLOCKS[1], known)
    record, policy_bytes = capsys.readouterr().out.splitlines()
    assert record.startswith("('stored_error@saved:")
    assert int(policy_bytes) < known["memory"].plain_bytes
    assert len(BLOCKS) == 2
