"""Losses of narrower number formats, from counts by power of two."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, TypeAlias

from gradrewrite._utils.exponent_counts import FIRST, ExponentCounts, split_exponents
from gradrewrite._utils.grouping import grouped
from gradrewrite.diagnostics.run_log import BACKWARD, Run, kind_of

Format: TypeAlias = Literal["float16", "bfloat16", "float8_e4m3fn", "float8_e5m2"]

# Exponents of the smallest number above 0, and of the first power of two up to whose double not all is held.
_RANGES: dict[Format, tuple[int, int]] = {
    "float16": (-24, 15),
    "bfloat16": (-133, 127),
    "float8_e4m3fn": (-9, 8),
    "float8_e5m2": (-16, 15),
}
FORMATS = tuple(_RANGES)
_SHOWN = 5e-5  # smaller shares are 0.00 %
_LAST_STEPS = 20


@dataclass(frozen=True, slots=True)
class Lost:
    """Shares of the finite elements other than 0; 0 of none."""

    underflow: float  # become 0
    overflow: float  # become infinite, NaN or the largest number


def lost_in(counts: ExponentCounts, format: Format, scale: int = 0) -> Lost:
    """Return the shares of elements, times ``2**scale``, lost by a format.

    Elements below half of the smallest number above 0 are flushed. Elements are known by ``[2^e, 2^(e+1))`` alone:
    where a format holds only a part of these it loses all of them (from 2^15 in float16 and float8_e5m2, 2^8 in
    float8_e4m3fn), and where it flushes only ``2^e`` itself (half of the smallest number, which rounds to 0) none. The
    elements of the first and the last count are taken to be at 2^-46 and 2^17.
    """
    smallest, partial = _RANGES[format]
    sizes = list(enumerate(counts.counts, FIRST + scale))
    total = counts.total or 1.0
    under = sum(count for exponent, count in sizes if exponent < smallest - 1)
    return Lost(under / total, sum(count for exponent, count in sizes if exponent >= partial) / total)


def best_scale(counts: ExponentCounts, format: Format) -> int | None:
    """Return the exponent of the best scale; None without non-zero elements.

    It is the largest scale at which nothing overflows: of all such it loses the least to underflow.
    """
    return None if counts.ends is None else _RANGES[format][1] - 1 - counts.ends[1]


def remarks_on(run: Run) -> list[str]:
    """Return a sentence for each kind of site with exponents, on its last steps."""
    found = grouped(
        (kind_of(address.partition("@")[2]), (address, counts))
        for step in run.steps[-_LAST_STEPS:]
        for address, counts in split_exponents(step.records)[1].items()
    )
    return [_remark(kind, members) for kind, members in found.items()]


def _remark(kind: str, members: Sequence[tuple[str, ExponentCounts]]) -> str:
    counts, number = ExponentCounts.sum([one for _, one in members]), len({address for address, _ in members})
    name = f"{kind} x {number}" if number > 1 else members[0][0].partition("@")[2]
    texts = [text for format in FORMATS if (text := _losses(counts, format, kind))]
    return f"Exponents of {name}: {counts}; {'; '.join(texts) or 'no format loses any'}."


def _losses(counts: ExponentCounts, format: Format, kind: str) -> str:
    lost, scale = lost_in(counts, format), best_scale(counts, format)
    if scale is None or not (lost.underflow or lost.overflow):
        return ""
    parts = [f"flush {_percent(lost.underflow)}"] * bool(lost.underflow)
    parts += [f"overflow {_percent(lost.overflow)}"] * bool(lost.overflow)
    what = "loss scale" if kind in BACKWARD else "scale"
    left = _percent(lost_in(counts, format, scale).underflow)
    return f"{format} would {' and '.join(parts)}, at a {what} of 2^{scale} it flushes {left}"


def _percent(share: float) -> str:
    return "under 0.01 %" if 0 < share < _SHOWN else f"{100 * share:.2f} %"
