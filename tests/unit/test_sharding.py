"""Shards of a whole run: together they are all tests, and a shard goes on where it was stopped."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import pytest

from helpers import TESTS

FILE = """
import os, pytest
@pytest.fixture(scope="module")
def shared():
    return 1
@pytest.mark.parametrize("n", range(20))
def test_one(n):
    assert n != int(os.environ["FAILS"])
@pytest.mark.xdist_group("a group")
@pytest.mark.parametrize("n", range(6))
def test_grouped(n):
    pass
@pytest.mark.skip(reason="a test of skips")
def test_skipped():
    pass
"""
NUM_TESTS = 27


def run(folder: Path, *options: str, fails: int = -1) -> str:
    (folder / "test_shards.py").write_text(FILE)
    command = [sys.executable, "-m", "pytest", "-p", "sharding", "-p", "no:cacheprovider", "-q", *options]
    environment = {"PYTHONPATH": str(TESTS), "FAILS": str(fails), "PATH": ""}
    done = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True)
    assert done.returncode in (0, 1, 5), done.stdout + done.stderr
    return done.stdout


def outcomes(path: Path) -> list[tuple[str, str]]:
    lines = map(json.loads, path.read_text().splitlines())
    return [(line["id"].partition("::")[2], line["outcome"]) for line in lines]


def workers(number: int) -> Sequence[str]:
    return ("-n", str(number)) if number else ("-n0",)


@pytest.mark.long
@pytest.mark.parametrize("number", [0, 2])
def test_shards_are_all_tests_and_groups_stay_together(number: int, tmp_path: Path) -> None:
    found = []
    for shard in ("1/3", "2/3", "3/3"):
        record = tmp_path / f"{shard[0]}.jsonl"
        run(tmp_path, "--shard", shard, "--record", str(record), *workers(number))
        found.append([name for name, _ in outcomes(record)] if record.exists() else [])

    names = [name for own in found for name in own]
    assert len(names) == len(set(names)) == NUM_TESTS
    assert {"test_one[0]", "test_skipped"} <= set(names)
    assert [sum(name.startswith("test_grouped") for name in own) for own in found].count(0) == 2


@pytest.mark.long
@pytest.mark.parametrize("number", [0, 2])
def test_a_run_goes_on_with_what_has_not_passed(number: int, tmp_path: Path) -> None:
    record = tmp_path / "record.jsonl"
    run(tmp_path, "--record", str(record), *workers(number), fails=7)
    first = dict(outcomes(record))
    again = run(tmp_path, "--record", str(record), *workers(number), fails=7)
    mended = run(tmp_path, "--record", str(record), *workers(number))

    assert len(first) == NUM_TESTS
    assert [name for name, outcome in first.items() if outcome == "failed"] == ["test_one[7]"]
    assert first["test_skipped"] == "skipped"
    assert "1 failed" in again
    assert "1 passed" in mended
    assert outcomes(record)[NUM_TESTS:] == [("test_one[7]", "failed"), ("test_one[7]", "passed")]
    assert "27 deselected" in run(tmp_path, "--record", str(record))


@pytest.mark.long
@pytest.mark.parametrize("shard", ["0/3", "4/3", "1", "a/b"])
def test_a_shard_that_is_none(shard: str, tmp_path: Path) -> None:
    (tmp_path / "test_shards.py").write_text(FILE)
    command = [sys.executable, "-m", "pytest", "-p", "sharding", "-n0", "--shard", shard]
    environment = {"PYTHONPATH": str(TESTS), "FAILS": "-1", "PATH": ""}
    done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True)

    assert done.returncode == 4
    assert f"--shard is {shard!r}; it takes K/N, with 1 <= K <= N" in done.stderr
