"""Loops in a sequence of ops: stretches that repeat."""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from itertools import islice
from typing import NamedTuple

from gradrewrite._utils.grouping import grouped

_TRIED = 8  # periods at one place: distances to the next ops of the same kind


class Repetition(NamedTuple):
    """A stretch of equal parts, one after the other."""

    first: int  # place of its first op
    period: int  # ops in one part
    turns: int  # number of parts

    @property
    def end(self) -> int:
        """Place behind its last op."""
        return self.first + self.period * self.turns


def find_repetitions(kinds: Sequence[Hashable], least: int = 3) -> list[Repetition]:
    """Return the stretches of ``least`` parts or more, without overlaps, from the first on.

    Of several periods at one place it is the one that covers most. ``kinds`` are equal where ops are.
    """
    places = grouped((kind, place) for place, kind in enumerate(kinds))
    seen = dict.fromkeys(places, 0)  # how many places of a kind were passed
    found: list[Repetition] = []
    end = 0
    for place, kind in enumerate(kinds):
        seen[kind] += 1
        if place < end or len(places[kind]) < least:
            continue
        later = islice(places[kind], seen[kind], seen[kind] + _TRIED)
        loops = [Repetition(place, other - place, _repetitions(kinds, place, other - place)) for other in later]
        long = (loop for loop in loops if loop.turns >= least)
        best = max(long, key=lambda loop: (loop.end, loop.turns), default=None)
        if best is not None:
            found.append(best)
            end = best.end
    return found


def _repetitions(kinds: Sequence[Hashable], first: int, period: int) -> int:
    count, pattern = 1, kinds[first : first + period]
    while kinds[first + count * period : first + (count + 1) * period] == pattern:
        count += 1
    return count
