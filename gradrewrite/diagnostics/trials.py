"""Trainings from one start on the same batches, as they are told."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence

from gradrewrite.diagnostics.causes import words
from gradrewrite.diagnostics.comparison import mean_of

_FAR = 10.0  # times the loss at the end of another trial


class Trial(tuple[float, ...]):
    """The losses of a trial by step; of a skipped step as it was.

    Attributes:
        skipped: Number of skipped updates.
        is_bad: Whether it ended with a step that is not finite.
    """

    skipped: int
    is_bad: bool

    def __new__(cls, losses: Iterable[float], skipped: int = 0, *, is_bad: bool = False) -> Trial:
        """Create a trial from its losses."""
        trial = super().__new__(cls, losses)
        trial.skipped, trial.is_bad = skipped, is_bad
        return trial

    def __reduce__(self) -> tuple[object, ...]:
        return _trial, (tuple(self), self.skipped, self.is_bad)

    @property
    def end(self) -> float:
        """Mean of the last finite losses, a fifth of them, at most ten; NaN if there are none."""
        finite = [loss for loss in self if math.isfinite(loss)]
        return mean_of(finite[-max(1, min(10, len(finite) // 5)) :]) if finite else math.nan

    def text(self, plain: Trial | None = None) -> str:
        """Steps, losses and skips in one line; ``plain``: without its policy."""
        finite = [loss for loss in self if math.isfinite(loss)]
        parts = [f"{len(self)} step{'s' * (len(self) != 1)}"]
        if finite:
            mean, end = words(mean_of(finite)), words(self.end)
            parts.append(f"loss {words(self[0])} -> {words(self[-1])}, mean {mean}, mean at the end {end}")
        if self.skipped:
            parts.append(f"skipped {self.skipped} of {len(self)}")
        if self.is_bad:
            is_alike = plain is not None and plain.is_bad and len(plain) == len(self)
            why = "as without it: a clip does not mend NaN" if is_alike else "which is not finite"
            parts.append(f"stops in step {len(self) - 1}, {why}")
        return "; ".join(parts)

    def is_of_help(self, plain: Trial, clipped: Trial) -> bool:
        """Whether it is better than without it, and does not end far above a clip of all gradients."""
        is_far = not clipped.is_bad and self.end > _FAR * clipped.end > 0
        return self.is_better_than(plain) and not is_far

    def is_better_than(self, plain: Trial) -> bool:
        """Whether it runs further or ends lower, and makes updates."""
        if self.skipped >= len(self) > 0:
            return False
        if self.is_bad or plain.is_bad:
            return plain.is_bad and len(self) > len(plain)
        return self.end < plain.end


def lines_of(trials: Mapping[str, Sequence[float]]) -> list[str]:
    """Return a line on each trial; the first is the one without a policy."""
    found = {name: one if isinstance(one, Trial) else Trial(one) for name, one in trials.items()}
    plain = next(iter(found.values()), None)
    return [f"{name}: {one.text(None if one is plain else plain)}" for name, one in found.items()]


def _trial(losses: Iterable[float], skipped: int, is_bad: bool) -> Trial:
    return Trial(losses, skipped, is_bad=is_bad)
