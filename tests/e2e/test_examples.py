"""Each example runs as a script."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from helpers import ROOT

FOLDER = ROOT / "examples"
STEPS = ["--steps", "3"]
EXAMPLES = {
    "regression": (STEPS, "clipped: ", "regression.svg"),
    "character_model": (STEPS, "total_norm@group:default", "character_model.png"),
    "weight_decay": (STEPS, "Adam               L2 ", None),
    "unused_pooler": (["--steps", "24"], "no gradient: bert.pooler.dense.weight", None),
    "distributed_training": (STEPS, "1 processes, outside", None),
    "distributed_all_reduce": (STEPS, "1 processes, 0 collectives", None),  # integration/distributed starts two
    "find_nonfinite": ([], "op: /sqrt, source: find_nonfinite.py:", None),
}


@pytest.mark.pure
def test_every_example_is_listed() -> None:
    assert set(EXAMPLES) == {path.stem for path in FOLDER.glob("*.py")} - {"__init__"}


@pytest.mark.slow
@pytest.mark.parametrize("name", EXAMPLES)
def test_example(name: str, tmp_path: Path) -> None:
    options, wanted, written = EXAMPLES[name]
    if name == "unused_pooler":
        pytest.importorskip("transformers", reason="transformers is not installed")
    command = [sys.executable, str(FOLDER / f"{name}.py"), *options]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True)

    assert done.returncode == 0, done.stderr
    assert wanted in done.stdout
    assert written is None or (tmp_path / written).stat().st_size > 0
