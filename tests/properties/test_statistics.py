"""Statistics of any tensor: traced, by the compiled function and op by op, all against Python's exact sums."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Sequence
from fractions import Fraction
from pathlib import Path

import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st
from torch import Tensor

from gradrewrite._utils.exponent_counts import EXPONENTS, FIRST, NUMBER
from gradrewrite.numerics import measuring, native_statistics
from gradrewrite.numerics.moments import MOMENTS, from_raw, to_raw
from gradrewrite.numerics.statistics import COUNTS, FINGERPRINT, STATISTICS, combine_fingerprints, fingerprint_of

NAMES = tuple(name for name, statistic in STATISTICS.items() if statistic.is_native)
ALL = ",".join(NAMES)
SHARES = ("zeros", "saturated_tanh", "saturated_sigmoid")
WORDS = {2: torch.int16, 4: torch.int32, 8: torch.int64}
DTYPES = (torch.float32, torch.float64, torch.bfloat16, torch.float16)
EDGES = (0.0, -0.0, 1.0, -1.0, 0.99, 0.01, 1e30, -1e30, 1e-30, 3e38, 1e-38, 1e-45, 1e300, 1e-300, 5e-324)
SPECIAL = (math.nan, -math.nan, math.inf, -math.inf)


def measured(x: Tensor) -> list[tuple[str, Tensor]]:
    native = native_statistics.figures_of([x], ALL)
    assert native is not None, "tests need a C++ compiler"
    return [
        ("traced", measuring.measure(x, NAMES, is_opaque=False)),
        ("compiled", native),
        ("op by op", measuring.pack_eagerly([x], ALL)),
    ]


@pytest.mark.pure
def test_numbers_of_the_compiled_function_are_those_of_the_table() -> None:
    source = Path(native_statistics.__file__).with_suffix(".cpp").read_text()
    (found,) = re.findall(r"enum Statistic : int64_t \{(.*?)\};", source, re.DOTALL)
    names = [re.sub(r"(?<!^)([A-Z]|\d)", r"_\1", name.strip().removeprefix("k")).lower() for name in found.split(",")]

    assert names == list(NAMES)


def exact(x: Tensor) -> dict[str, float]:
    """The statistics by exact arithmetic, each as its true value rounded once to float64."""
    values: list[float] = x.double().flatten().tolist()
    high, low = (float(torch.tensor(bound, dtype=x.dtype)) for bound in (0.99, 0.01))
    finite, n = all(map(math.isfinite, values)), len(values)
    undefined = n == 0 or any(map(math.isnan, values))
    return {
        "max_abs": math.nan if undefined else max(map(abs, values)),
        "mean_abs": math.nan if undefined else _mean(values) if finite else math.inf,
        "norm": _norm(values) if finite else math.nan if undefined else math.inf,
        "min": math.nan if undefined else min(values),
        "max": math.nan if undefined else max(values),
        "nan": sum(map(math.isnan, values)),
        "inf": sum(map(math.isinf, values)),
        "nonfinite": n - sum(map(math.isfinite, values)),
        "zeros": sum(v == 0 for v in values) / max(n, 1),
        "saturated_tanh": sum(abs(v) >= high for v in values) / max(n, 1),
        "saturated_sigmoid": sum(v >= high or v <= low for v in values) / max(n, 1),
        **dict(zip(FINGERPRINT, fingerprint(x), strict=True)),
        "numel": n,
    }


def fingerprint(x: Tensor) -> list[int]:
    """The fingerprint by Python's whole numbers."""
    size, total = x.element_size(), 0
    for word in x.contiguous().reshape(-1).view(WORDS[size]).tolist():
        v = word + (word >> 48) * 0x9E3779B97F4B if size == 8 else word
        total += v * (2 * v + 1)
    return [total >> 16 * n & 0xFFFF for n in range(3)]


def _mean(values: Sequence[float]) -> float:
    return float(sum(map(Fraction, map(abs, values))) / len(values))


