"""Parts of a value by the rows or tokens of a batch."""

from __future__ import annotations

import pytest
import torch

from gradrewrite.rewriting.batch_errors import by_part

pytestmark = pytest.mark.pure


@pytest.mark.parametrize(
    ("shape", "batch", "parts"),
    [
        ((4,), (4,), (4,)),
        ((4, 7, 9), (4,), (4, 7, 9)),
        ((7, 9), (4,), None),
        ((), (4,), None),
        ((4, 7, 9), (4, 7), (28, 9)),
        ((4, 7), (4, 7), (28,)),
        ((7, 4, 9), (4, 7), (28, 9)),
        ((28, 9), (4, 7), (28, 9)),
        ((4, 9, 7), (4, 7), None),
        ((1, 28, 9), (28,), (28, 9)),
        ((1, 28, 9), (1, 28), (28, 9)),
        ((28, 9), (1, 28), (28, 9)),
        ((), (4, 7), None),
    ],
)
def test_by_part(shape: tuple[int, ...], batch: tuple[int, ...], parts: tuple[int, ...] | None) -> None:
    found = by_part(torch.zeros(shape), batch)
    assert (None if found is None else tuple(found.shape)) == parts


def test_the_time_in_front() -> None:
    value = torch.arange(28).reshape(7, 4)
    found = by_part(value, (4, 7))
    assert found is not None
    assert torch.equal(found, value.T.flatten())
