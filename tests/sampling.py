"""Sampling of tests: each run draws some of the many cases, and consecutive numbers draw all of them.

``.ci/run`` sets ``GRADREWRITE_SAMPLE`` to a number that changes every fifty commits. A test with the mark ``sample(n)``
runs where ``(crc32(id) + number) % n == 0``; tests that share a fixture of their file are drawn together, by the name
of the file. Others have the ``n`` of their marker; besides, the nearest of the cases of a test function runs: at every
number, or, of those that take longer, at one in two or four. Tests that compile nothing always run. Without the
variable, or with ``all``, everything runs.
"""

from __future__ import annotations

import os
import zlib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

import pytest

VARIABLE = "GRADREWRITE_SAMPLE"
# One in how many numbers draws a test, and some case of its function; of several markers the first counts. None is
# larger than PERIOD: so many consecutive numbers draw every test.
SHARES: Mapping[str, tuple[int, int]] = {
    "cuda": (8, 2), "launches": (8, 2), "slow": (12, 4), "distributed": (12, 2), "long": (12, 2), "aot_eager": (4, 1),
}  # fmt: skip
PERIOD = 12


@dataclass(frozen=True)
class Case:
    """A test that may be drawn.

    Attributes:
        id: Its pytest id.
        share: One in how many numbers draws it.
        keeps: One in how many numbers draws some case of its function; None if its cases are drawn alone.
        group: The name by which it is drawn with others; empty if it is drawn by its id.
    """

    id: str
    share: int
    keeps: int | None = None
    group: str = ""

    @property
    def function(self) -> str:
        """The id without parameters."""
        return self.id.partition("[")[0]

    def distance(self, number: int) -> int:
        """How far the number is from one that draws it; 0 draws it."""
        return _distance(self.group or self.id, number, self.share)

    def keeps_one(self, number: int) -> bool:
        """Whether the number draws some case of its function."""
        return self.keeps is not None and _distance(self.function, number, self.keeps) == 0


def _distance(text: str, number: int, share: int) -> int:
    return (zlib.crc32(text.encode()) + number) % share


CASES = pytest.StashKey[list[Case]]()  # of all collected tests that some number draws


def case_of(item: pytest.Item) -> Case:
    """Return the case of a collected test.

    Raises:
        pytest.UsageError: ``sample`` has no number from 1 to ``PERIOD``.
    """
    mark = item.get_closest_marker("sample")
    if mark is None:
        share, keeps = next((shares for name, shares in SHARES.items() if item.get_closest_marker(name)), (1, 1))
        return Case(item.nodeid, share, keeps)
    if len(mark.args) != 1 or mark.args[0] not in range(1, PERIOD + 1):
        raise pytest.UsageError(f"{item.nodeid}: sample takes a number from 1 to {PERIOD}, got {mark.args}")
    group = item.get_closest_marker("xdist_group")
    return Case(item.nodeid, mark.args[0], group="" if group is None else group.args[0])


def drawn(cases: Iterable[Case], number: int) -> set[str]:
    """Return the ids of the cases that a number draws."""
    ids: set[str] = set()
    nearest: dict[str, Case] = {}
    for case in cases:
        if case.distance(number) == 0:
            ids.add(case.id)
        if case.keeps_one(number):
            nearest[case.function] = min(nearest.get(case.function, case), case, key=lambda c: c.distance(number))
    return ids | {case.id for case in nearest.values()}


def number_of_run() -> int | None:
    """Return the sample number of this run; None if it runs everything.

    Raises:
        pytest.UsageError: The variable is no number.
    """
    text = os.environ.get(VARIABLE, "all")
    if text == "all":
        return None
    if not text.isdecimal():
        raise pytest.UsageError(f"{VARIABLE} is {text!r}; it takes a number, or all")
    return int(text)
