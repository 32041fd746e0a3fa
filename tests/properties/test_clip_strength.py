"""The strength of clips of any tensor, against eager arithmetic in float64."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from gradrewrite.ir.reports import Figures, HostBound, Leaf, NormClip, ValueClip
from gradrewrite.numerics.statistics import shares_of
from gradrewrite.passes import ClipByNorm, ClipByValue
from gradrewrite.policy.recording import recording

pytestmark = pytest.mark.pure

DTYPES = st.sampled_from([torch.float32, torch.float64, torch.bfloat16, torch.float16])
NUMBERS = st.floats(-1e4, 1e4, width=16) | st.sampled_from([0.0, -0.0, 1.0, 0.5])
ANY = NUMBERS | st.sampled_from([math.nan, math.inf, -math.inf])


def reported(action: ClipByNorm | ClipByValue, tensor: Tensor) -> tuple[Figures[float], Tensor]:
    with recording(tensor.device) as found:
        after = action.apply(tensor)

    def number(_: str, leaf: Leaf) -> float:
        return float(leaf.value if isinstance(leaf, HostBound) else found.outputs[leaf.number])

    (report,) = found.reports
    assert isinstance(report, NormClip | ValueClip)
    return report.map(number), after


def norm_clip(action: ClipByNorm, tensor: Tensor) -> tuple[float, Tensor]:
    clip, after = reported(action, tensor)
    assert isinstance(clip, NormClip)
    return clip.factor(), after


def value_clip(action: ClipByValue, tensor: Tensor) -> tuple[float, float, Tensor]:
    clip, after = reported(action, tensor)
    assert isinstance(clip, ValueClip)
    return clip.factor(), clip.share, after


@given(st.lists(ANY, max_size=40), st.floats(1e-3, 1e5), DTYPES)
def test_factor_of_a_clip_by_norm(values: list[float], bound: float, dtype: torch.dtype) -> None:
    tensor = torch.tensor(values, dtype=dtype)
    factor, after = norm_clip(ClipByNorm(bound), tensor)

    assert 0 < factor <= 1
    if torch.equal(after, tensor) or factor == 1:
        assert torch.equal(after.nan_to_num(), tensor.nan_to_num())
        return
    before = tensor.double().norm()
    assert factor == pytest.approx(bound / float(before), rel=1e-6)
    rounding = torch.finfo(dtype).eps
    slack = len(values) * 1e-7 * float(torch.finfo(dtype).smallest_normal > 1e-30)  # elements that become subnormal
    assert float(after.double().norm() / before) == pytest.approx(factor, rel=2 * rounding + 1e-6, abs=slack)


@given(st.lists(NUMBERS, max_size=40), st.floats(-100, 100), st.floats(0, 200), DTYPES)
def test_strength_of_a_clip_by_value(values: list[float], low: float, width: float, dtype: torch.dtype) -> None:
    tensor = torch.tensor(values, dtype=dtype)
    factor, share, after = value_clip(ClipByValue(low + width, min=low, log=True), tensor)
    before, changed = tensor.double(), after != tensor

    assert share == pytest.approx(float(changed.double().mean()) if values else 0.0, rel=1e-6)
    if not changed.any() or not before.any():
        assert factor == 1
    else:
        assert factor == pytest.approx(float(after.double().norm() / before.norm()), rel=1e-6)


@given(st.lists(ANY, max_size=20), st.floats(0, 100), DTYPES)
def test_what_is_not_finite(values: list[float], bound: float, dtype: torch.dtype) -> None:
    tensor = torch.tensor(values, dtype=dtype)
    factor, share, after = value_clip(ClipByValue(bound, log=True), tensor)
    is_changed = bool(((after != tensor) & ~tensor.isnan()).any())

    assert 0 <= share <= 1
    assert (share > 0) == is_changed
    if not is_changed:
        assert factor == 1
    elif tensor.isnan().any():
        assert math.isnan(factor)
    elif tensor.isinf().any():
        assert factor == 0


@given(st.lists(st.floats(0, width=32), min_size=1, max_size=10), st.sampled_from([0.5, 1.0, 2.0, 3.0, math.inf]))
def test_shares_add_up_to_one(norms: list[float], order: float) -> None:
    shares = shares_of(torch.tensor(norms, dtype=torch.float32), order)

    assert bool((shares >= 0).all())
    assert float(shares.double().sum()) == pytest.approx(float(any(norms)), rel=1e-5)
    if not any(map(math.isinf, norms)) and any(norms):
        assert float(shares[norms.index(max(norms))]) == float(shares.max())
