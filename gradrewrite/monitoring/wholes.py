"""Figures of wholes from those of parts: several graphs of a backward, micro-batches, ranks.

A part's records become numbers that add up over parts, and numbers of which the largest counts; so one sum and one
maximum make the figures of any number of ranks.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal, TypeAlias

import torch
from torch import Tensor

from gradrewrite.ir.moments import MOMENTS, from_raw, to_raw
from gradrewrite.ir.record_key import RecordKey
from gradrewrite.ir.record_layout import MeasuredTensor
from gradrewrite.ir.statistics import STATISTICS

How: TypeAlias = Literal["mean", "max", "sum"]

# Squares of figures are added up in three ranges, or they would leave that of float64; see ``distributed.figures``.
_LARGE, _SMALL, _UNIT = 2.0**500, 2.0**-500, 2.0**600


@dataclass(frozen=True, slots=True)
class Rule:
    """The rule of one record."""

    statistic: str  # a key of ``STATISTICS``; ``""`` for what measures no tensor
    how: How = "mean"  # how records without a statistic combine

    @property
    def is_extreme(self) -> bool:
        """Whether the largest number of all parts counts."""
        if not self.statistic:
            return self.how == "max"
        return STATISTICS[self.statistic].combination.kind in ("max", "min")

    @property
    def num_sums(self) -> int:
        """Number of the numbers that add up: that of the parts comes first."""
        kind = STATISTICS[self.statistic].combination.kind if self.statistic else ""
        return {"norm": 4, "sum": 2}.get(kind, 3) if kind else 2


@dataclass(slots=True)
class Summands:
    """Records of parts that have been added up."""

    rules: dict[RecordKey, Rule] = field(default_factory=dict)
    sums: dict[RecordKey, list[float]] = field(default_factory=dict)
    largest: dict[RecordKey, float] = field(default_factory=dict)  # of the rules with extremes

    def add(
        self, records: Mapping[RecordKey, float], measured: Mapping[RecordKey, MeasuredTensor], how: How | None
    ) -> None:
        """Add a part; where ``how`` is None each measurement follows its statistic."""
        known = measured if how is None else {}
        values = dict(records)
        for first in [key for key in known if known[key].statistic == MOMENTS[0] and key in values]:
            own = [key for name in MOMENTS if (key := _beside(first, name)) in values and key in known]
            values |= zip(own, _moments(to_raw, [values[key] for key in own]), strict=True)
        for key, value in values.items():
            one = known.get(key)
            rule = Rule("" if one is None else one.statistic, how or "mean")
            size, replicas = (1.0, 1) if one is None else (_weight(one, key, records), one.replicas)
            self._add(key, rule, value, size, replicas)

    def _add(self, key: RecordKey, rule: Rule, value: float, size: float, replicas: int) -> None:
        self.rules[key] = rule
        new = [number / replicas for number in _summand(rule, value, size)]
        old = self.sums.get(key)
        self.sums[key] = new if old is None else [a + b for a, b in zip(old, new, strict=True)]
        if rule.is_extreme:
            signed = -value if _is_least(rule) else value
            self.largest[key] = max(self.largest.get(key, -math.inf), -math.inf if math.isnan(value) else signed)

    def figures(self) -> dict[RecordKey, float]:
        """Return the figures of the wholes."""
        found = {key: _figure(rule, self.sums[key], self.largest.get(key)) for key, rule in self.rules.items()}
        for first in [key for key, rule in self.rules.items() if rule.statistic == MOMENTS[0]]:
            own = [key for name in MOMENTS if (key := _beside(first, name)) in found]
            found |= zip(own, _moments(from_raw, [found[key] for key in own]), strict=True)
        for first in [key for key, rule in self.rules.items() if rule.statistic == "fingerprint_0"]:
            found |= _carried(first, found)
        return found


def _beside(key: RecordKey, record: str) -> RecordKey:
    return RecordKey(record, key.occurrence, key.site)


def _weight(measured: MeasuredTensor, key: RecordKey, records: Mapping[RecordKey, float]) -> float:
    """Number of elements of a part; NaN where nobody knows it."""
    if measured.size is not None:
        return float(measured.size)
    return records.get(_beside(key, "numel"), math.nan)


def _summand(rule: Rule, value: float, size: float) -> list[float]:
    """Return 1, for the part, and the numbers that add up."""
    if not rule.statistic:
        return [1.0, (1.0 if math.isnan(value) else 0.0) if rule.how == "max" else value]
    kind = STATISTICS[rule.statistic].combination.kind
    if kind == "mean":
        return [1.0, size, value * size if size else 0.0]
    if kind == "sum":
        return [1.0, value]
    if kind == "norm":
        return [1.0, *_squares(value)]
    return [1.0, size, 1.0 if math.isnan(value) and size else 0.0]


def _squares(value: float) -> list[float]:
    if value > _LARGE:
        return [(value / _UNIT) ** 2, 0.0, 0.0]
    if value < _SMALL:
        return [0.0, 0.0, (value * _UNIT) ** 2]
    return [0.0, value * value, 0.0]  # NaN too


def _figure(rule: Rule, sums: Sequence[float], largest: float | None) -> float:
    number, *own = sums
    if rule.is_extreme:
        assert largest is not None
        is_number = own[-1] == 0 and (own[0] != 0 or not rule.statistic)  # NaN is the extreme of nothing
        return (-largest if _is_least(rule) else largest) if is_number else math.nan
    if not rule.statistic:
        return own[0] / number if rule.how == "mean" else own[0]
    kind = STATISTICS[rule.statistic].combination.kind
    if kind == "norm":
        large, middle, small = own
        if large:  # or NaN
            return math.sqrt(large + middle / _UNIT / _UNIT) * _UNIT
        return math.sqrt(middle + small / _UNIT / _UNIT) if middle else math.sqrt(small) / _UNIT
    if kind == "mean":
        is_share = STATISTICS[rule.statistic].unit == "share"
        size, total = own
        return total / size if size else 0.0 if is_share else math.nan
    return own[0]


def _is_least(rule: Rule) -> bool:
    return bool(rule.statistic) and STATISTICS[rule.statistic].combination.kind == "min"


def _moments(convert: Callable[[Tensor], Tensor], figures: Sequence[float]) -> list[float]:
    converted: list[float] = convert(torch.tensor(figures, dtype=torch.float64)).tolist()
    return converted


def _carried(first: RecordKey, figures: Mapping[RecordKey, float]) -> dict[RecordKey, float]:
    """Return the three records of a fingerprint modulo 2^48, from their sums."""
    keys = [_beside(first, f"fingerprint_{n}") for n in range(3)]
    if not all(math.isfinite(figures[key]) for key in keys):
        return {}
    total = sum(round(figures[key]) << 16 * n for n, key in enumerate(keys))
    return {key: float(total >> 16 * n & 0xFFFF) for n, key in enumerate(keys)}
