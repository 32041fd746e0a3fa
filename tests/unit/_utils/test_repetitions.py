"""Stretches that repeat in a sequence."""

from __future__ import annotations

import pytest

from gradrewrite._utils.repetitions import Repetition, find_repetitions


@pytest.mark.pure
@pytest.mark.parametrize(
    ("kinds", "wanted"),
    [
        ("abababab", [Repetition(0, 2, 4)]),
        ("xabcabcabcy", [Repetition(1, 3, 3)]),
        ("aaaa", [Repetition(0, 1, 4)]),
        ("abab", []),  # twice is no loop
        ("aabaabaab", [Repetition(0, 3, 3)]),
        ("abcdefg", []),
        ("aaabcbcbcbc", [Repetition(0, 1, 3), Repetition(3, 2, 4)]),
    ],
)
def test_repetitions_are_found(kinds: str, wanted: list[Repetition]) -> None:
    assert find_repetitions(list(kinds)) == wanted
