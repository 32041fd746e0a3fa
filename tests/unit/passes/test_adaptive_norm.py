"""AutoClip and ZClip against the formulas of their papers, by Python's numbers."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

import gradrewrite as gr
from gradrewrite.passes import AutoClip, ZClip

from models.small import Gradients

INF, NAN = math.inf, math.nan
# With outliers, a norm of 0, and norms that are not finite.
NORMS = [1.0, 1.2, 0.9, 1.1, NAN, 1.05, 30.0, 1.0, INF, 0.0, 1.3, 1.15, 80.0, 0.95, 1.0, 5.0]


def two(dtype: torch.dtype) -> Gradients:
    return Gradients(a=torch.zeros(3, dtype=dtype), b=torch.zeros(2, 2, dtype=dtype))


def gradients(norm: float, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Two gradients with a total norm."""
    a, b = torch.tensor([1.0, -2.0, 0.5], dtype=dtype), torch.tensor([[0.1, 2.0], [-1.0, 0.3]], dtype=dtype)
    total = math.sqrt(float(a.square().sum() + b.square().sum()))
    return a * (norm / total), b * (norm / total)


def auto_clip(norms: Sequence[float], percentile: float, history: int) -> list[float]:
    """The bounds by numpy."""
    known: list[float] = []
    bounds = []
    for norm in norms:
        known = [*known, norm][-history:] if math.isfinite(norm) else known
        bounds.append(float(np.percentile(known, percentile)) if known else INF)
    return bounds


def z_clip(norms: Sequence[float], z: float, alpha: float, warmup: int) -> list[float]:
    """The bounds, as the paper's listing has them."""
    first: list[float] = []
    mean = variance = 0.0
    bounds = []
    for norm in norms:
        bound = INF
        if math.isfinite(norm) and len(first) < warmup:
            first.append(norm)
            mean = math.fsum(first) / len(first)
            variance = math.fsum((n - mean) ** 2 for n in first) / len(first)
        elif math.isfinite(norm):
            deviation = math.sqrt(variance)
            score = (norm - mean) / (deviation + 1e-6)
            if score > z:
                bound = mean + z * deviation / (score / z)
            clipped = min(norm, bound)
            mean = alpha * mean + (1 - alpha) * clipped
            variance = alpha * variance + (1 - alpha) * (clipped - mean) ** 2
        bounds.append(bound)
    return bounds


CASES: list[tuple[Any, Callable[[Sequence[float]], list[float]]]] = [
    (AutoClip(), lambda norms: auto_clip(norms, 10.0, 10_000)),
    (AutoClip(60.0, history=5), lambda norms: auto_clip(norms, 60.0, 5)),
    (AutoClip(0.0, history=1), lambda norms: auto_clip(norms, 0.0, 1)),
    (AutoClip(100.0), lambda norms: auto_clip(norms, 100.0, 10_000)),
    (ZClip(warmup=4), lambda norms: z_clip(norms, 2.5, 0.97, 4)),
    (ZClip(1.0, alpha=0.5, warmup=1), lambda norms: z_clip(norms, 1.0, 0.5, 1)),
]


@pytest.mark.long
@pytest.mark.parametrize("kind", ["gradient", "step"])
@pytest.mark.parametrize("fused", [False, True], ids=["foreach", "fused"])
@pytest.mark.parametrize("number", range(len(CASES)))
@pytest.mark.parametrize(("dtype", "rel"), [(torch.float64, 3e-7), (torch.float32, 2e-6)], ids=str)
def test_bounds_are_those_of_the_paper(kind: str, fused: bool, number: int, dtype: torch.dtype, rel: float) -> None:
    action, bounds_of = CASES[number]
    if fused and kind == "gradient":
        return  # the same graph
    model = gr.transform(two(dtype), gr.on(f"{kind}:*", action))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0, fused=fused)
    if kind == "step":
        gr.guard(optimizer, model)
    where = "group:default" if kind == "gradient" else "step:group:default"
    for norm, bound in zip(NORMS, bounds_of(NORMS), strict=True):
        optimizer.zero_grad()
        given = gradients(norm, dtype)
        model(*given).backward()
        optimizer.step()
        records = model.monitor.latest()
        assert records[f"bound@{where}"] == pytest.approx(bound, rel=rel)
        assert records[f"total_norm@{where}"] == pytest.approx(norm, rel=rel, nan_ok=True)
        factor = bound / norm if bound < norm < INF else 1.0
        for parameter, g in zip((model.a, model.b), given, strict=True):
            if factor > 1 - rel:
                assert torch.equal(parameter.grad.nan_to_num(7.0), g.nan_to_num(7.0))
            elif not fused:  # whose kernel divides as it reads
                torch.testing.assert_close(parameter.grad, g * factor, rtol=10 * rel, atol=0)


def test_a_norm_of_float64_is_not_clipped_by_its_own_rounding() -> None:
    model = gr.transform(two(torch.float64), gr.on("gradient:*", AutoClip()))
    given = gradients(1.0 + 2**-30, torch.float64)
    for _ in range(3):
        model.zero_grad()
        model(*given).backward()
        assert torch.equal(model.a.grad, given[0])


def test_groups_have_states_of_their_own() -> None:
    policy = [gr.on("gradient:a", ZClip(1.0, warmup=1)), gr.on("gradient:b", ZClip(1.0, warmup=1, group="b"))]
    model = gr.transform(two(torch.float64), policy)
    for _ in range(2):
        model.zero_grad()
        model(torch.ones(3).double(), torch.full((2, 2), 10.0).double()).backward()
    states = gr.state_dict(model)["states"]
    assert states.keys() == {f"group:{g}/ZClip.{n}" for g in ("default", "b") for n in ("count", "mean", "variance")}
    assert float(states["group:default/ZClip.mean"]) == pytest.approx(math.sqrt(3))
    assert float(states["group:b/ZClip.mean"]) == pytest.approx(20)
    assert int(states["group:b/ZClip.count"]) == 2


@pytest.mark.pure
@pytest.mark.parametrize(
    ("make", "error", "text"),
    [
        (lambda: AutoClip(101.0), ValueError, r"percentile is in \[0, 100\], got 101.0"),
        (lambda: AutoClip(NAN), ValueError, "got nan"),
        (lambda: AutoClip("ten"), TypeError, "percentile is a number, got 'ten'"),
        (lambda: AutoClip(history=0), ValueError, "history must be >= 1, got 0"),
        (lambda: AutoClip(history=1.5), TypeError, "history is a whole number, got 1.5"),
        (lambda: ZClip(0.0), ValueError, "z must be > 0 and finite, got 0.0"),
        (lambda: ZClip(torch.ones(())), TypeError, "z is a number, got a tensor"),
        (lambda: ZClip(alpha=1.0), ValueError, r"alpha is in \[0, 1\), got 1.0"),
        (lambda: ZClip(warmup=0), ValueError, "warmup is a whole number >= 1, got 0"),
    ],
)
def test_settings_are_checked(make: Callable[[], Any], error: type[Exception], text: str) -> None:
    with pytest.raises(error, match=text):
        make()


@pytest.mark.pure
def test_repr() -> None:
    assert repr(AutoClip(25.0, history=100)) == "AutoClip(percentile=25.0, history=100)"
    assert repr(ZClip()) == "ZClip()"
