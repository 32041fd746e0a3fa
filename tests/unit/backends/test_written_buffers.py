"""A skipped update leaves no trace in buffers: parameters, buffers and optimizer state are bit-equal afterwards."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Mapping
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import gradrewrite as gr
from gradrewrite.backends.model_state import state_of
from gradrewrite.backends.session import Session
from gradrewrite.passes import CheckFinite, ClipByGlobalNorm, SkipSpikes

from models.buffers import BUFFERS, WIDTH, Net

SKIP = gr.on("gradient:*", CheckFinite("skip"))


class Assigned(nn.Module):
    """A moving average that is another tensor after each call."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)
        self.register_buffer("average", torch.zeros(WIDTH))
        self.average: Tensor

    def forward(self, x: Tensor) -> Tensor:
        h: Tensor = self.linear(x)
        self.average = 0.9 * self.average + 0.1 * h.detach().mean(0)
        return h - self.average


KINDS: Mapping[str, Callable[[], nn.Module]] = {**BUFFERS, "assigned": Assigned}
OPTIMIZERS: Mapping[str, Callable[[Any], torch.optim.Optimizer]] = {
    "AdamW": lambda p: torch.optim.AdamW(p, lr=0.01),
    "fused": lambda p: torch.optim.AdamW(p, lr=0.01, fused=True),
    "SGD": lambda p: torch.optim.SGD(p, lr=0.01, momentum=0.9),
}
WAYS: Mapping[str, Any] = {
    "whole": {},
    "regions": {"regions": ["first", "head"]},  # the second layer runs outside of them
    "dynamic": {"dynamic": True},
    "parts": {"fullgraph": False},
}


def state(model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, Tensor]:
    """All tensors of a model and its optimizer."""
    found = {name: t.clone() for name, t in model.state_dict().items()}
    for number, kept in optimizer.state_dict()["state"].items():
        found |= {f"{number}.{key}": t.clone() for key, t in kept.items() if isinstance(t, Tensor)}
    return found


def assert_same(found: Mapping[str, Tensor], wanted: Mapping[str, Tensor]) -> None:
    assert found.keys() == wanted.keys()
    for name, t in wanted.items():
        assert torch.equal(found[name], t), name


def session_of(model: gr.RewrittenModule) -> Session:
    found = state_of(model)
    assert found is not None
    return found.session


def bad(rows: int = 8) -> Tensor:
    x = torch.randn(rows, WIDTH)
    x[0] = math.nan
    return x


@pytest.mark.broad
@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("make", OPTIMIZERS)
@pytest.mark.parametrize("kind", KINDS)
def test_skips_leave_no_trace(kind: str, make: str, way: str) -> None:
    model = Net(KINDS[kind])
    rewritten = gr.transform(model, gr.on("step:*", CheckFinite("skip")), **WAYS[way])
    optimizer = gr.guard(OPTIMIZERS[make](model.parameters()), rewritten)

    def step(x: Tensor) -> None:
        optimizer.zero_grad()
        rewritten(x).backward()
        optimizer.step()

    step(torch.randn(8, WIDTH))
    before = state(model, optimizer)
    for _ in range(20):
        step(bad())
        assert_same(state(model, optimizer), before)
    assert rewritten.monitor.skipped == 20
    step(torch.randn(8, WIDTH))
    after = state(model, optimizer)

    assert any(not torch.equal(after[name], t) for name, t in before.items() if name in dict(model.named_buffers()))


@pytest.mark.broad
@pytest.mark.parametrize("fused", [False, True])
def test_micro_batches_are_taken_back_together(fused: bool) -> None:
    model = Net(BUFFERS["batch norm"])
    rewritten = gr.transform(model, SKIP)
    optimizer = gr.guard(torch.optim.AdamW(model.parameters(), fused=fused), rewritten)
    rewritten(torch.randn(8, WIDTH)).backward()
    optimizer.step()
    before = state(model, optimizer)
    for x in (torch.randn(8, WIDTH), bad(), torch.randn(8, WIDTH)):
        rewritten(x).backward()
    optimizer.step()

    assert_same(state(model, optimizer), before)


@pytest.mark.broad
def test_a_spike_is_taken_back() -> None:
    model = Net(BUFFERS["running mean"])
    rewritten = gr.transform(model, gr.on("step:*", SkipSpikes(sigma=3.0, window=8)))
    optimizer = gr.guard(torch.optim.SGD(model.parameters(), lr=1e-4), rewritten)
    for number in range(30):
        before = state(model, optimizer)
        optimizer.zero_grad()
        loss = rewritten(torch.randn(64, WIDTH))
        (loss * (1e6 if number == 20 else 1.0)).backward()
        optimizer.step()
        if number == 20:
            assert rewritten.monitor.skipped == 1
            assert_same(state(model, optimizer), before)


@pytest.mark.broad
@pytest.mark.parametrize("is_told", [False, True])
@pytest.mark.parametrize("make", OPTIMIZERS)
def test_updates_that_a_scaler_skips(make: str, is_told: bool) -> None:
    model, scaler = Net(BUFFERS["batch norm"]), torch.amp.GradScaler("cpu", init_scale=2.0, growth_interval=1000)
    options: dict[str, Any] = {"loss_scale": scaler} if is_told else {}
    rewritten = gr.transform(model, gr.on("step:*", ClipByGlobalNorm(1.0)), **options)
    optimizer = gr.guard(OPTIMIZERS[make](model.parameters()), rewritten)
    for x in (torch.randn(8, WIDTH), bad(), torch.randn(8, WIDTH), bad(), bad()):
        before = state(model, optimizer)
        optimizer.zero_grad()
        scaler.scale(rewritten(x)).backward()
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
        is_skipped = bool(x.isnan().any())
        changed = [n for n, t in state(model, optimizer).items() if n not in before or not torch.equal(t, before[n])]
        assert bool(changed) != is_skipped, changed


@pytest.mark.broad
def test_nothing_is_copied_where_nothing_skips() -> None:
    model = Net(BUFFERS["batch norm"])
    for policy, guarded in ((SKIP, False), (gr.on("gradient:*", CheckFinite()), True)):
        rewritten = gr.transform(copy.deepcopy(model), policy)
        optimizer = torch.optim.SGD(rewritten.parameters(), lr=0.1)
        if guarded:
            gr.guard(optimizer, rewritten)
        rewritten(torch.randn(8, WIDTH)).backward()
        assert session_of(rewritten).buffers.num_copied == 0


def test_one_copy_of_what_is_written() -> None:
    model = nn.Sequential(nn.Linear(WIDTH, 64), nn.BatchNorm1d(64), nn.Linear(64, 1))
    model.register_buffer("constant", torch.zeros(10_000))
    rewritten = gr.transform(model, SKIP)
    optimizer = gr.guard(torch.optim.SGD(model.parameters(), lr=0.1), rewritten)
    for _ in range(3):
        rewritten(torch.randn(8, WIDTH)).sum().backward()
        rewritten(torch.randn(8, WIDTH)).sum().backward()
        assert session_of(rewritten).buffers.num_copied == 3
        assert session_of(rewritten).buffers.bytes_copied == 2 * 64 * 4 + 8
        optimizer.step()
        optimizer.zero_grad()
