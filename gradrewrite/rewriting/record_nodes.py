"""Record nodes, and the numbering of their keys."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from torch import fx

from gradrewrite.ir.record_key import RecordKey
from gradrewrite.ir.record_layout import BOUNDS
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
        self, named: Sequence[Sequence[str]], where: str, bound: str | None
    ) -> tuple[list[list[RecordKey]], RecordKey | None]:
        """Make the keys of one action's records.

        Args:
            named: Names of its records, in each of its tensors.
            where: The site.
            bound: Name of a bound that is a number, and so no record; None if there is none.

        Returns:
            The keys, and that of the bound. The bound of a norm is numbered like the norm, the first record; the limit
            of values like the last record, which says whether the clip acted.
        """
        plain = self.new((name for names in named for name in names if name not in BOUNDS), where)
        rest = iter(plain)

        def bounding(name: str) -> RecordKey:
            occurrence = self._number[plain[-1 if name == "limit" else 0]] if plain else 1
            return self.new([name], where, occurrence=occurrence)[0]

        keys = [[bounding(name) if name in BOUNDS else next(rest) for name in names] for names in named]
        return keys, bounding(bound) if bound is not None else None


def _key(name: str, occurrence: int, where: str) -> RecordKey:
    return RecordKey.of(name, where) if occurrence == 1 else RecordKey(name, occurrence, where)
