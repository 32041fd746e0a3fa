"""A whole run in shards, each of which goes on where it was stopped: the plugin of ``tests/nightly.sh``.

    pytest --shard=2/9 --record=results.jsonl

``--record`` appends a line for each test that ends: its id, outcome and seconds. Tests that have passed, or were
skipped, in this file are left out. The values need the ``=``: before this plugin is loaded, pytest takes a file behind
an unknown option for one of tests.
"""

from __future__ import annotations

import json
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

DONE = ("passed", "skipped")
PASSED = pytest.StashKey[frozenset[str]]()


def pytest_addoption(parser: pytest.Parser) -> None:
    group = parser.getgroup("shards of a whole run")
    group.addoption("--shard", metavar="K/N", help="the K-th of N shards, whose tests are drawn by their ids")
    group.addoption("--record", metavar="FILE", type=Path, help="outcomes of tests; those that passed are left out")


def pytest_configure(config: pytest.Config) -> None:
    path: Path | None = config.getoption("record")
    given = getattr(config, "workerinput", {})
    passed = given["passed"] if "passed" in given else () if path is None else sorted(_passed(path))
    config.stash[PASSED] = frozenset(passed)
    if path is not None and not given:
        config.pluginmanager.register(_Recorder(path))


def _passed(path: Path) -> set[str]:
    if not path.exists():
        return set()
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    latest = {line["id"]: line["outcome"] for line in lines}
    return {name for name, outcome in latest.items() if outcome in DONE}


@pytest.hookimpl(optionalhook=True)
def pytest_configure_node(node: Any) -> None:
    """Hand the same tests to all workers of xdist: a later one would read a longer file."""
    node.workerinput["passed"] = sorted(node.config.stash[PASSED])


@pytest.hookimpl(wrapper=True, tryfirst=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> Iterator[None]:
    """Leave out tests of other shards, and those that are done, of what other plugins leave."""
    for item in items:
        item.user_properties.append(("id", item.nodeid))  # as it is here: pytest-xdist may add a group to it
    yield
    index, number = _shard(config.getoption("shard"))
    passed = config.stash[PASSED]
    kept: list[pytest.Item] = []
    left: list[pytest.Item] = []
    for item in items:
        name = _id(item)
        group = item.get_closest_marker("xdist_group")  # whose tests stay in one shard
        is_ours = zlib.crc32((name if group is None else str(group.args[0])).encode()) % number == index
        (kept if is_ours and name not in passed else left).append(item)
    config.hook.pytest_deselected(items=left)
    items[:] = kept


def _id(test: pytest.Item | pytest.TestReport) -> str:
    return str(next(value for name, value in test.user_properties if name == "id"))


def _shard(text: str | None) -> tuple[int, int]:
    if text is None:
        return 0, 1
    k, _, n = text.partition("/")
    if not (k.isdecimal() and n.isdecimal() and 1 <= int(k) <= int(n)):
        raise pytest.UsageError(f"--shard is {text!r}; it takes K/N, with 1 <= K <= N")
    return int(k) - 1, int(n)


class _Recorder:
    """Appends the outcome of each test to the file, once it has ended."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._open: dict[str, tuple[str, float]] = {}

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        known, seconds = self._open.pop(report.nodeid, ("passed", 0.0))
        outcome = max(known, report.outcome, key=("passed", "skipped", "failed").index)
        seconds += report.duration
        if report.when != "teardown":
            self._open[report.nodeid] = (outcome, seconds)
            return
        line = {"id": _id(report), "outcome": outcome, "seconds": round(seconds, 2)}
        with self._path.open("a", encoding="utf-8") as file:
            file.write(json.dumps(line) + "\n")
