"""Rates of clips: the share of clipped steps since the last log."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping

from gradrewrite.ir.record_key import RecordKey


class ClipRates:
    """Counts of clipped steps, for clips that record their factor."""

    def __init__(self) -> None:
        self._steps: dict[str, int] = defaultdict(int)
        self._acted: dict[str, int] = defaultdict(int)

    def add(self, records: Mapping[str, float]) -> None:
        """Count one step; a factor of NaN counts as clipped."""
        clipped = {text.partition("@")[2] for text in records if text.startswith(("bound", "clipped"))}
        for text, factor in records.items():
            if not text.startswith("factor"):
                continue
            key = RecordKey.parse(text)
            if key.record == "factor" and key.site in clipped:
                address = str(RecordKey("rate", key.occurrence, key.site))
                self._steps[address] += 1
                self._acted[address] += factor != 1

    def take(self) -> dict[str, float]:
        """Return ``rate@site`` of the clips since the last call, each in [0, 1]."""
        rates = {address: self._acted[address] / steps for address, steps in self._steps.items()}
        self._steps.clear()
        self._acted.clear()
        return rates
