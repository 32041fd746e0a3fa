"""What narrower formats lose, against casting tensors."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from gradrewrite._utils.exponent_counts import EXPONENTS, FIRST, NUMBER, ExponentCounts
from gradrewrite.diagnostics.number_formats import FORMATS, Format, best_scale, lost_in
from gradrewrite.numerics.exponents import exponents_of

pytestmark = pytest.mark.pure

SCALES = range(-140, 141)


@st.composite
def tensors(draw: st.DrawFn) -> Tensor:
    """Elements over many magnitudes, whole powers of two among them, all within the counts."""
    generator = torch.Generator().manual_seed(draw(st.integers(0, 2**31)))
    low = draw(st.integers(FIRST, 16))
    high = draw(st.integers(low, 17))
    number = draw(st.integers(1, 300))
    exponents = torch.randint(low, high + 1, (number,), generator=generator).double()
    mantissas = 1 + torch.randint(0, 2**20, (number,), generator=generator).double() / 2**20
    whole = torch.rand(number, generator=generator) < draw(st.sampled_from([0.0, 0.2]))
    sign = torch.randint(0, 2, (number,), generator=generator).double() * 2 - 1
    zeros = torch.zeros(draw(st.integers(0, 3)), dtype=torch.float64)
    return torch.cat([torch.where(whole, 1.0, mantissas) * torch.exp2(exponents) * sign, zeros])


def counts_of(x: Tensor) -> ExponentCounts:
    *counts, zero, inf, nan = (float(count) for count in exponents_of(x))
    return ExponentCounts(tuple(counts), zero, inf, nan)


def cast(x: Tensor, format: Format, scale: int) -> tuple[float, float, Tensor]:
    """Shares that really underflow and overflow, and sizes of the elements times the scale."""
    scaled = (x[x != 0] * 2.0**scale).to(torch.float32)
    dtype: torch.dtype = getattr(torch, format)
    narrow, largest = scaled.to(dtype).float(), torch.finfo(dtype).max
    # Some casts to float8_e4m3fn make the largest number in the place of NaN: that is no rounding where it is far off.
    is_lost = ~narrow.isfinite() | ((narrow.abs() == largest) & (scaled.abs() > largest * (1 + 2.0**-4)))
    number = max(1, scaled.numel())
    return float((narrow == 0).sum()) / number, float(is_lost.sum()) / number, scaled.abs().double()


@pytest.mark.parametrize("format", FORMATS)
@given(x=tensors(), scale=st.integers(-20, 20))
def test_shares_are_those_of_a_cast_up_to_one_power_of_two(format: Format, x: Tensor, scale: int) -> None:
    underflow, overflow, sizes = cast(x, format, scale)
    lost, counts = lost_in(counts_of(x), format, scale), counts_of(x)
    top = 2.0 ** math.floor(math.log2(torch.finfo(getattr(torch, format)).max))
    exact_ties = float((sizes == torch.finfo(getattr(torch, format)).smallest_normal * eps(format) / 2).sum())
    number = max(1, sizes.numel())

    assert lost.underflow == pytest.approx(underflow - exact_ties / number, abs=1e-12)
    in_part = float(((sizes >= top) & (sizes < 2 * top)).sum()) / number  # the format holds a part of these
    assert lost.overflow - in_part - 1e-12 <= overflow <= lost.overflow + 1e-12
    assert counts.total == sizes.numel()


def eps(format: Format) -> float:
    return float(torch.finfo(getattr(torch, format)).eps)


@pytest.mark.broad
@pytest.mark.parametrize("format", FORMATS)
@given(x=tensors())
def test_best_scale_is_that_of_a_search(format: Format, x: Tensor) -> None:
    counts = counts_of(x)
    allowed = [scale for scale in SCALES if lost_in(counts, format, scale).overflow == 0]
    least = min(lost_in(counts, format, scale).underflow for scale in allowed)
    found = best_scale(counts, format)
    if found is None:
        assert counts.total == 0
        return

    wanted = max(scale for scale in allowed if lost_in(counts, format, scale).underflow == least)
    if format == "bfloat16":  # whose range is wider than that of the search
        assert lost_in(counts, format, found) == lost_in(counts, format, wanted)
        assert lost_in(counts, format, found + 1).overflow > 0
    else:
        assert found == wanted
        assert cast(x, format, found)[1] == 0


@given(x=tensors())
def test_counts_are_of_the_whole_tensor(x: Tensor) -> None:
    halves = ExponentCounts.sum([counts_of(x[::2]), counts_of(x[1::2])])

    assert halves == counts_of(x)
    assert sum(halves.histogram()) == x.numel()
    assert len(EXPONENTS) == NUMBER + 3


def test_known_figures() -> None:
    x = torch.tensor([2.0**-26, 2.0**-25, 2.0**-24, 1.0, 2.0**15, 2.0**16, 0.0, math.inf, math.nan])
    lost = lost_in(counts_of(x), "float16")

    assert (lost.underflow, lost.overflow) == (1 / 6, 2 / 6)
    assert best_scale(counts_of(x), "float16") == -2
    assert best_scale(counts_of(torch.zeros(3)), "float16") is None
    assert lost_in(counts_of(torch.zeros(3)), "float8_e5m2") == lost_in(counts_of(torch.ones(3)), "bfloat16")
