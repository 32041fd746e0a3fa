"""Fingerprints of tensors, from their records: three of 16 bits each."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping

BITS = 48
_FIRST = re.compile(r"fingerprint_0((?:\.\d+)?@.*)", re.DOTALL)


def with_whole_fingerprints(records: Mapping[str, float]) -> dict[str, float]:
    """Put ``fingerprint@site`` in the place of its three records; all else as it is.

    The number is in [0, 2^48), exact as a float. Sums of parts (of ranks, of micro-batches) are taken modulo 2^48; it
    is NaN if a part is.
    """
    done: dict[str, float] = {}
    parts: set[str] = set()
    for address, value in records.items():
        first = _FIRST.fullmatch(address)
        names = [] if first is None else [f"fingerprint_{n}{first[1]}" for n in range(3)]
        if first is not None and all(name in records for name in names):
            parts.update(names)
            done[f"fingerprint{first[1]}"] = _joined([records[name] for name in names])
        elif address not in parts:
            done[address] = value
    return {address: value for address, value in done.items() if address not in parts}


def is_fingerprint(address: str) -> bool:
    """Return whether the record is a whole fingerprint, as ``with_whole_fingerprints`` names it."""
    return address.partition("@")[0].partition(".")[0] == "fingerprint"


def text_of(fingerprint: float) -> str:
    """Return the number as 12 hexadecimal digits; ``nan`` for NaN."""
    return f"{int(fingerprint):012x}" if math.isfinite(fingerprint) else "nan"


def _joined(parts: list[float]) -> float:
    if not all(map(math.isfinite, parts)):
        return math.nan
    return float(sum(round(part) << 16 * n for n, part in enumerate(parts)) % (1 << BITS))
