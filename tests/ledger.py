"""Minutes of a run by phase, folder and marker, and its slowest tests.

    python tests/ledger.py FOLDER

reads ``FOLDER/phases.tsv`` (name and seconds of each phase, one a line) and the reports of pytest beside it
(``--junitxml FOLDER/<phase>.xml``). Minutes of tests are added up over workers, so they exceed those of their phase.
"""

from __future__ import annotations

import sys
from collections import defaultdict
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from xml.etree import ElementTree as ET

from rich.console import Console
from rich.markup import escape
from rich.table import Table

MARKERS = ("pure", "aot_eager", "inductor", "long", "slow", "distributed", "browser", "upstream", "cuda", "launches")
NUM_SLOWEST = 20


@dataclass(frozen=True)
class Timed:
    """A test of a run.

    Attributes:
        phase: Name of the phase.
        id: Its pytest id.
        seconds: Of its setup, call and teardown.
        markers: Names of its markers.
    """

    phase: str
    id: str
    seconds: float
    markers: frozenset[str]

    @property
    def folder(self) -> str:
        """The folder below ``tests``, at most two deep."""
        return "/".join(self.id.split("::")[0].split("/")[1:-1][:2]) or "."


def read_tests(path: Path) -> list[Timed]:
    """Read the tests of a report of pytest."""
    return [_timed(path.stem, case) for case in ET.parse(path).getroot().iter("testcase")]


def _timed(phase: str, case: ET.Element) -> Timed:
    properties = {p.get("name"): p.get("value", "") for p in case.iter("property")}
    return Timed(
        phase,
        properties["id"],
        float(case.get("time", 0)),
        frozenset(properties.get("markers", "").split()),
    )


def read_phases(path: Path) -> dict[str, float]:
    """Read the seconds of each phase, in the order in which they ended."""
    rows = (line.split("\t") for line in path.read_text().splitlines())
    return {name: float(seconds) for name, seconds in rows}


def minutes_by(tests: Iterable[Timed], keys: Callable[[Timed], Iterable[str]]) -> list[tuple[str, int, float]]:
    """Number and minutes of the tests with each key, most minutes first."""
    seconds: defaultdict[str, list[float]] = defaultdict(list)
    for test in tests:
        for key in keys(test):
            seconds[key].append(test.seconds)
    return sorted(((key, len(own), sum(own) / 60) for key, own in seconds.items()), key=lambda row: -row[2])


def show(phases: dict[str, float], tests: list[Timed], console: Console) -> None:
    """Print the tables."""
    wall = _table("phase", "minutes")
    for name, seconds in phases.items():
        wall.add_row(name, f"{seconds / 60:.1f}")
    wall.add_row("all", f"{sum(phases.values()) / 60:.1f}")
    console.print(wall)
    for head, keys in (("folder", lambda t: (t.folder,)), ("marker", lambda t: t.markers.intersection(MARKERS))):
        table = _table(head, "tests", "minutes")
        for key, number, minutes in minutes_by(tests, keys):
            table.add_row(key, str(number), f"{minutes:.1f}")
        console.print(table)
    slowest = _table("slowest tests", "seconds")
    for test in sorted(tests, key=lambda t: -t.seconds)[:NUM_SLOWEST]:
        slowest.add_row(escape(test.id), f"{test.seconds:.1f}")
    console.print(slowest)


def _table(first: str, *numbers: str) -> Table:
    table = Table(first, box=None, pad_edge=False)
    for name in numbers:
        table.add_column(name, justify="right")
    return table


def main(folder: Path) -> int:
    """Print the ledger of a folder."""
    tests = [test for path in sorted(folder.glob("*.xml")) for test in read_tests(path)]
    show(read_phases(folder / "phases.tsv"), tests, Console(width=160))
    return 0


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1])))
