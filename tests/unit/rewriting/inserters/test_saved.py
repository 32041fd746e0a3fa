"""Names of saved tensors of one value."""

from __future__ import annotations

import pytest

from gradrewrite.rewriting.inserters.saved import _next
from gradrewrite.sites import Site


@pytest.mark.pure
@pytest.mark.parametrize(
    ("name", "following"),
    [
        ("relu", "relu.1"),
        ("relu.1", "relu.2"),
        ("relu.9", "relu.10"),
        ("decoder.weight", "decoder.weight.1"),
        ("0", "0.1"),
    ],
)
def test_the_next_name_counts_up(name: str, following: str) -> None:
    assert _next(Site("saved", name)).name == following
