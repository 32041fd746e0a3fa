"""Rates of clips: the share of clipped steps since the last log."""

from __future__ import annotations

from collections import defaultdict
from dataclasses import replace

from gradrewrite.diagnostics.run_log import Step


class ClipRates:
    """Counts of clipped steps."""

    def __init__(self) -> None:
        self._steps: dict[str, int] = defaultdict(int)
        self._acted: dict[str, int] = defaultdict(int)

    def add(self, step: Step) -> None:
        """Count one step; a factor of NaN counts as clipped."""
        for clip in step.clips:
            address = str(replace(clip.factor, record="rate"))
            self._steps[address] += 1
            self._acted[address] += step.records[str(clip.factor)] != 1

    def take(self) -> dict[str, float]:
        """Return ``rate@site`` of the clips since the last call, each in [0, 1]."""
        rates = {address: self._acted[address] / steps for address, steps in self._steps.items()}
        self._steps.clear()
        self._acted.clear()
        return rates
