"""Figures of wholes from those of parts, against the figures of the whole tensor."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from gradrewrite.ir.outputs import MeasuredTensor
from gradrewrite.ir.record_key import RecordKey
from gradrewrite.monitoring.wholes import Summands
from gradrewrite.numerics import measuring
from gradrewrite.numerics.statistics import STATISTICS

NAMES = tuple(STATISTICS)
KEYS = {name: RecordKey.of(name, "error:a") for name in NAMES}

pytestmark = pytest.mark.pure


def figures(x: Tensor) -> dict[RecordKey, float]:
    return dict(zip(KEYS.values(), measuring.pack_eagerly([x], ",".join(NAMES)).tolist(), strict=True))


def measured(size: int | None) -> dict[RecordKey, MeasuredTensor]:
    return {key: MeasuredTensor({name: name}, size, 1) for name, key in KEYS.items()}


@given(
    st.lists(st.lists(st.floats(-1e3, 1e3).map(lambda v: round(v, 2)), max_size=6), min_size=1, max_size=4),
    st.lists(st.sampled_from([math.nan, math.inf, -math.inf]), max_size=1),
    st.booleans(),
)
def test_parts_make_the_whole(parts: list[list[float]], special: list[float], knows_size: bool) -> None:
    tensors = [torch.tensor(part, dtype=torch.float64) for part in [*parts, special]]
    summands = Summands()
    for x in tensors:
        summands.add(figures(x), measured(x.numel() if knows_size else None), None)
    wanted = figures(torch.cat(tensors))
    for key, got in summands.figures().items():
        if key.record in ("skewness", "kurtosis") and not wanted[KEYS["std"]] > 1e-3:
            continue  # of numbers that are equal but for rounding
        assert got == pytest.approx(wanted[key], rel=1e-8, abs=1e-8, nan_ok=True), key


def test_moments_about_a_mean_that_is_far_from_zero() -> None:
    whole = 1e3 + 1e-3 * torch.randn(1000, dtype=torch.float64, generator=torch.Generator().manual_seed(0)) ** 3
    summands = Summands()
    for x in whole.split([1, 499, 500]):
        summands.add(figures(x), measured(x.numel()), None)
    wanted = figures(whole)
    for name in ("mean", "std", "skewness", "kurtosis"):
        assert summands.figures()[KEYS[name]] == pytest.approx(wanted[KEYS[name]], rel=1e-7), name


def test_two_measurements_of_one_site() -> None:
    """The second has ``mean.2`` and ``kurtosis``: what belongs together is not told by the names."""
    first = {RecordKey.of(name, "error:a"): name for name in ("mean", "std")}
    names = ("mean.2", "std.2", "skewness", "kurtosis")
    second = {RecordKey.of(name, "error:a"): name.removesuffix(".2") for name in names}
    known = {key: MeasuredTensor({name: name}, 50, 1, 0) for key, name in first.items()}
    known |= {key: MeasuredTensor({name: name}, 50, 1, 7) for key, name in second.items()}
    x, summands = torch.randn(100, dtype=torch.float64), Summands()
    for part in x.split(50):
        own, clipped = figures(part), figures(part.clamp(-1, 1))
        records = {key: own[KEYS[name]] for key, name in first.items()}
        summands.add(records | {key: clipped[KEYS[name]] for key, name in second.items()}, known, None)
    wanted, of_clipped = figures(x), figures(x.clamp(-1, 1))
    found = summands.figures()
    assert all(found[key] == pytest.approx(wanted[KEYS[name]]) for key, name in first.items())
    assert all(found[key] == pytest.approx(of_clipped[KEYS[name]]) for key, name in second.items())


@pytest.mark.parametrize("size", [1e200, 1e-200, 1.0])
def test_norms_neither_overflow_nor_vanish(size: float) -> None:
    summands, key = Summands(), KEYS["norm"]
    for value in (3.0, 4.0):
        summands.add({key: value * size}, measured(1), None)
    assert summands.figures()[key] == pytest.approx(5.0 * size, rel=1e-14)


@pytest.mark.parametrize(
    ("parts", "wanted"),
    [((3.0, 1e-200), 3.0), ((3e-150, 4e-151), math.hypot(3e-150, 4e-151)), ((3e150, 4e151), math.hypot(3e150, 4e151))],
)
def test_norms_of_unlike_sizes(parts: tuple[float, float], wanted: float) -> None:
    summands, key = Summands(), KEYS["norm"]
    for part in parts:
        summands.add({key: part}, {key: MeasuredTensor({"norm": "norm"}, 1, 1)}, None)

    assert summands.figures()[key] == pytest.approx(wanted, rel=1e-14)


def test_records_without_a_statistic_are_averaged() -> None:
    key, other = RecordKey.of("bound", "error:a"), RecordKey.of("mine", "error:a")
    summands = Summands()
    summands.add({key: 1.0, other: 4.0}, {}, None)
    summands.add({key: 3.0}, {}, None)
    assert summands.figures() == {key: 2.0, other: 4.0}


@pytest.mark.parametrize(("how", "wanted"), [("mean", 3.0), ("max", 4.0), ("sum", 6.0)])
def test_other_ways(how: str, wanted: float) -> None:
    summands, key = Summands(), KEYS["norm"]
    for value in (2.0, 4.0):
        summands.add({key: value}, measured(1), how)
    assert summands.figures()[key] == wanted
    summands.add({key: math.nan}, measured(1), how)
    assert math.isnan(summands.figures()[key])


def test_norms_of_tiny_parts_beside_others() -> None:
    norm, known = KEYS["norm"], {KEYS["norm"]: MeasuredTensor({"norm": "norm"}, 1, 1)}
    for sizes in ([1.0, 2.0**-510], [2.0**-510, 2.0**-510], [2.0**510, 1.0]):
        summands = Summands()
        for size in sizes:
            summands.add({norm: size}, known, None)
        assert summands.figures()[norm] == pytest.approx(math.hypot(*sizes), rel=1e-12)
