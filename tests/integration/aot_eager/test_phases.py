"""A new phase of training: the guard of a new optimizer goes on where that of a deleted one stood."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

import gradrewrite as gr
from gradrewrite.passes import AutoClip, CheckFinite, ClipByGlobalNorm, ClipByNorm, Observe

WAYS = ["deleted", "reassigned", "unguarded", "garbage", "reassigned garbage"]


@pytest.fixture(autouse=True)
def no_collector() -> Iterator[None]:
    """What lies in a cycle stays until somebody collects it."""
    gc.collect()
    gc.disable()
    yield
    gc.enable()


def harmonic(step: int) -> float:
    return 1.0 / (step + 1)


def make(model: Any, parameters: Any = None, cyclic: bool = False) -> torch.optim.Optimizer:
    optimizer = torch.optim.SGD(model.parameters() if parameters is None else parameters, lr=0.1)
    if cyclic:
        optimizer.myself = optimizer  # type: ignore[attr-defined]
    return gr.guard(optimizer, model)


def phases(model: Any, way: str, number: int = 3) -> Iterator[torch.optim.Optimizer]:
    """The optimizer of each phase, with that of the phase before gone."""
    cyclic = way.endswith("garbage")
    optimizer = make(model, cyclic=cyclic)
    for phase in range(number):
        yield optimizer
        if phase == number - 1:
            return
        if way == "unguarded":
            gr.unguard(optimizer)
        if way.startswith("reassigned"):
            optimizer = make(model, cyclic=cyclic)
        else:
            del optimizer
            optimizer = make(model, cyclic=cyclic)


def step(model: Any, optimizer: torch.optim.Optimizer, size: float = 1.0) -> dict[str, float]:
    optimizer.zero_grad()
    model(torch.full((1, 3), size)).sum().backward()
    optimizer.step()
    found: dict[str, float] = model.monitor.latest()
    return found


@pytest.mark.long
@pytest.mark.parametrize("kind", ["gradient", "step"])
@pytest.mark.parametrize("way", WAYS)
def test_schedules_go_on(way: str, kind: str) -> None:
    policy = [gr.on("step:*", Observe("norm")), gr.on(f"{kind}:*", ClipByGlobalNorm(gr.Schedule(harmonic)))]
    model = gr.transform(nn.Linear(3, 2), policy)
    where = "group:default" if kind == "gradient" else "step:group:default"
    found = [step(model, optimizer)[f"bound@{where}"] for optimizer in phases(model, way) for _ in range(2)]
    assert found == [harmonic(n) for n in range(6)]
    assert gr.state_dict(model)["step"] == 6


@pytest.mark.long
@pytest.mark.parametrize("way", WAYS)
def test_the_new_guard_has_the_address_and_the_state_of_the_old_one(way: str) -> None:
    """The percentiles are those of all norms of the run."""
    model = gr.transform(nn.Linear(3, 2, bias=False), gr.on("step:*", AutoClip(50.0)))
    norms = []
    for phase, optimizer in enumerate(phases(model, way)):
        for n in range(2):
            size = 1.0 + 3 * phase + n
            norms.append(size * 6**0.5)
            records = step(model, optimizer, size)
            assert records["bound@step:group:default"] == pytest.approx(float(np.percentile(norms, 50)), rel=1e-6)
            assert [key for key in records if key.startswith("lr@")] == ["lr@optimizer:0"]
            assert not [key for key in records if "#" in key]
    assert all("#" not in key for key in gr.state_dict(model)["states"])


@pytest.mark.long
def test_of_two_optimizers_the_one_that_is_replaced_gets_its_number_back() -> None:
    model: Any = gr.transform(nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 2)), gr.on("step:*", ClipByGlobalNorm(1e3)))
    first, second = (make(model, part.parameters()) for part in model)

    def both(*optimizers: torch.optim.Optimizer) -> set[str]:
        model.zero_grad()
        model(torch.ones(1, 3)).sum().backward()
        for optimizer in optimizers:
            optimizer.step()
        return {key for key in model.monitor.latest() if key.startswith(("total", "lr"))}

    wanted = both(second, first)
    names = {"total_norm@step:group:default", "total_norm@step:group:default#1", "lr@optimizer:0", "lr@optimizer:1"}
    assert wanted == names
    first = make(model, model[0].parameters())
    assert both(second, first) == names
    assert model.trace_step(first).edits[0].records[0].site == "step:group:default"
    assert model.trace_step(second).edits[0].records[0].site == "step:group:default#1"


@pytest.mark.long
def test_the_optimizer_that_stays_carries_the_schedule_on() -> None:
    policy = gr.on("gradient:0.weight", ClipByNorm(gr.Schedule(harmonic)))
    model: Any = gr.transform(nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 2)), policy)
    often, seldom = (make(model, part.parameters()) for part in model)
    for number in range(4):
        assert step(model, often)["bound@gradient:0.weight"] == harmonic(number)
        if number == 0:
            seldom.step()
    del often
    for number in range(4, 7):
        assert step(model, seldom)["bound@gradient:0.weight"] == harmonic(number)


@pytest.mark.long
def test_without_a_guard_backwards_count_again() -> None:
    model = gr.transform(nn.Linear(3, 2), gr.on("gradient:*", ClipByGlobalNorm(gr.Schedule(harmonic))))
    optimizer = make(model)
    found = [step(model, optimizer)["bound@group:default"] for _ in range(2)]
    gr.unguard(optimizer)
    found += [step(model, optimizer)["bound@group:default"] for _ in range(2)]
    assert found == [harmonic(n) for n in range(4)]


@pytest.mark.long
def test_skips_of_guards_that_are_gone_are_counted() -> None:
    model = gr.transform(nn.Linear(3, 2), gr.on("gradient:*", CheckFinite("skip")))
    for optimizer in phases(model, "deleted"):
        step(model, optimizer, float("inf"))
    assert model.monitor.skipped == 3


@pytest.mark.long
@pytest.mark.parametrize("fused", [False, True])
@pytest.mark.parametrize("scheduled", [False, True])
def test_a_deleted_optimizer_is_freed_at_once(fused: bool, scheduled: bool) -> None:
    """With its moments, while the model lives on; as without a guard there is no cycle."""
    model = gr.transform(nn.Linear(3, 2), gr.on("step:*", ClipByGlobalNorm(0.1)))
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1, fused=fused)
    before = torch.optim.lr_scheduler.StepLR(optimizer, 1) if scheduled else None
    gr.guard(optimizer, model)
    after = torch.optim.lr_scheduler.StepLR(optimizer, 1) if scheduled else None
    step(model, optimizer)
    moment = weakref.ref(optimizer.state[model.weight]["exp_avg"])
    ref = weakref.ref(optimizer)
    del optimizer, before, after
    assert (ref(), moment()) == (None, None)


@pytest.mark.broad
def test_a_method_without_its_optimizer_says_what_to_keep() -> None:
    model = gr.transform(nn.Linear(2, 2), [])
    step = gr.guard(torch.optim.SGD(model.parameters(), lr=0.1), model).step
    with pytest.raises(RuntimeError, match=r"step method is gone.*self\.optimizer = gr\.guard"):
        step()
