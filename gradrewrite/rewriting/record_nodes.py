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

    def of_action(
        self, reports: Sequence[Figures[Leaf]], where: str, members: Sequence[str] = ()
    ) -> list[tuple[Figures[RecordKey], RecordKey | None]]:
        """Make the keys of the reports of one action.

        A bound has the occurrence of the norm of its clip, a limit that of ``clipped``, and a factor that of the norm.
        Of the records of a tensor function ``bound`` has the occurrence of the first other one, ``limit`` of the last.

        Args:
            reports: The reports.
            where: The site of their records.
            members: The sites of the members, if the action is of a group.

        Returns:
            Each report with its keys, and the key of the factor of a clip.
        """
        placed: dict[int, tuple[Figures[RecordKey], RecordKey | None]] = {}
        sites = iter(members)
        numbers: list[int] = []  # the occurrences of the records at the site that bound nothing

        def key(name: str, _: Leaf) -> RecordKey:
            if name in BOUNDS:
                is_of_function = _is_bound(report)
                number = (numbers[0] if is_of_function and name == "bound" else numbers[-1]) if numbers else 1
                return self.new([name], where, occurrence=number)[0]
            (found,) = self.new([name], next(sites) if name == SHARE_OF_MEMBER else where)
            if name != SHARE_OF_MEMBER:
                numbers.append(self._number[found])
            return found

        for position in sorted(range(len(reports)), key=lambda n: _is_bound(reports[n])):
            report = reports[position]
            keyed: Figures[RecordKey] = report.map(key)
            placed[position] = keyed, self._factor_of(keyed, where)
        return [placed[position] for position in range(len(reports))]

    def _factor_of(self, report: Figures[RecordKey], where: str) -> RecordKey | None:
        match report:
            case NormClip():
                return self.new(["factor"], where, occurrence=report.norm.occurrence)[0]
            case ValueClip():
                return self.new(["factor"], where)[0]
            case Scalars() | Check():
                return None
            case _:
                assert_never(report)


def _is_bound(report: Figures[Leaf]) -> bool:
    """Whether a report is a bound that a tensor function records by itself."""
    return isinstance(report, Scalars) and len(report.names) == 1 and report.names[0] in BOUNDS


def _key(name: str, occurrence: int, where: str) -> RecordKey:
    return RecordKey.of(name, where) if occurrence == 1 else RecordKey(name, occurrence, where)
