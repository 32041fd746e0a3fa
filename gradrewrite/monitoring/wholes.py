"""Figures of wholes from those of parts: several graphs of a backward, micro-batches, ranks.

A part's records become numbers that add up over parts, and numbers of which the largest counts; so one sum and one
maximum make the figures of any number of ranks. Of central moments the means are summed first.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal, TypeAlias

from gradrewrite.distributed.figures import Combination, figure, summand
from gradrewrite.ir.outputs import MeasuredTensor
from gradrewrite.ir.record_key import RecordKey
from gradrewrite.numerics.moments import MOMENTS
from gradrewrite.numerics.statistics import STATISTICS

How: TypeAlias = Literal["mean", "max", "sum"]


@dataclass(frozen=True, slots=True)
class Rule:
    """The rule of one record."""

    statistic: str  # a key of ``STATISTICS``; ``""`` for what measures no tensor
    how: How = "mean"  # how records without a statistic combine

    @property
    def combination(self) -> Combination:
        """The combination of figures; without a tensor each part has one element."""
        return STATISTICS[self.statistic].combination if self.statistic else Combination(self.how)


@dataclass(slots=True)
class Summands:
    """Sums of the records of parts."""

    rules: dict[RecordKey, Rule] = field(default_factory=dict)
    sums: dict[RecordKey, list[float]] = field(default_factory=dict)
    largest: dict[RecordKey, float] = field(default_factory=dict)  # of the rules with extremes
    replicas: dict[RecordKey, int] = field(default_factory=dict)  # how many ranks have the same tensor, if several
    # The central moments of each measurement, by the keys of its records.
    moments: dict[tuple[RecordKey, ...], CentralMoments] = field(default_factory=dict)

    def add(
        self, records: Mapping[RecordKey, float], measured: Mapping[RecordKey, MeasuredTensor], how: How | None
    ) -> None:
        """Add a part; without ``how`` each measurement follows its statistic."""
        known = measured if how is None else {}
        together: dict[object, list[RecordKey]] = {}
        for key in (key for key in records if key in known and _statistic(known, key) in MOMENTS):
            together.setdefault((key.site, known[key].number), []).append(key)
        for found in together.values():
            keys = tuple(sorted(found, key=lambda key: MOMENTS.index(_statistic(known, key))))
            part = CentralMoments.of(_weight(known[keys[0]], keys[0], records), [records[key] for key in keys])
            self.moments[keys] = self.moments.get(keys, CentralMoments()).with_part(part)
        for key, value in records.items():
            one = known.get(key)
            rule = Rule(_statistic(known, key), how or "mean")
            self.rules[key] = rule
            if one is not None and one.replicas > 1:
                self.replicas[key] = one.replicas
            if rule.statistic not in MOMENTS:
                self._add(key, rule, value, 1.0 if one is None else _weight(one, key, records))

    def _add(self, key: RecordKey, rule: Rule, value: float, size: float) -> None:
        new, old, how = summand(value, size, rule.combination), self.sums.get(key), rule.combination
        self.sums[key] = new if old is None else [a + b for a, b in zip(old, new, strict=True)]
        if how.is_extreme:
            signed = -value if how.kind == "min" else value
            self.largest[key] = max(self.largest.get(key, -math.inf), -math.inf if math.isnan(value) else signed)

    def figures(self) -> dict[RecordKey, float]:
        """Return the figures of the wholes."""
        of_moments = {key: v for keys, own in self.moments.items() for key, v in zip(keys, own.figures(), strict=False)}
        found = {
            key: of_moments[key] if key in of_moments else self._figure(key, rule) for key, rule in self.rules.items()
        }
        for first in [key for key, rule in self.rules.items() if rule.statistic == "fingerprint_0"]:
            found |= _carried(first, found)
        return found

    def _figure(self, key: RecordKey, rule: Rule) -> float:
        is_share = bool(rule.statistic) and STATISTICS[rule.statistic].unit == "share"
        return figure(self.sums[key], self.largest.get(key), rule.combination, 0.0 if is_share else math.nan)


@dataclass(frozen=True, slots=True)
class CentralMoments:
    """Number of elements, mean, and sums of powers of the distances from the mean."""

    size: float = 0.0
    mean: float = 0.0
    second: float = 0.0
    third: float = 0.0
    fourth: float = 0.0

    @classmethod
    def of(cls, size: float, figures: Sequence[float]) -> CentralMoments:
        """Return those of a part from its first ``MOMENTS``; others are 0."""
        mean, std, skewness, kurtosis = (*figures, 0.0, 0.0, 0.0)[:4]
        if not size:
            return cls()
        # Of equal elements the last two are NaN.
        third, fourth = (0.0, 0.0) if std == 0 else (skewness * std**3, kurtosis * std**4)
        return cls(size, mean, size * std * std, size * third, size * fourth)

    def with_part(self, other: CentralMoments) -> CentralMoments:
        """Return those of both together.

        After Pébay, "Formulas for robust, one-pass parallel computation of covariances and arbitrary-order statistical
        moments", 2008.
        """
        if not self.size or not other.size:
            return other if not self.size else self
        size = self.size + other.size
        mean = self.mean + (other.mean - self.mean) * (other.size / size)
        a, b = self.about(mean), other.about(mean)
        return CentralMoments(size, mean, a.second + b.second, a.third + b.third, a.fourth + b.fourth)

    def about(self, center: float) -> CentralMoments:
        """Return sums of powers of the distances from another number."""
        d, n = self.mean - center, self.size
        third = self.third + 3 * d * self.second + n * d**3
        fourth = self.fourth + 4 * d * self.third + 6 * d * d * self.second + n * d**4
        return CentralMoments(n, center, self.second + n * d * d, third, fourth)

    def figures(self) -> list[float]:
        """Return ``MOMENTS``; NaN of no elements."""
        if not self.size:
            return [math.nan] * len(MOMENTS)
        variance = self.second / self.size
        if variance == 0:
            return [self.mean, 0.0, math.nan, math.nan]
        third, fourth = self.third / self.size, self.fourth / self.size
        return [self.mean, math.sqrt(variance), third / variance**1.5, fourth / variance**2]


def _beside(key: RecordKey, record: str) -> RecordKey:
    return RecordKey(record, key.occurrence, key.site)


def _statistic(measured: Mapping[RecordKey, MeasuredTensor], key: RecordKey) -> str:
    """Return the statistic of a record; ``""`` without a tensor."""
    return measured[key].statistics[key.record] if key in measured else ""


def _weight(measured: MeasuredTensor, key: RecordKey, records: Mapping[RecordKey, float]) -> float:
    """Number of elements of a part; NaN if unknown."""
    if measured.size is not None:
        return float(measured.size)
    return records.get(_beside(key, "numel"), math.nan)


def _carried(first: RecordKey, figures: Mapping[RecordKey, float]) -> dict[RecordKey, float]:
    """Return the three records of a fingerprint modulo 2^48, from their sums."""
    keys = [_beside(first, f"fingerprint_{n}") for n in range(3)]
    if not all(math.isfinite(figures[key]) for key in keys):
        return {}
    total = sum(round(figures[key]) << 16 * n for n, key in enumerate(keys))
    return {key: float(total >> 16 * n & 0xFFFF) for n, key in enumerate(keys)}
