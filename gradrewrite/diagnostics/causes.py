"""Outcomes and causes of training runs, as values."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal

Kind = Literal[
    "exploding", "vanishing", "non-finite op", "learning rate", "dead", "saturated", "spike", "bad batch", "one layer",
    "large error", "underflow", "clip too low",
]  # fmt: skip

Outcome = Literal["learns", "stalls", "diverges", "non-finite", "untrained", "unknown"]


@dataclass(frozen=True, slots=True)
class Cause:
    """One cause of a bad outcome.

    Attributes:
        kind: One of ``Kind``.
        site: Where, as ``error:wh``, with the number of the call where only that one is meant; ``""`` if nowhere.
        source: The line of the forward behind it, ``file:line "code"``; ``""`` if it is not known.
        factor: By how much an error grows per layer or call on its way back, or a value exceeds its usual size, or a
            clip leaves; NaN where there is none.
        step: The first step concerned; -1 if none.
        text: One or two sentences with the figures.
        advice: What to change.
        rules: Code of the rules against it; empty where a policy is no remedy, or the run has it.
    """

    kind: Kind
    site: str
    source: str = ""
    factor: float = math.nan
    step: int = -1
    text: str = ""
    advice: str = ""
    rules: tuple[str, ...] = ()
