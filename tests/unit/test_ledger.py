"""Minutes of a run by phase, folder and marker, from the reports of pytest."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from helpers import TESTS

REPORT = """<testsuites><testsuite>
<testcase classname="tests.unit.ir.test_a" name="test_x[a.b]@a group" time="90"><properties>
<property name="id" value="tests/unit/ir/test_a.py::test_x[a.b]"/>
<property name="markers" value="long parametrize xdist_group"/></properties></testcase>
<testcase classname="tests.unit.test_b" name="test_y" time="30"><properties>
<property name="id" value="tests/unit/test_b.py::test_y"/>
<property name="markers" value="long slow"/></properties></testcase>
</testsuite></testsuites>"""


@pytest.mark.pure
def test_tables(tmp_path: Path) -> None:
    (tmp_path / "others.xml").write_text(REPORT)
    (tmp_path / "phases.tsv").write_text("install\t12\nothers\t66\n")
    command = [sys.executable, str(TESTS / "ledger.py"), str(tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True, check=True)

    assert [line.split() for line in done.stdout.splitlines()] == [
        ["phase", "minutes"],
        ["install", "0.2"],
        ["others", "1.1"],
        ["all", "1.3"],
        ["folder", "tests", "minutes"],
        ["unit/ir", "1", "1.5"],
        ["unit", "1", "0.5"],
        ["marker", "tests", "minutes"],
        ["long", "2", "2.0"],
        ["slow", "1", "0.5"],
        ["slowest", "tests", "seconds"],
        ["tests/unit/ir/test_a.py::test_x[a.b]", "90.0"],
        ["tests/unit/test_b.py::test_y", "30.0"],
    ]
