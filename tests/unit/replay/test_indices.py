"""Indices of elements in words."""

from __future__ import annotations

import itertools

import pytest
import torch
from torch import Tensor

from gradrewrite.replay.indices import indices_text, names_of_dimensions, numbers_text, rows_of, split_rows

pytestmark = pytest.mark.pure


def mask_of(shape: tuple[int, ...], *at: object) -> Tensor:
    mask = torch.zeros(shape, dtype=torch.bool)
    for index in at:
        mask[index] = True
    return mask


@pytest.mark.parametrize(
    ("numbers", "text"),
    [
        ([3], "row 3"),
        ([3, 8], "rows 3 and 8"),
        ([4, 5], "rows 4 and 5"),
        ([4, 5, 6, 7], "rows 4 to 7"),
        ([3, 8, 11], "rows 3, 8 and 11"),
        ([1, 2, 3, 9], "rows 1 to 3 and 9"),
        ([3, 8, 11, 14, 16, 18, 20, 22, 24, 26], "rows 3, 8 and 11, and 7 more"),
        ([0, 2, 4, 6, 8], "rows 0, 2, 4, 6 and 8"),
        (list(range(9)), "rows 0 to 8"),
    ],
)
def test_numbers(numbers: list[int], text: str) -> None:
    assert numbers_text("row", numbers) == text


@pytest.mark.parametrize(
    ("shape", "batch_size", "positions", "names"),
    [
        ((), 4, None, ()),
        ((4,), 4, None, ("row",)),
        ((49,), 4, None, ("element",)),
        ((4, 7), 4, None, ("row", "column")),
        ((4, 7), 4, 7, ("row", "position")),
        ((4, 6), 4, 7, ("row", "position")),
        ((4, 6, 7), 4, 7, ("row", "column", "position")),
        ((7, 4), 4, 7, ("position", "row")),
        ((4, 4), 4, None, ("row", "column")),
        ((6, 5), None, None, ("row", "column")),
        ((4, 7, 9), 4, None, ("row", "position", "column")),
        ((7, 4, 9), 4, None, ("position", "row", "column")),
        ((4, 2, 7, 7), 4, 7, ("row", "dimension 1", "position", "column")),
        ((3, 2, 5), None, None, tuple(f"dimension {d}" for d in range(3))),
    ],
)
def test_names_of_dimensions(
    shape: tuple[int, ...], batch_size: int | None, positions: int | None, names: tuple[str, ...]
) -> None:
    assert names_of_dimensions(shape, batch_size, positions) == names


@pytest.mark.parametrize(
    ("mask", "text"),
    [
        (mask_of(()), ""),
        (mask_of((8, 20, 5)), ""),
        (mask_of((8, 20, 5), (slice(4, 8), slice(15, 20))), "rows 4 to 7, positions 15 to 19"),
        (mask_of((8, 20, 5), (3, 5, 1)), "row 3, position 5, column 1"),
        (mask_of((8, 20, 5), 3), "row 3, every position"),
        (mask_of((8, 20, 5), ()), "all rows, every position"),
        (mask_of((8, 20, 5), (slice(None), 3)), "all rows, position 3"),
        (mask_of((8, 20, 5), (3, 5), (7, 1), (7, 2)), "row 3, position 5; row 7, positions 1 and 2"),
        (mask_of((8, 20, 5), (3, 5), (6, 5), (7, 1)), "rows 3 and 6, position 5; row 7, position 1"),
        (
            mask_of((8, 20, 5), *((n, n) for n in range(8))),
            "row 0, position 0; row 1, position 1; row 2, position 2; and 5 more rows",
        ),
        (mask_of((8, 20, 5), (3, 5, 1), (3, 6, 2)), "row 3, positions 5 and 6"),
        (mask_of((8, 3), 2), "row 2"),
        (mask_of((8, 1), 2), "row 2"),
        (mask_of((8, 3), (slice(None), 2)), "all rows, column 2"),
        (mask_of((8, 8), (2, 5)), "row 2, column 5"),
        (mask_of((8,), 2, 4), "rows 2 and 4"),
        (mask_of((1, 6, 5), (0, 2)), "row 0, position 2"),
        (mask_of((7,), ()), "all elements"),
        (mask_of((49,), 48), "element 48"),
        (mask_of((5, 2, 3, 3), (2, 1)), "dimension 0 at 2, dimension 1 at 1"),
    ],
)
def test_text(mask: Tensor, text: str) -> None:
    batch_size = mask.shape[0] if mask.dim() and mask.shape[0] not in (49, 7, 5) else None
    assert indices_text(mask, names_of_dimensions(mask.shape, batch_size)) == text


def test_rows_come_first() -> None:
    """In a batch with the time in front."""
    assert indices_text(mask_of((7, 4, 9), (5, 2)), ("position", "row", "column")) == "row 2, position 5"


@pytest.mark.parametrize("seed", range(3))
def test_text_is_a_line(seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    for shape, share in itertools.product([(64,), (64, 33), (64, 33, 9), (64, 4, 33, 33)], [0.001, 0.1, 0.5, 0.99]):
        mask = torch.rand(shape, generator=generator) < share
        text = indices_text(mask, names_of_dimensions(shape, 64, 33))
        assert bool(text) == bool(mask.any())
        assert "\n" not in text
        assert len(text) < 200


def test_rows_of() -> None:
    mask = mask_of((4, 6, 3), (1, 5, 0), (3, 2, 2))

    assert rows_of(mask, 0) == (1, 3)
    assert rows_of(mask, 1) == (2, 5)
    assert rows_of(mask, -1) == (0, 2)
    assert rows_of(mask_of((4,), 2), 0) == (2,)


def test_split_rows() -> None:
    mask = mask_of((12, 5), 7)

    assert rows_of(split_rows(mask, 3, 4), 0) == (1,)
    assert rows_of(split_rows(mask, 3, 4), 1) == (3,)
    assert split_rows(mask, 3, 5).shape == (3, 4, 5)
    assert split_rows(mask_of((12, 5, 5)), 3, 5).shape == (3, 4, 5, 5)
    assert split_rows(mask, 3, None).shape == split_rows(mask, 5, 4).shape == split_rows(mask, 12, 5).shape == (12, 5)
