"""Calls that made non-finite values, as they are told."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from gradrewrite.replay.noted_calls import BatchSizes, NotedCall, common_value, large_column, operand_of

pytestmark = pytest.mark.pure


def test_sizes_of_a_batch() -> None:
    tokens, x, y = torch.zeros(4, 9, dtype=torch.int64), torch.zeros(4, 6, 3), torch.zeros(4, 7)
    sizes = BatchSizes.of([tokens, x, y, None])

    assert (sizes.rows, sizes.positions) == (4, frozenset((9, 8, 6, 5)))
    assert sizes.positions_in((4, 8)) == 8
    assert sizes.positions_in((4, 7)) is None
    assert BatchSizes.of([torch.tensor(1.0)]) == BatchSizes()


def told(mask: Tensor, sizes: BatchSizes, dims: tuple[str, ...] | None = None) -> tuple[str, tuple[int, ...]]:
    return NotedCall(None, (), mask, dims).places(sizes)


def test_places() -> None:
    mask = torch.zeros(4, 8, dtype=torch.bool)
    mask[1:3, 5] = True
    assert told(mask, BatchSizes(4, frozenset((8,)))) == ("rows 1 and 2, position 5", (1, 2))
    assert told(mask, BatchSizes(4)) == ("rows 1 and 2, column 5", (1, 2))
    assert told(mask.any(), BatchSizes(4)) == ("", ())
    assert told(mask[:, 5], BatchSizes(3)) == ("elements 1 and 2", ())


def test_places_of_attention() -> None:
    """Heads are rows of a score, of several for each row of the batch."""
    rows = torch.zeros(8, 5, dtype=torch.bool)
    rows[2:4, 4] = True
    dims = ("row", "head", "query")
    assert told(rows, BatchSizes(4), dims) == ("row 1, query 4", (1,))
    assert told(rows.view(4, 2, 5), BatchSizes(4), dims) == ("row 1, query 4", (1,))
    assert told(rows.view(4, 2, 5)[:, 0], BatchSizes(4), dims) == ("row 1, query 4", (1,))
    assert told(torch.tensor([False, True]), BatchSizes(2), dims) == ("row 1", (1,))


def test_a_value_that_bad_rows_share() -> None:
    t, kind = torch.tensor([3, 49, 7, 49]), torch.tensor([1, 1, 1, 1])
    assert common_value({"t": t}, (1, 3)) == "t is 49"
    assert common_value({"t": t}, (1,)) == ""  # row 3 has it, and is sound
    assert common_value({"t": t}, (1, 2)) == ""
    assert common_value({"kind": kind}, (0, 1, 2, 3)) == ""
    assert common_value({"t": t.float(), "x": "text"}, (1, 3)) == ""


def test_a_column_on_another_scale() -> None:
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(32, 10, generator=generator)
    assert large_column({"x": x}) == ""
    x[:, 3] *= 240
    assert large_column({"y": torch.zeros(32, 4), "x": x}).startswith("column 3 of x is up to ")
    assert large_column({"x": x[:, 2:4]}) == ""  # too few to tell
    assert large_column({"x": x.int()}) == ""


def test_operands() -> None:
    operand = operand_of("h", torch.tensor([[-1.5, 0.0], [torch.nan, torch.inf]]))
    assert (operand.name, operand.dtype, operand.shape) == ("h", "float32", (2, 2))
    assert (operand.low, operand.high, operand.zeros, operand.nonfinite) == (-1.5, 0.0, 1, 2)
    half = operand_of("h", torch.ones(3).to(torch.float8_e5m2))
    assert (half.dtype, half.low, half.high) == ("float8_e5m2", 1.0, 1.0)
