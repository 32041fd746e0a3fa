"""Forms of saved tensors: numbers against their definitions, element by element."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from gradrewrite.numerics.stored_forms import FORMS, decode, encode

pytestmark = pytest.mark.pure
DTYPES = (torch.float16, torch.bfloat16, torch.float32, torch.float64)
ROUNDED = {"bfloat16": torch.bfloat16, "float32": torch.float32}


def back(x: Tensor, form: str) -> Tensor:
    return decode(encode(x, form), form, x.dtype)


def int8_row(row: list[float]) -> list[float]:
    """The definition of ``Store``, in Python's float64."""
    if not all(map(math.isfinite, row)):
        return [math.nan] * len(row)
    scale = max(map(abs, row)) / 127
    return [round(x / scale) * scale if scale > 0 else 0.0 for x in row]


def float8_number(x: float) -> float:
    """The nearest number with 3 bits behind the first, of at most 448; its subnormals are multiples of 2^-9."""
    if math.isnan(x) or math.isinf(x):
        return math.nan
    if x == 0:
        return x
    step = 2.0 ** max(math.floor(math.log2(abs(x))) - 3, -9)
    found = round(x / step) * step
    return math.nan if abs(found) > 448 else math.copysign(found, x)


NUMBERS = st.floats(-1000, 1000, width=32) | st.sampled_from([0.0, -0.0, 1e-30, 5e-324, math.nan, math.inf, -math.inf])
MATRICES = st.lists(st.lists(NUMBERS, min_size=4, max_size=4), min_size=1, max_size=4)


@given(rows=MATRICES)
def test_int8_is_its_definition(rows: list[list[float]]) -> None:
    got = back(torch.tensor(rows, dtype=torch.float64), "int8")
    wanted = torch.tensor([int8_row(row) for row in rows], dtype=torch.float64)
    torch.testing.assert_close(got, wanted, rtol=1e-12, atol=0, equal_nan=True)


@given(
    row=st.lists(NUMBERS | st.sampled_from([448.0, 463.9, 464.0, 465.0, 1e30, 2.0**-9, 2.0**-10, 1.1e-3]), min_size=1)
)
def test_float8_is_its_definition(row: list[float]) -> None:
    x = torch.tensor(row, dtype=torch.float32)
    wanted = torch.tensor([float8_number(float(n)) for n in x])
    # 464 lies between 448 and what would be the next number.
    wanted = torch.where(x.abs() < 464, wanted, math.nan)
    torch.testing.assert_close(back(x, "float8_e4m3fn"), wanted, rtol=0, atol=0, equal_nan=True)


@pytest.mark.parametrize("form", ROUNDED)
@given(row=st.lists(st.floats(width=64), min_size=1))
def test_rounded_forms_are_those_of_torch(form: str, row: list[float]) -> None:
    x = torch.tensor(row, dtype=torch.float64)
    assert torch.equal(back(x, form).nan_to_num(7), x.to(ROUNDED[form]).double().nan_to_num(7))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("form", FORMS)
def test_shape_dtype_and_strides_are_kept(form: str, dtype: torch.dtype) -> None:
    x = torch.randn(2, 6, 4, 5, dtype=dtype)
    for given_ in (x, x.to(memory_format=torch.channels_last), x.transpose(1, 3), x[0, 0, 0]):
        got = back(given_, form)
        assert (got.shape, got.dtype) == (given_.shape, dtype)
        assert got.stride() == given_.stride()
        torch.testing.assert_close(got.double(), given_.double(), rtol=0.07, atol=0.05)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("shape", [(0, 4), (4,), (1, 1), (3, 1), (2, 0, 4)])
def test_odd_shapes(form: str, dtype: torch.dtype, shape: tuple[int, ...]) -> None:
    x = torch.ones(shape, dtype=dtype)
    assert torch.equal(back(x, form), x)


@pytest.mark.parametrize("dtype", DTYPES)
def test_int8_of_special_rows(dtype: torch.dtype) -> None:
    tiny = torch.finfo(dtype).smallest_normal
    x = torch.tensor(
        [[0, 0, 0], [-0.0, 0, 0], [1, torch.nan, 2], [1, torch.inf, 2], [-1, 0.5, 1], [tiny, 0, -tiny]], dtype=dtype
    )
    got = back(x, "int8")

    assert torch.equal(got[:2], torch.zeros(2, 3, dtype=dtype))
    assert got[2:4].isnan().all()
    torch.testing.assert_close(got[4], x[4], rtol=0, atol=1 / 254 + 0.01)
    assert got[5].isfinite().all()
    assert (got[5] - x[5]).abs().max() <= tiny


@pytest.mark.parametrize("dtype", DTYPES)
def test_large_numbers(dtype: torch.dtype) -> None:
    """Just below the largest number, for the product of a rounded scale and 127 may be rounded up."""
    largest = torch.finfo(dtype).max * (1 - 2.0**-6)
    x = torch.tensor([[largest, -largest, 0.0]], dtype=dtype)

    torch.testing.assert_close(back(x, "int8"), x)
    assert back(x, "float8_e4m3fn").isnan().tolist() == [[True, True, False]]
    for form, narrow in ROUNDED.items():
        assert torch.equal(back(x, form), x.to(narrow).to(dtype))


@pytest.mark.parametrize("form", FORMS)
def test_elements_of_a_form(form: str) -> None:
    x = torch.randn(8, 64)
    parts = encode(x, form)
    sizes = sum(part.numel() * part.element_size() for part in parts)
    assert sizes == 8 * FORMS[form].bytes_per_row(64, x.dtype)
