"""Record nodes, and the numbering of their keys."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from torch import fx
from typing_extensions import assert_never

from gradrewrite.ir.record_key import RecordKey
from gradrewrite.ir.reports import BOUNDS, SHARE_OF_MEMBER, Check, Figures, Leaf, NormClip, Scalars, ValueClip
from gradrewrite.ir.statistics import COUNTS


@dataclass(frozen=True, slots=True)
class RecordNode:
    """A node with one or more records.

    Attributes:
        keys: Their keys.
        node: The node, flat: one element a record; or what is measured where the records are packed.
        is_forward: Whether the records are of activations.
        skips: Whether all of them are counts of checks that skip.
        statistics: What is measured of the node there, a key of ``statistics.STATISTICS`` for each record.
    """

    keys: tuple[RecordKey, ...]
    node: fx.Node
    is_forward: bool
    skips: bool = False
    statistics: tuple[str, ...] = ()


class RecordNumbering:
    """The keys of the records of a graph; the only place that numbers occurrences.

    Attributes:
        counts: Keys of counts of elements.
    """

    def __init__(self) -> None:
        self._number: dict[RecordKey, int] = {}  # of the occurrence, of a name that a user may have given with one
        self.counts: set[RecordKey] = set()

    def new(self, names: Iterable[str], where: str, *, occurrence: int = 1) -> list[RecordKey]:
        """Make the keys of new records: each with this occurrence if it is free, else with the first that is."""
        found = []
        for name in names:
            wanted = ((_key(name, n, where), n) for n in itertools.chain([occurrence], itertools.count(1)))
            key, number = next((k, n) for k, n in wanted if k not in self._number)
            self._number[key] = number
            found.append(key)
            if name in COUNTS:
                self.counts.add(key)
        return found

    def of_report(
        self, report: Figures[Leaf], where: str, members: Sequence[str] = ()
    ) -> tuple[Figures[RecordKey], RecordKey | None]:
        """Make the keys of a report.

        Args:
            report: The report.
            where: The site of its records.
            members: The sites of the members, if it is of a group.

        Returns:
            The report with its keys, and the key of the factor of a clip. A bound has the occurrence of the norm, and a
            limit that of ``clipped``, so that they belong together; and a factor that of the norm.
        """
        sites = iter(members)
        last = 1  # the occurrence that the key before was given

        def key(name: str, _: Leaf) -> RecordKey:
            nonlocal last
            at = next(sites) if name == SHARE_OF_MEMBER else where
            (found,) = self.new([name], at, occurrence=last if name in BOUNDS else 1)
            last = self._number[found]
            return found

        placed: Figures[RecordKey] = report.map(key)
        match placed:
            case NormClip():
                return placed, self.new(["factor"], where, occurrence=placed.norm.occurrence)[0]
            case ValueClip():
                return placed, self.new(["factor"], where)[0]
            case Scalars() | Check():
                return placed, None
            case _:
                assert_never(placed)


def _key(name: str, occurrence: int, where: str) -> RecordKey:
    return RecordKey.of(name, where) if occurrence == 1 else RecordKey(name, occurrence, where)
