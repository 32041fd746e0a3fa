"""The logarithmic color scale of metrics and norms."""

from __future__ import annotations

import math
import sys
from collections.abc import Iterable
from dataclasses import dataclass

from gradrewrite.viz._theme import NOT_FINITE, STOPS, palette

NARROWEST = 10.0  # strongest over weakest value, at least, so that 5 % more is no other color


@dataclass(frozen=True, slots=True)
class LogScale:
    """A logarithmic scale of colors."""

    weak: float  # value at its beginning
    strong: float  # value at its end; less than ``weak`` for factors

    @classmethod
    def around(cls, values: Iterable[float]) -> LogScale:
        """Return the scale of the positive finite values."""
        positive = [value for value in values if 0 < value < math.inf]
        weak = min([*positive, sys.float_info.max / NARROWEST]) if positive else 1.0
        return cls(weak, max([*positive, weak * NARROWEST]))

    def position(self, value: float) -> float:
        """Return the place of a value, from 0 to 1; 1 if it is not finite."""
        if not 0 < value < math.inf:
            return float(value != 0 or self.strong < self.weak)
        place = (math.log(value) - math.log(self.weak)) / (math.log(self.strong) - math.log(self.weak))
        return min(max(place, 0.0), 1.0)

    def color(self, value: float) -> str:
        """Return the color of a value."""
        return palette()[round(self.position(value) * (STOPS - 1))] if math.isfinite(value) else NOT_FINITE