def _norm(values: Sequence[float]) -> float:
    squares = sum(Fraction(v) ** 2 for v in values)
    if squares == 0:
        return 0.0
    shift = 2 * ((squares.numerator.bit_length() - squares.denominator.bit_length()) // 2)
    try:
        return math.ldexp(math.sqrt(squares / Fraction(2) ** shift), shift // 2)
    except OverflowError:
        return math.inf


def agrees(got: float, wanted: float, dtype: torch.dtype, ulps: int) -> bool:
    """Whether a figure is the true value rounded to ``dtype``, but for some units in the last place."""
    rounded = float(torch.tensor(wanted, dtype=torch.float64).to(dtype))
    if math.isnan(rounded) or math.isinf(rounded) or rounded == 0:
        return got == rounded or (math.isnan(got) and math.isnan(rounded))
    info = torch.finfo(dtype)
    return abs(got - wanted) <= ulps * max(info.eps * abs(wanted), info.smallest_normal * info.eps)


def check(x: Tensor) -> None:
    wanted = exact(x)
    dtype = torch.float64 if x.dtype == torch.float64 else torch.float32
    for form, figures in measured(x):
        assert figures.dtype == dtype
        for name, got in zip(NAMES, figures.tolist(), strict=True):
            # The traced mean sums in the type of the figure; the scaled norm of float64 rounds each element.
            ulps = 0 if name in COUNTS else 4 + x.numel() if name == "mean_abs" or dtype == torch.float64 else 1
            if name == "mean_abs" and wanted[name] * x.numel() > torch.finfo(dtype).max and math.isinf(got):
                continue  # that sum may overflow
            precision = torch.float32 if name in SHARES else dtype  # float32 holds a traced share
            assert agrees(got, wanted[name], precision, ulps), (form, name, got, wanted[name])


@given(
    st.sampled_from(DTYPES),
    st.lists(st.sampled_from(EDGES) | st.floats(allow_nan=False, allow_infinity=False), max_size=40),
    st.lists(st.sampled_from(SPECIAL), max_size=2),
)
@example(torch.float32, [1e30] * 9, [])
@example(torch.float32, [1e-30] * 9, [])
@example(torch.float32, [1e-45] * 9, [])
@example(torch.float64, [1e300, 1e-300], [])
@example(torch.float64, [1e-320] * 9, [])
@example(torch.float16, [6e-8] * 9, [])
@example(torch.float16, [65504.0] * 9, [])
@example(torch.bfloat16, [1e-40] * 9, [])
def test_statistics_are_the_exact_ones(dtype: torch.dtype, values: list[float], special: list[float]) -> None:
    check(torch.tensor([*values, *special], dtype=torch.float64).to(dtype))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("size", [1e30, 1e-30, 1.0, 1e-41])
def test_norms_are_rounded_once(dtype: torch.dtype, size: float) -> None:
    x = (torch.randn(3000, dtype=torch.float64) * size).to(dtype)
    wanted = torch.tensor(exact(x)["norm"], dtype=torch.float64).float().item()
    assert [figures[NAMES.index("norm")].item() for _, figures in measured(x)] == [wanted] * 3


@pytest.mark.long
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("where", [0, 2047, 2048, 40_000, 69_999])
@pytest.mark.parametrize("value", [math.nan, math.inf, 1e4])
def test_one_element_among_many_counts(dtype: torch.dtype, where: int, value: float) -> None:
    """Blocks, and the parts of threads, are put together without a gap."""
    x = torch.full((70_000,), 0.5, dtype=dtype)
    x[where] = value
    wanted = exact(x)
    for threads in (1, 2, 3):
        before = torch.get_num_threads()
        torch.set_num_threads(threads)
        try:
            figures = native_statistics.figures_of([x], ALL)
        finally:
            torch.set_num_threads(before)
        assert figures is not None
        assert figures.tolist() == pytest.approx(list(wanted.values()), rel=1e-6, nan_ok=True)


LAYOUTS: dict[str, Callable[[Tensor], Tensor]] = {
    "transposed": lambda x: x.t(),
    "every second": lambda x: x[:, ::2],
    "expanded": lambda x: x[:1].expand(7, -1),
    "channels last": lambda x: x.reshape(2, 3, 5, 4).to(memory_format=torch.channels_last),
    "an offset": lambda x: x[3:],
    "no dimension": lambda x: x[0, 0],
    "negative bit": lambda x: torch._neg_view(x),
}


@pytest.mark.parametrize("layout", LAYOUTS)
def test_layouts_are_read_as_what_they_show(layout: str) -> None:
    x = LAYOUTS[layout](torch.randn(10, 12))
    wanted = exact(x.contiguous().resolve_neg())
    for _, figures in measured(x):
        assert figures.tolist() == pytest.approx(list(wanted.values()), rel=1e-6)


@given(st.lists(st.tuples(st.sampled_from(DTYPES), st.integers(0, 5), st.integers(0, 3)), min_size=1, max_size=6))
@settings(max_examples=20)
def test_many_tensors_in_one_call(drawn: list[tuple[torch.dtype, int, int]]) -> None:
    """Each tensor has statistics of its own, or is taken as it is; checks look at the figures."""
    xs = [torch.arange(n, dtype=dtype) - 1 for dtype, n, _ in drawn]
    entries = tuple(NAMES[start : start + 2] for _, _, start in drawn)
    alone = [
        float(v) for x, names in zip(xs, entries, strict=True) for v in measuring.pack_eagerly([x], ",".join(names))
    ]
    xs += [torch.tensor(7.5), torch.tensor([1.0, -2.0], dtype=torch.float64)]
    statistics = "; ".join(",".join(names) for names in (*entries, (), ()))
    for checked, failed in ((len(alone), 1.0), (len(alone) + 2, 0.0)):
        got = native_statistics.figures_of(xs, statistics, (checked,))
        assert got is not None
        assert got.dtype == torch.float64
        assert got.tolist() == pytest.approx([*alone, 7.5, 1.0, -2.0, failed], rel=1e-6, nan_ok=True)
        eager = measuring.pack_eagerly(xs, statistics, (checked,))
        assert eager.dtype == torch.float64
        assert eager.tolist() == pytest.approx(got.tolist(), rel=1e-6, nan_ok=True)


@pytest.mark.parametrize("dtype", [*DTYPES, torch.complex64], ids=str)
def test_each_flipped_bit_changes_a_fingerprint_in_any_order(dtype: torch.dtype) -> None:
    x = torch.randn(3, 5, generator=torch.Generator().manual_seed(0), dtype=torch.float64).to(dtype)
    x[0, 0] = 0.0
    real = torch.view_as_real(x) if dtype.is_complex else x
    words = real.view(WORDS[real.element_size()]).view(-1)
    bits = 8 * words.element_size()
    same = fingerprint(real)
    assert [int(part) for part in fingerprint_of(x.reshape(-1)[torch.randperm(15)].reshape(5, 3).t())] == same
    for place in range(words.numel()):
        for bit in range(bits):
            flip = 1 << bit if bit < bits - 1 else -1 << bit
            words[place] ^= flip
            assert [int(part) for part in fingerprint_of(x)] != same, (place, bit)
            words[place] ^= flip


@given(st.lists(st.floats(width=32), max_size=30), st.integers(0, 30))
def test_fingerprints_of_parts_add_up(values: list[float], at: int) -> None:
    x = torch.tensor(values, dtype=torch.float32)
    parts = torch.stack([torch.stack(fingerprint_of(part)).float() for part in (x[:at], x[at:])])
    assert combine_fingerprints(parts).tolist() == fingerprint(x)
    assert combine_fingerprints(parts.double().sum(0)).tolist() == fingerprint(x)


def test_changes_by_one_unit_that_cancel_in_a_plain_sum_do_not_here() -> None:
    words = torch.tensor([1000, 2000, 3000], dtype=torch.int32)
    changed = words + torch.tensor([1, -1, 0], dtype=torch.int32)
    assert words.sum() == changed.sum()
    assert fingerprint(words.view(torch.float32)) != fingerprint(changed.view(torch.float32))


@pytest.mark.inductor
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_a_compiled_fingerprint_is_that_of_the_result(dtype: torch.dtype) -> None:
    def halved(x: Tensor) -> tuple[Tensor, Tensor]:
        y = x * 0.7
        return y, measuring.measure(y, FINGERPRINT, is_opaque=False)

    x = torch.randn(6, 50, generator=torch.Generator().manual_seed(0)).to(dtype)[:, ::3]
    y, got = torch.compile(halved, fullgraph=True)(x)
    assert got.tolist() == fingerprint(y)


def exact_moments(values: Sequence[float]) -> list[float]:
    """Mean, standard deviation, skewness and kurtosis by exact arithmetic, each rounded once to float64."""
    if not values or not all(map(math.isfinite, values)):
        return [math.nan] * 4
    n, exact_values = len(values), list(map(Fraction, values))
    mean = sum(exact_values) / n
    second, third, fourth = (sum((v - mean) ** k for v in exact_values) / n for k in (2, 3, 4))
    if second == 0:
        return [float(mean), 0.0, math.nan, math.nan]
    sign = -1.0 if third < 0 else 1.0
    skewness = sign * math.sqrt(third * third / second**3)
    return [
        float(mean),
        _norm(list(map(float, (v - mean for v in exact_values)))) / math.sqrt(n),
        skewness,
        float(fourth / second**2),
    ]


@given(
    st.sampled_from([torch.float32, torch.float64, torch.bfloat16]),
    st.lists(st.floats(-1.0, 1.0), min_size=1, max_size=30),
    st.sampled_from([1.0, 1e-30, 1e30]),
)
@example(torch.float32, [1e-12, 2e-12, -5e-12], 1.0)
@example(torch.float32, [0.25] * 7, 1.0)
@example(torch.float64, [math.nan, 1.0], 1.0)
def test_moments_are_the_exact_ones(dtype: torch.dtype, values: list[float], size: float) -> None:
    x = (torch.tensor(values, dtype=torch.float64) * size).to(dtype)
    wanted = exact_moments(x.double().tolist())
    spread = (max(x.double().tolist()) - min(x.double().tolist())) / max(x.double().abs().max().item(), 1e-300)
    for got in (measuring.measure(x, MOMENTS, is_opaque=False), measuring.pack_eagerly([x], ",".join(MOMENTS))):
        eps = torch.finfo(got.dtype).eps
        largest = x.double().abs().max().item()
        mean, std, *shape = got.tolist()
        assert mean == pytest.approx(wanted[0], abs=50 * eps * largest, nan_ok=True)
        assert std == pytest.approx(wanted[1], rel=1e-5, abs=50 * eps * largest, nan_ok=True)
        if spread > 1e-3 and wanted[1] > 1e-2 * largest:
            assert shape == pytest.approx(wanted[2:], rel=1e-3, abs=1e-3, nan_ok=True)


@given(
    st.lists(
        st.lists(st.floats(-10.0, 10.0).map(lambda v: round(v, 3)), min_size=1, max_size=9), min_size=1, max_size=5
    )
)
def test_moments_of_parts_combine(parts: list[list[float]]) -> None:
    tensors = [torch.tensor(part, dtype=torch.float64) for part in parts]
    raw = torch.stack([to_raw(measuring.measure(x, MOMENTS, is_opaque=False)) for x in tensors])
    weights = torch.tensor([len(part) for part in parts], dtype=torch.float64)
    got = from_raw((raw * weights[:, None]).sum(0) / weights.sum())
    wanted = exact_moments([v for part in parts for v in part])
    assert got[:2].tolist() == pytest.approx(wanted[:2], abs=1e-6)  # of two that are nearly equal: see from_raw
    if wanted[1] > 0.1:
        assert got.tolist() == pytest.approx(wanted, rel=1e-9, abs=1e-9)


@given(
    st.sampled_from(DTYPES),
    st.lists(st.sampled_from((*EDGES, *SPECIAL)) | st.floats(allow_nan=False, width=32), max_size=30),
)
def test_exponents_are_the_exact_ones(dtype: torch.dtype, values: list[float]) -> None:
    x = torch.tensor(values, dtype=torch.float64).to(dtype)
    wanted = [0] * len(EXPONENTS)
    for value in map(abs, x.double().tolist()):
        if math.isnan(value):
            wanted[NUMBER + 2] += 1
        elif value in (0.0, math.inf):
            wanted[NUMBER + (value == math.inf)] += 1
        else:
            wanted[min(max(math.frexp(value)[1] - 1 - FIRST, 0), NUMBER - 1)] += 1
    for got in (measuring.measure(x, EXPONENTS, is_opaque=False), measuring.pack_eagerly([x], ",".join(EXPONENTS))):
        assert got.tolist() == wanted
