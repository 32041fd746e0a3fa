"""Nearest names, for messages."""

from __future__ import annotations

from collections.abc import Sequence
from difflib import SequenceMatcher


def nearest(pattern: str, known: Sequence[str], count: int = 5) -> list[str]:
    """The names most like a pattern, the best first."""
    head, colon, rest = pattern.partition(":")
    wanted = rest if colon else head
    candidates = dict.fromkeys(n for n in known if not colon or n.startswith(f"{head}:"))

    def likeness(name: str) -> float:
        _, colon, rest = name.partition(":")
        return SequenceMatcher(None, wanted, rest if colon else name).ratio()

    return sorted(candidates or dict.fromkeys(known), key=likeness, reverse=True)[:count]
