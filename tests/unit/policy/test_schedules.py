"""Schedules: bounds that follow the step, without a new graph."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import nn

import gradrewrite as gr
from gradrewrite.passes import AdaptiveClip, ClipByGlobalNorm, ClipByNorm, ClipByValue, Scale

INF, NAN = math.inf, math.nan


def model_with(action: Any, kind: str = "gradient") -> Any:
    return gr.transform(nn.Linear(3, 2, bias=False).double(), gr.on(f"{kind}:*", action))


def bounds_of(model: Any, steps: int, optimizer: Any = None, micro: int = 1, name: str = "bound") -> list[float]:
    found = []
    for _ in range(steps):
        model.zero_grad()
        for _ in range(micro):
            model(torch.full((1, 3), 100.0).double()).sum().backward()
        if optimizer is not None:
            optimizer.step()
        found += [v for key, v in model.monitor.latest().items() if key.startswith(f"{name}@")]
    return found


@pytest.mark.pure
def test_values() -> None:
    assert [gr.Schedule.constant(2.0).at(n) for n in (0, 1, 99)] == [2.0] * 3
    assert [gr.Schedule.linear(10.0, 2.0, steps=4).at(n) for n in range(6)] == [10.0, 8.0, 6.0, 4.0, 2.0, 2.0]
    cosine = gr.Schedule.cosine(10.0, 2.0, steps=4)
    wanted = [2 + 4 * (1 + math.cos(math.pi * n / 4)) for n in range(5)]
    assert [cosine.at(n) for n in range(5)] == pytest.approx(wanted, rel=1e-15)
    assert cosine.at(100) == 2.0
    assert gr.Schedule(lambda step: step**2).at(3) == 9.0


@pytest.mark.broad
@pytest.mark.parametrize(
    ("make", "name"),
    [
        (ClipByNorm, "bound"),
        (ClipByGlobalNorm, "bound"),
        (lambda bound: ClipByValue(bound, log=True), "limit"),
    ],
)
def test_bounds_follow_the_number_of_backwards(make: Any, name: str) -> None:
    model = model_with(make(gr.Schedule.linear(1.0, 0.25, steps=3)))
    assert bounds_of(model, 5, name=name) == [1.0, 0.75, 0.5, 0.25, 0.25]
    assert len(model.explain().graphs) == 1
    assert float(model.weight.grad.norm()) == pytest.approx(0.25 * (math.sqrt(6) if name == "limit" else 1))
    assert gr.state_dict(model)["step"] == 5


@pytest.mark.filterwarnings("ignore:bound@gradient.weight was 0 or negative:gradrewrite.RewriteWarning")
def test_infinity_bounds_nothing_and_zero_scales_to_zero() -> None:
    model = model_with(ClipByNorm(gr.Schedule(lambda step: INF if step == 0 else 0.0)))
    bounds_of(model, 1)
    assert float(model.weight.grad.norm()) == pytest.approx(100 * math.sqrt(6))
    bounds_of(model, 1)
    assert torch.count_nonzero(model.weight.grad) == 0


def test_lower_bounds_and_ratios() -> None:
    model = model_with(ClipByValue(gr.Schedule.constant(5.0), min=gr.Schedule(lambda step: 1.0 + step)))
    for step in range(2):
        model.zero_grad()
        model(torch.zeros(1, 3).double()).sum().backward()
        assert torch.equal(model.weight.grad, torch.full((2, 3), 1.0 + step).double())
    model = model_with(AdaptiveClip(gr.Schedule(lambda step: 10.0 ** -(step + 1))))
    for step in range(2):
        model.zero_grad()
        model(torch.full((1, 3), 100.0).double()).sum().backward()
        wanted = model.weight.detach().norm(dim=1) * 10.0 ** -(step + 1)
        torch.testing.assert_close(model.weight.grad.norm(dim=1), wanted, rtol=1e-12, atol=0)


@pytest.mark.broad
@pytest.mark.parametrize("kind", ["gradient", "step"])
@pytest.mark.parametrize("fused", [False, True])
def test_the_steps_of_a_guarded_optimizer_count(kind: str, fused: bool) -> None:
    clip = ClipByGlobalNorm if kind == "step" else ClipByNorm
    model = model_with(clip(gr.Schedule(lambda step: 1.0 / (step + 1))), kind)
    optimizer = gr.guard(torch.optim.SGD(model.parameters(), lr=0.1, fused=fused), model)
    assert bounds_of(model, 3, optimizer, micro=2) == [1.0, 1 / 2, 1 / 3]
    assert gr.state_dict(model)["step"] == 3


@pytest.mark.long
def test_two_optimizers_of_one_model_count_once() -> None:
    net = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3)).double()
    model: Any = gr.transform(net, gr.on("gradient:*", ClipByGlobalNorm(gr.Schedule(lambda step: 1.0 / (step + 1)))))
    optimizers = [gr.guard(torch.optim.SGD(part.parameters(), lr=0.1), model) for part in model]
    for step in range(3):
        model(torch.ones(1, 3).double()).sum().backward()
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
        assert model.monitor.latest()["bound@group:default"] == 1.0 / (step + 1)


def test_factors_and_functions_follow_the_step() -> None:
    net = nn.Linear(2, 2)
    factor = gr.Schedule(float)
    policy = [gr.on("gradient:weight", Scale(factor)), gr.on("gradient:bias", lambda g: g * factor.value.to(g.dtype))]
    model = gr.transform(net, [*policy, gr.on("param:weight", lambda w, old: old + factor.value.float() * (w - old))])
    optimizer = gr.guard(torch.optim.SGD(net.parameters(), lr=1.0), model)
    for step in range(4):
        optimizer.zero_grad()
        before = net.weight.detach().clone()
        model(torch.ones(1, 2)).sum().backward()
        optimizer.step()
        torch.testing.assert_close(net.weight.grad, torch.full((2, 2), float(step)))
        torch.testing.assert_close(net.bias.grad, torch.full((2,), float(step)))
        torch.testing.assert_close(before - net.weight.detach(), torch.full((2, 2), float(step) ** 2))
    assert len(model.explain().graphs) == 1
    assert float(factor.value) == 0.0  # by hand


def test_the_function_runs_once_a_step() -> None:
    asked: list[int] = []

    def bound(step: int) -> float:
        asked.append(step)
        return 1.0

    net = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    model = gr.transform(net, gr.on("gradient:*", ClipByNorm(gr.Schedule(bound))))
    asked.clear()
    for _ in range(3):
        model(torch.ones(1, 2)).sum().backward()
    assert sorted(set(asked)) == [0, 1, 2]
    assert asked.count(1) == asked.count(2) == 1


@pytest.mark.broad
@pytest.mark.filterwarnings("ignore:bound@gradient.weight was 0 or negative:gradrewrite.RewriteWarning")
@pytest.mark.parametrize(
    ("fn", "text"),
    [
        (lambda step: 1.0 - step, r"returned -1.0 at step 2, and a number >= 0 is wanted"),
        (lambda step: 1.0 if step < 2 else NAN, "returned nan at step 2"),
        (lambda step: 1.0 if step < 2 else "much", "returned 'much' at step 2"),
    ],
)
def test_what_is_no_bound_is_an_error(fn: Any, text: str) -> None:
    model = model_with(ClipByNorm(gr.Schedule(fn)))
    bounds_of(model, 2)
    with pytest.raises(gr.PolicyError, match=text):
        bounds_of(model, 1)


@pytest.mark.pure
def test_settings_are_checked() -> None:
    with pytest.raises(TypeError, match="a function of the step, got 3"):
        gr.Schedule(3)
    with pytest.raises(ValueError, match="steps is a whole number >= 1, got 0"):
        gr.Schedule.linear(1.0, 2.0, steps=0)
    with pytest.raises(TypeError, match="takes numbers, got 'a'"):
        gr.Schedule.cosine("a", 2.0, steps=3)
    with pytest.raises(gr.PolicyError, match=r"returned -1\.0 at step 0"):
        ClipByNorm(gr.Schedule.constant(-1.0))
    with pytest.raises(ValueError, match="min must be <= max"):
        ClipByValue(gr.Schedule.constant(1.0), min=2.0)
    assert repr(ClipByNorm(gr.Schedule.cosine(3.0, 1.0, steps=10))) == (
        "ClipByNorm(Schedule.cosine(3.0, 1.0, steps=10))"
    )


def test_one_group_may_have_equal_schedules() -> None:
    def policy(site: gr.Site) -> Any:
        return ClipByGlobalNorm(gr.Schedule.linear(1.0, 0.5, steps=2)) if site.kind == "gradient" else None

    model = gr.transform(nn.Linear(3, 2).double(), policy)
    assert bounds_of(model, 3) == [1.0, 0.75, 0.5]


def test_backwards_count_again_where_the_guard_is_taken_off() -> None:
    model = model_with(ClipByNorm(gr.Schedule(lambda step: 10.0 + step)))
    optimizer = gr.guard(torch.optim.SGD(model.parameters(), lr=0.0), model)
    assert bounds_of(model, 2, optimizer) == [10.0, 11.0]
    gr.unguard(optimizer)
    assert bounds_of(model, 3, optimizer) == [12.0, 13.0, 14.0]
