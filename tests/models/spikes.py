"""Traces with spikes, and the definition of ``SkipSpikes`` in plain Python."""

from __future__ import annotations

import math
import random
from collections import deque


class Reference:
    """Accepts or rejects figures one after the other.

    OLMo-core's ``SkipStepOptimizer`` (a rolling window of 128, more than ``sigma`` standard deviations above the mean,
    no action below ``max(2, window // 2)`` figures) but for two rules: what was rejected is not in the window, and the
    window's half is filled with accepted figures, not with that of this step.
    """

    def __init__(self, sigma: float, window: int) -> None:
        self.sigma, self.least = sigma, max(2, window // 2)
        self.accepted: deque[float] = deque(maxlen=window)

    def limit(self) -> float:
        number = len(self.accepted)
        if number < self.least:
            return math.inf
        mean = math.fsum(self.accepted) / number
        variance = math.fsum((x - mean) ** 2 for x in self.accepted) / (number - 1)
        return mean + self.sigma * math.sqrt(variance)

    def is_spike(self, figure: float, *, skipped: bool = False) -> bool:
        """Whether a figure skips its update; ``skipped`` if another does, so that it is not accepted either."""
        spike = not math.isfinite(figure) or figure > self.limit()
        if not spike and not skipped:
            self.accepted.append(figure)
        return spike


def trace(seed: int, number: int) -> list[float]:
    """Positive figures with drifts, jumps to a new level, single spikes, series of them, inf and NaN."""
    draw = random.Random(seed)
    level = 2.0
    found: list[float] = []
    while len(found) < number:
        kind = draw.random()
        level = min(max(level * math.exp(draw.gauss(-0.0005, 0.004)), 1e-3), 1e3)
        if kind < 0.002:
            level *= draw.choice((0.3, 1.05, 1.3))
        figure = level * math.exp(draw.gauss(0.0, 0.08))
        if kind > 0.985:
            found += [figure * draw.choice((1.5, 2.0, 10.0, 1e6)) for _ in range(draw.choice((1, 1, 1, 5)))]
        elif kind > 0.98:
            found.append(draw.choice((math.inf, math.nan, -math.inf)))
        else:
            found.append(figure)
    return found[:number]
