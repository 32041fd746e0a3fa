"""Groups of values by key."""

from __future__ import annotations

import pytest

from gradrewrite._utils.grouping import grouped


@pytest.mark.pure
def test_keys_and_values_keep_their_order() -> None:
    found = grouped([("b", 1), ("a", 2), ("b", 0)])

    assert list(found.items()) == [("b", [1, 0]), ("a", [2])]
    assert grouped([]) == {}
