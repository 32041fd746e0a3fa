"""Record nodes, and the numbering of their keys."""

from __future__ import annotations

import itertools
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass

from torch import fx
from typing_extensions import assert_never

from gradrewrite.ir.record_key import RecordKey, with_label, with_loss
from gradrewrite.ir.reports import BOUNDS, SHARE_OF_MEMBER, Check, Figures, Leaf, NormClip, Scalars, ValueClip


@dataclass(frozen=True, slots=True)
class RecordNode:
    """A node with one or more records."""

    keys: tuple[RecordKey, ...]
    node: fx.Node  # flat: one element a record; or what is measured where the records are packed
    is_forward: bool  # the records are of activations
    skips: bool = False  # all of them are counts of checks that skip
    # what is measured of the node there, a key of ``statistics.STATISTICS`` for each record
    statistics: tuple[str, ...] = ()


class RecordNumbering:
    """The keys of the records of a graph; the only place that numbers occurrences."""

    def __init__(self, label: str = "") -> None:
        self.label = label  # behind each site; see ``RewriteConfig.label``
        self._number: dict[RecordKey, int] = {}  # of the occurrence, of a name that a user may have given with one

    def new(self, names: Iterable[str], where: str, *, occurrence: int = 1, loss: str = "") -> list[RecordKey]:
        """Make the keys of new records: each with this occurrence if it is free, else with the first that is.

        Those of the gradient of one loss have its name behind the site: ``norm@gradient:w[energy]``.
        """
        found, where = [], with_label(with_loss(where, loss), self.label)
        for name in names:
            wanted = ((_key(name, n, where), n) for n in itertools.chain([occurrence], itertools.count(1)))
            key, number = next((k, n) for k, n in wanted if k not in self._number)
            self._number[key] = number
            found.append(key)
        return found

    def of_action(
        self,
        reports: Sequence[Figures[Leaf]],
        where: str,
        members: Sequence[str] = (),
        loss: str = "",
        of_each: Collection[str] | None = None,
    ) -> list[tuple[Figures[RecordKey], RecordKey | None]]:
        """Make the keys of the reports of one action, each with the key of the factor of a clip.

        A bound has the occurrence of the norm of its clip, a limit that of ``clipped``, and a factor that of the norm.
        Of the records of a tensor function ``bound`` has the occurrence of the first other one, ``limit`` of the last.
        ``members`` are the sites of a group, ``loss`` is the name of that of the gradient.
        Of a function that is given all losses only the records in ``of_each`` are of this one.
        """
        placed: dict[int, tuple[Figures[RecordKey], RecordKey | None]] = {}
        sites = iter(members)
        numbers: list[int] = []  # the occurrences of the records at the site that bound nothing

        def key(name: str, _: Leaf) -> RecordKey:
            own = loss if of_each is None or name in of_each else ""
            if name in BOUNDS:
                position = 0 if _is_bound(report) and name == "bound" else -1
                return self.new([name], where, occurrence=numbers[position] if numbers else 1, loss=own)[0]
            (found,) = self.new([name], next(sites) if name == SHARE_OF_MEMBER else where, loss=own)
            if name != SHARE_OF_MEMBER:
                numbers.append(self._number[found])
            return found

        for number, report in sorted(enumerate(reports), key=lambda numbered: _is_bound(numbered[1])):
            keyed: Figures[RecordKey] = report.map(key)
            placed[number] = keyed, self._factor_of(keyed, where, loss)
        return [placed[number] for number in range(len(reports))]

    def _factor_of(self, report: Figures[RecordKey], where: str, loss: str) -> RecordKey | None:
        match report:
            case NormClip():
                return self.new(["factor"], where, occurrence=report.norm.occurrence, loss=loss)[0]
            case ValueClip():
                return self.new(["factor"], where, loss=loss)[0]
            case Scalars() | Check():
                return None
            case _:
                assert_never(report)


def _is_bound(report: Figures[Leaf]) -> bool:
    """Whether a report is a bound that a tensor function records by itself."""
    return isinstance(report, Scalars) and len(report.names) == 1 and report.names[0] in BOUNDS


def _key(name: str, occurrence: int, where: str) -> RecordKey:
    return RecordKey.of(name, where) if occurrence == 1 else RecordKey(name, occurrence, where)
