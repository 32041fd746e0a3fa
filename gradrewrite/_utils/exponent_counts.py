"""Counts of elements by their power of two, from their records."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate

NUMBER, FIRST = 64, -46  # of the counts by exponent, and the exponent of the first one
EXPONENTS = (*(f"exponents_{n}" for n in range(NUMBER)), "exponents_zero", "exponents_inf", "exponents_nan")
EDGES = (0.0, *(math.ldexp(1.0, FIRST + n) for n in range(NUMBER + 1)))  # of a histogram of absolute values

_FIRST_RECORD = re.compile(r"exponents_0((?:\.\d+)?@.*)", re.DOTALL)


@dataclass(frozen=True, slots=True)
class ExponentCounts:
    """The elements of one or more tensors by size.

    The first count has all smaller elements too, the last one all larger ones.
    """

    counts: tuple[float, ...]  # ``NUMBER`` of them, by ``floor(log2 |x|)`` from ``FIRST``
    zero: float
    inf: float
    nan: float

    @classmethod
    def sum(cls, parts: Sequence[ExponentCounts]) -> ExponentCounts:
        """Return the counts of several tensors together."""
        counts = tuple(map(math.fsum, zip(*(part.counts for part in parts), strict=True)))
        return cls(counts, sum(p.zero for p in parts), sum(p.inf for p in parts), sum(p.nan for p in parts))

    @property
    def total(self) -> float:
        """Number of finite elements other than 0."""
        return math.fsum(self.counts)

    @property
    def ends(self) -> tuple[int, int] | None:
        """Smallest and largest exponent; None of zeros and non-finite elements."""
        known = [FIRST + n for n, count in enumerate(self.counts) if count > 0]
        return (known[0], known[-1]) if known else None

    def histogram(self) -> list[float]:
        """Return the counts between ``EDGES``, that of zeros first."""
        return [self.zero, *self.counts]

    def __str__(self) -> str:
        """Return smallest, largest and median power of two: ``2^-31 .. 2^-9, median 2^-17``."""
        if self.ends is None:
            return "no finite number but 0" if self.zero else "no finite number"
        median = next(FIRST + n for n, below in enumerate(accumulate(self.counts)) if 2 * below >= self.total)
        return f"2^{self.ends[0]} .. 2^{self.ends[1]}, median 2^{median}"


def split_exponents(records: Mapping[str, float]) -> tuple[dict[str, float], dict[str, ExponentCounts]]:
    """Return all other records, and the counts by ``exponents@site`` (``exponents.2@site`` of a second one)."""
    found: dict[str, ExponentCounts] = {}
    parts: set[str] = set()
    for address in records:
        first = _FIRST_RECORD.fullmatch(address)
        names = [] if first is None else [f"{name}{first[1]}" for name in EXPONENTS]
        if first is not None and all(name in records for name in names):
            parts.update(names)
            *counts, zero, inf, nan = (records[name] for name in names)
            found[f"exponents{first[1]}"] = ExponentCounts(tuple(counts), zero, inf, nan)
    return {address: value for address, value in records.items() if address not in parts}, found
