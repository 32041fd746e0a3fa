"""Bounds that are tensors: negative ones act as 0, NaN bounds nothing, and numbers of other libraries are numbers."""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable
from fractions import Fraction
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import gradrewrite as gr
from gradrewrite.passes import (
    L2,
    AdaptiveClip,
    AllReduce,
    AutoClip,
    ClipByGlobalNorm,
    ClipByNorm,
    ClipByValue,
    ClipPerExample,
    DecayWeights,
    Scale,
    ZClip,
)
from gradrewrite.testing import assert_matches_eager

Make = Callable[[Tensor], Any]
CLIPS: dict[str, Make] = {
    "norm": ClipByNorm,
    "global": ClipByGlobalNorm,
    "value": ClipByValue,
    "value, log": lambda bound: ClipByValue(bound, log=True),
    "adaptive": AdaptiveClip,
    "per example": lambda bound: ClipPerExample(bound, loss_reduction="sum"),
}
RECORDED = ("norm", "global", "value, log")


def net() -> nn.Module:
    torch.manual_seed(0)
    return nn.Linear(3, 2, bias=False)


def gradient(model: Any, optimizer: Any = None) -> Tensor:
    """The gradient of the weight, as it is used; without clips it is a matrix of twos."""
    model.zero_grad()
    model(torch.full((2, 3), 1.0)).sum().backward()
    if optimizer is not None:
        optimizer.step()
    assert model.weight.grad is not None
    return model.weight.grad.clone()


def kinds_of(name: str) -> list[str]:
    return ["gradient"] if name == "per example" else ["gradient", "step"]


CASES = [(name, kind) for name in CLIPS for kind in kinds_of(name)]


@pytest.mark.broad
@pytest.mark.parametrize("compiled", [False, pytest.param(True, marks=[pytest.mark.inductor, pytest.mark.slow])])
@pytest.mark.parametrize(("name", "kind"), CASES)
def test_negative_bounds_act_as_zero_and_nan_bounds_nothing(name: str, kind: str, compiled: bool) -> None:
    bound = torch.tensor(1e6)
    model = gr.transform(net(), gr.on(f"{kind}:*", CLIPS[name](bound)))
    if compiled:
        model.compile()
    optimizer = gr.guard(torch.optim.SGD(model.parameters(), lr=0.0), model) if kind == "step" else None
    whole = torch.full((2, 3), 2.0)
    for number, wanted in (
        (1e6, whole),
        (-1.0, whole * 0),
        (math.nan, whole),
        (0.0, whole * 0),
        (-math.inf, whole * 0),
    ):
        bound.fill_(number)
        assert torch.equal(gradient(model, optimizer), wanted), number
    assert len(model.explain().graphs) == 1


@pytest.mark.long
@pytest.mark.parametrize(("name", "kind"), [(n, k) for n, k in CASES if n != "value"])
def test_bounds_that_are_valid_act_as_before(name: str, kind: str) -> None:
    """A tensor bounds exactly as the number does, and at the bound not a bit changes."""
    for number in (0.3, 1.0, 2.0, 2 * math.sqrt(6), 1e6):
        results = []
        for bound in (number, torch.tensor(number, dtype=torch.float64)):
            model = gr.transform(net(), gr.on(f"{kind}:*", CLIPS[name](bound)))
            optimizer = gr.guard(torch.optim.SGD(model.parameters(), lr=0.0), model) if kind == "step" else None
            results.append(gradient(model, optimizer))
        assert torch.equal(*results), number


def test_two_bounds_by_value() -> None:
    """With ``min`` the bounds have any sign; where min > max, max holds; NaN bounds nothing on its side."""
    low, high = torch.tensor(-1.0), torch.tensor(5.0)
    model = gr.transform(net(), gr.on("gradient:*", ClipByValue(high, min=low)))
    twos = torch.full((2, 3), 2.0)
    for a, b, wanted in ((-1.0, 5.0, 2.0), (-3.0, -2.5, -2.5), (3.0, 5.0, 3.0), (3.0, 1.0, 1.0),
                         (math.nan, 1.0, 1.0), (3.0, math.nan, 3.0), (math.nan, math.nan, 2.0)):  # fmt: skip
        low.fill_(a)
        high.fill_(b)
        assert torch.equal(gradient(model), twos * (wanted / 2)), (a, b)


def test_elements_that_are_no_number_pass_a_live_bound() -> None:
    g = torch.tensor([math.nan, -math.inf, -1.0, -0.0, 0.0, 1.0, math.inf])
    got = ClipByValue(torch.tensor(1.0)).apply(g)
    torch.testing.assert_close(got, torch.tensor([math.nan, -1, -1, -0.0, 0.0, 1, 1]), rtol=0, atol=0, equal_nan=True)
    assert math.copysign(1.0, got[3].item()) == -1.0
    assert torch.equal(ClipByValue(torch.tensor(math.nan)).apply(g)[1:], g[1:])


@pytest.mark.broad
@pytest.mark.parametrize("name", RECORDED)
def test_a_bound_that_is_not_positive_is_warned_of_once(name: str) -> None:
    bound = torch.tensor(1.0)
    model = gr.transform(net(), gr.on("gradient:*", CLIPS[name](bound)))
    gradient(model)
    assert min(model.monitor.latest().values()) > 0
    bound.fill_(-1.0)
    gradient(model)
    where = "group:default" if name == "global" else "gradient:weight"
    key = "limit" if name == "value, log" else "bound"
    with pytest.warns(gr.RewriteWarning, match=f"{key}@{where} was 0 or negative at step 1"):
        found = model.monitor.latest()
    assert found[f"factor@{where}"] == 0.0
    assert found[f"{key}@{where}"] == 0.0
    gradient(model)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert model.monitor.history(f"factor@{where}")[1:] == [0.0, 0.0]


