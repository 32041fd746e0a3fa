"""The command line; the demo keeps the README's promises."""

from __future__ import annotations

import json
import math
import re
import subprocess
import sys
import time
from pathlib import Path

import pytest

from gradrewrite.cli import main


@pytest.mark.slow
def test_demo(tmp_path: Path) -> None:
    start = time.monotonic()
    done = subprocess.run(
        [sys.executable, "-m", "gradrewrite", "demo", "--out", str(tmp_path)],
        capture_output=True,
        text=True,
        check=True,
    )
    assert time.monotonic() - start < 240  # two minutes on an idle machine
    result = json.loads((tmp_path / "demo.json").read_text())

    runs = result["regression"]["runs"]
    assert [run["seed"] for run in runs] == list(range(8))
    for run in runs:
        assert any(math.isnan(loss) for loss in run["plain"][:5])
        first, *_, last = run["rewritten"]
        assert last < 5
        assert last < 0.01 * first
    assert {e["site"].partition(":")[0] for e in result["regression"]["edits"]} == {"gradient"}
    assert len(result["regression"]["edits"]) == 6

    (run,) = result["text"]["runs"]
    assert sum(run["rewritten"][-10:]) < 0.7 * sum(run["rewritten"][:10])
    sites = [e["site"] for e in result["text"]["edits"]]
    assert sites[:2] == ["error:cell", "error:cell#1"]
    assert sum(site.startswith("error:cell") for site in sites) == 40
    assert all(e["nodes"] for e in result["text"]["edits"])
    assert re.search(r"layer=cell need clipping, max error=[\d.e-]+ avg error=[\d.e-]+\n", done.stdout)
    assert "error:cell x 40" in done.stdout
    assert "step/s" in done.stderr


def test_unwritable_folder(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "file").write_text("")

    assert main(["demo", "--out", str(tmp_path / "file")]) == 2
    err = capsys.readouterr().err
    assert err.count("\n") == 1
    assert "--out" in err


def test_usage(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as stop:
        main([])
    assert stop.value.code == 2
    assert "demo" in capsys.readouterr().err
    with pytest.raises(SystemExit):
        main(["--version"])
    assert "gradrewrite" in capsys.readouterr().out