def test_a_bound_that_is_not_positive_at_a_step_site_is_warned_of() -> None:
    bound = torch.tensor(1.0)
    model = gr.transform(net(), gr.on("step:*", ClipByGlobalNorm(bound)))
    optimizer = gr.guard(torch.optim.SGD(model.parameters(), lr=0.1, fused=True), model)
    bound.fill_(-1.0)
    before = model.weight.detach().clone()
    assert torch.equal(gradient(model, optimizer), torch.zeros(2, 3))
    assert torch.equal(model.weight, before)
    with pytest.warns(gr.RewriteWarning, match="bound@step:group:default was 0 or negative at step 0"):
        assert model.monitor.latest()["factor@step:group:default"] == 0.0


@pytest.mark.parametrize("name", CLIPS)
def test_a_bound_that_is_negative_from_the_start_is_refused(name: str) -> None:
    bound = torch.tensor(-1.0)
    policy = [gr.on("nothing", Scale(1.0)), [gr.on("gradient:*", [Scale(2.0), CLIPS[name](bound)])]]
    for give in (lambda: gr.transform(net(), policy), lambda: gr.backend(policy)):
        with pytest.raises(ValueError, match=r"gr.on\('gradient:\*', ...\).*-1"):
            give()
    bound.fill_(math.nan)
    gr.backend(policy)


def test_a_bound_that_is_negative_when_the_optimizer_is_guarded_is_refused() -> None:
    bound = torch.tensor(1.0)
    model = gr.transform(net(), gr.on("step:*", ClipByNorm(bound)))
    bound.fill_(-2.0)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with pytest.raises(ValueError, match="max_norm must not be negative, and the tensor is -2"):
        gr.guard(optimizer, model)
    bound.fill_(2.0)
    gr.guard(optimizer, model)


def test_min_above_max_is_refused_where_a_tensor_is_one_of_them() -> None:
    with pytest.raises(ValueError, match="min must be <= max"):
        gr.backend(gr.on("gradient:*", ClipByValue(torch.tensor(1.0), min=2.0)))
    gr.backend(gr.on("gradient:*", ClipByValue(torch.tensor(-1.0), min=-2.0)))


@pytest.mark.inductor
@pytest.mark.slow
@pytest.mark.parametrize("name", ["norm", "global", "value, log", "adaptive"])
def test_the_eager_oracle_has_the_same_bounds(name: str) -> None:
    for number in (0.5, -1.0, math.nan):
        rule = gr.on("gradient:*", CLIPS[name](torch.tensor(number, dtype=torch.float64)))
        given = net().double(), lambda site, rule=rule: rule(site), torch.ones(2, 3, dtype=torch.float64)
        if number < 0 and name != "adaptive":
            with pytest.warns(gr.RewriteWarning, match="was 0 or negative"):
                assert_matches_eager(*given)
        else:
            assert_matches_eager(*given)


NUMBERS = [np.float32(0.5), np.float64(0.5), np.float16(0.5), Fraction(1, 2)]


@pytest.mark.pure
@pytest.mark.parametrize("number", NUMBERS, ids=lambda n: type(n).__name__)
def test_numbers_of_other_libraries(number: Any) -> None:
    """They are stored as Python's: equal values, hashes and representations."""
    pairs = [
        (ClipByNorm(number, norm_type=number), ClipByNorm(0.5, norm_type=0.5)),
        (ClipByGlobalNorm(number), ClipByGlobalNorm(0.5)),
        (ClipByValue(number, min=-number), ClipByValue(0.5, min=-0.5)),
        (ClipPerExample(number), ClipPerExample(0.5)),
        (AdaptiveClip(number, eps=number), AdaptiveClip(0.5, eps=0.5)),
        (AutoClip(number), AutoClip(0.5)),
        (ZClip(number, alpha=number), ZClip(0.5, alpha=0.5)),
        (Scale(number), Scale(0.5)),
        (L2(number), L2(0.5)),
        (DecayWeights(number), DecayWeights(0.5)),
        (AllReduce(bucket_mb=number), AllReduce(bucket_mb=0.5)),
    ]
    for got, wanted in pairs:
        assert (got, hash(got), repr(got)) == (wanted, hash(wanted), repr(wanted))
    assert type(ClipByNorm(number).max_norm) is float
    schedule = gr.Schedule.linear(number, 2 * number, steps=np.int64(4))
    assert repr(schedule) == "Schedule.linear(0.5, 1.0, steps=4)"
    value = gr.Schedule(lambda step: number).at(0)
    assert (value, type(value)) == (0.5, float)
    assert repr(gr.State((np.int64(2),), number)) == "State((2,), 0.5, torch.float32)"


@pytest.mark.pure
def test_whole_numbers_of_other_libraries() -> None:
    got = (AutoClip(history=np.int32(5)), ZClip(warmup=np.int64(3)), ClipPerExample(1.0, batch_dim=np.int64(1)))
    assert got == (AutoClip(history=5), ZClip(warmup=3), ClipPerExample(1.0, batch_dim=1))
    assert gr.Monitor(np.int64(10)).capacity == 10
    for wrong in (np.bool_(True), np.float32(math.nan), np.complex64(1), "1"):
        with pytest.raises((TypeError, ValueError)):
            ClipByNorm(wrong)
    with pytest.raises(ValueError, match="must be > 0"):
        ClipByNorm(np.float32(-1.0))
