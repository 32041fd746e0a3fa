"""Training steps as one graph: checks, spikes, culprits, messages and skipped steps, against two phases."""

from __future__ import annotations

import copy
import functools
import logging
import math
from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import gradrewrite as gr
from gradrewrite.passes import (
    CheckFinite,
    ClipByGlobalNorm,
    ClipByNorm,
    ClipByValue,
    DecayWeights,
    Hold,
    Observe,
    SkipSpikes,
)

from models.buffers import Counted, MovingScale, Normalized, RunningMean
from models.small import Lambda, SquaredTwoLayers
from models.training_steps import Pair, adamw, batch, sgd


class Root(nn.Module):
    """A loss with a square root."""

    def __init__(self) -> None:
        super().__init__()
        self.one, self.two = nn.Linear(4, 3), nn.Linear(3, 2)

    def forward(self, x: Tensor) -> Tensor:
        h = self.one(x)
        return self.two(h.sqrt()).square().mean()


class Squares(nn.Module):
    """A loss of each row by itself, for culprits."""

    def __init__(self) -> None:
        super().__init__()
        self.one, self.two = nn.Linear(4, 3), nn.Linear(3, 2)

    def forward(self, x: Tensor) -> Tensor:
        return self.two(self.one(x).tanh() + self.one(x)).square().mean()


def bad(number: int, row: int = 0) -> Tensor:
    x = batch(number)
    x[row, 0] = math.inf
    return x


def in_two_phases(pair: Pair, x: Tensor) -> None:
    pair.two(x).backward()
    pair.reference.step()
    pair.two.zero_grad()


def behind(make: Callable[[], nn.Module]) -> nn.Module:
    """A module between two layers."""
    return Lambda(
        lambda m, x: m.two(m.one(m.first(x))).square().mean(), one=make(), two=nn.Linear(4, 2), first=nn.Linear(4, 4)
    ).double()


@pytest.mark.parametrize("at", ["gradient", "error", "activation", "step"])
@pytest.mark.parametrize("steps_before", [0, 2])
def test_a_check_that_raises_names_op_and_line_and_leaves_all_as_it_was(at: str, steps_before: int) -> None:
    pair = Pair(Root().double(), lambda: [gr.on(f"{at}:*", CheckFinite("raise"))], sgd)
    with torch.no_grad():
        for model in (pair.one, pair.two, pair.net):
            model.one.bias.fill_(100.0)
    for number in range(steps_before):
        pair.step(batch(number))
    before = copy.deepcopy((pair.one.state_dict(), pair.optimizer.state_dict()))
    x = batch(9) * 1e4

    with pytest.raises(gr.NonFiniteError) as caught:
        pair.step_of_one(x)
    with pytest.raises(gr.NonFiniteError) as wanted:
        in_two_phases(pair, x)
    pair.two.zero_grad()

    assert str(caught.value) == str(wanted.value)
    assert (caught.value.op, caught.value.source) == (wanted.value.op, wanted.value.source)
    assert caught.value.op == "/sqrt" or at == "step"
    pair.bit_equal((pair.one.state_dict(), pair.optimizer.state_dict()), before)
    assert all(p.grad is None for p in pair.one.parameters())
    pair.step(batch(3))  # goes on


@pytest.mark.parametrize("make", [RunningMean, MovingScale, Counted, Normalized, lambda: nn.BatchNorm1d(4)])
@pytest.mark.parametrize("action", ["raise", "skip"])
def test_a_failed_step_leaves_buffers(action: Any, make: Callable[[], nn.Module]) -> None:
    pair = Pair(behind(make), lambda: [gr.on("gradient:*", CheckFinite(action))], sgd)
    for number in range(2):
        pair.step(batch(number))
    start = copy.deepcopy((pair.one.state_dict(), pair.optimizer.state_dict()))
    x = bad(2)
    if action == "skip":
        pair.step(x)
        assert pair.one.monitor.skipped == 1
    else:
        with pytest.raises(gr.NonFiniteError):
            pair.step_of_one(x)
    pair.bit_equal((pair.one.state_dict(), pair.optimizer.state_dict()), start)
    if action == "skip":
        pair.step(batch(3))
        assert not torch.equal(start[0]["two.weight"], pair.one.two.weight)


@pytest.mark.parametrize("at", ["gradient", "error", "activation", "step", "input"])
def test_checks_skip(at: str) -> None:
    pair = Pair(Squares().double(), lambda: [gr.on(f"{at}:*", CheckFinite("skip"))], adamw)
    for number in range(6):
        x = bad(number) if number in (2, 3) else batch(number)
        pair.step(x.requires_grad_(at == "input"))
    pair.finish()
    assert pair.one.monitor.skipped == 2


def test_skips_at_the_first_step() -> None:
    pair = Pair(Squares().double(), lambda: [gr.on("gradient:*", CheckFinite("skip"))], adamw)
    pair.step(bad(0))
    pair.step(batch(1))
    pair.step(bad(2))
    pair.step(batch(3))
    pair.finish()
    assert pair.one.monitor.skipped == 2


def test_a_bad_micro_batch_spoils_the_step() -> None:
    pair = Pair(Squares().double(), lambda: [gr.on("gradient:*", CheckFinite("skip"))], adamw)
    pair.step(batch(0), micro_batches=[batch(10), batch(20)])
    before = copy.deepcopy((pair.one.state_dict(), pair.optimizer.state_dict()))
    pair.step(batch(1), micro_batches=[bad(11), batch(21)])
    pair.bit_equal((pair.one.state_dict(), pair.optimizer.state_dict()), before)
    pair.step(batch(2), micro_batches=[batch(12), batch(22)])
    pair.step(bad(3), micro_batches=[batch(13)])
    pair.step(batch(4))
    pair.finish()
    assert pair.one.monitor.skipped == 2


@pytest.mark.parametrize("make", [RunningMean, lambda: nn.BatchNorm1d(4)])
def test_a_skipped_step_leaves_the_buffers_of_its_micro_batches(make: Callable[[], nn.Module]) -> None:
    pair = Pair(behind(make), lambda: [gr.on("gradient:*", CheckFinite("skip"))], sgd)
    pair.step(batch(0), micro_batches=[batch(10)])
    before = copy.deepcopy(pair.one.state_dict())
    pair.step(bad(1), micro_batches=[batch(11), batch(21)])
    pair.bit_equal(pair.one.state_dict(), before)
    pair.step(batch(2), micro_batches=[bad(12), batch(22)])
    pair.bit_equal(pair.one.state_dict(), before)
    pair.step(batch(3), micro_batches=[batch(13)])
    pair.finish()
    assert pair.one.monitor.skipped == 2


@pytest.mark.parametrize(
    "others",
    [
        lambda: [gr.on("step:*", Hold(lambda g, p: p.abs() < 0.2))],
        lambda: [gr.on("param:*", lambda p: p.clamp(-0.3, 0.3))],
        lambda: [gr.on("step:*", DecayWeights(0.1))],
        lambda: [gr.on("step:*", ClipByGlobalNorm(0.1))],
        lambda: [gr.on("error:one", CheckFinite("record")), gr.on("param:*", Observe("norm"))],
    ],
)
def test_a_skipped_step_with_work_behind_it(others: Callable[[], list[Any]]) -> None:
    pair = Pair(Squares().double(), lambda: [gr.on("gradient:*", CheckFinite("skip")), *others()], adamw)
    for number in range(5):
        before = copy.deepcopy((pair.one.state_dict(), pair.optimizer.state_dict()))
        pair.step(bad(number) if number in (1, 3) else batch(number))
        if number in (1, 3):
            pair.bit_equal((pair.one.state_dict(), pair.optimizer.state_dict()), before)
    pair.finish()
    assert pair.one.monitor.skipped == 2


def test_spikes_of_the_norm() -> None:
    pair = Pair(Squares().double(), lambda: [gr.on("step:*", SkipSpikes(3.0, window=6))], adamw)
    for number in range(16):
        before = copy.deepcopy((pair.one.state_dict(), pair.optimizer.state_dict()))
        pair.step(batch(number) * (100 if number in (9, 13) else 1))
        if number in (9, 13):
            pair.bit_equal((pair.one.state_dict(), pair.optimizer.state_dict()), before)
    pair.finish()
    assert pair.one.monitor.skipped == 2


def test_spikes_behind_accumulation() -> None:
    pair = Pair(
        Squares().double(), lambda: [gr.on("step:*", SkipSpikes(3.0, window=6)), gr.on("step:*", ClipByGlobalNorm(0.5))]
    )
    for number in range(12):
        pair.step(batch(number), micro_batches=[batch(100 + number) * (100 if number == 9 else 1)])
    pair.finish()
    assert pair.one.monitor.skipped == 1


@pytest.mark.parametrize("micro", [0, 1])
def test_spikes_of_the_loss(micro: int) -> None:
    """One graph knows its loss; two phases are told."""

    def logged(output: Tensor) -> Tensor:
        pair.two.monitor.log("loss", output.detach())
        return output

    pair = Pair(
        Squares().double(), lambda: [gr.on("step:*", SkipSpikes(3.0, window=6, of="loss"))], adamw, loss=logged,
        reads=False,
    )  # fmt: skip
    for number in range(12):
        before = copy.deepcopy((pair.one.state_dict(), pair.optimizer.state_dict()))
        pair.step(batch(number) * (100 if number == 9 else 1), micro_batches=[batch(100 + number)] * micro)
        if number == 9:
            pair.bit_equal((pair.one.state_dict(), pair.optimizer.state_dict()), before)
    assert pair.one.monitor.skipped == pair.two.monitor.skipped == 1
    for address in pair.two.monitor.latest():
        if "@step:" in address:
            pair.same(
                pair.one.monitor.history(address, per="step"), pair.two.monitor.history(address, per="step"), address
            )


def test_consecutive_skips_end_the_run() -> None:
    pair = Pair(
        Squares().double(), lambda: [gr.on("gradient:*", CheckFinite("skip"))], guard={"max_consecutive_skips": 3}
    )
    pair.step(batch(0))
    pair.step(bad(1))
    pair.step(bad(2))
    with pytest.raises(gr.NonFiniteError) as caught:
        pair.step_of_one(bad(3))
    with pytest.raises(gr.NonFiniteError) as wanted:
        in_two_phases(pair, bad(3))
    assert str(caught.value) == str(wanted.value)


@pytest.mark.parametrize("micro", [0, 1])
def test_culprits_after_a_skip(micro: int) -> None:
    pair = Pair(Squares().double(), lambda: [gr.on("gradient:*", CheckFinite("skip"))], adamw)
    pair.step(batch(0), micro_batches=[batch(10)] * micro)
    pair.step(batch(1), micro_batches=[batch(11)] * micro)
    for model, run in ((pair.one, pair.step_of_one), (pair.two, None)):
        if micro:
            model.monitor.log_ids([f"a{n}" for n in range(6)])
            pair.step_of_one.accumulate(batch(12)) if run else model(batch(12)).backward()
        model.monitor.log_ids([f"b{n}" for n in range(6)])
        if run:
            run(bad(2, row=4))
        else:
            model(bad(2, row=4)).backward()
            pair.reference.step()
            pair.reference.zero_grad()
    got, wanted = (model.monitor.culprits() for model in (pair.one, pair.two))
    assert (wanted.micro_batch, wanted.rows[0].index, wanted.rows[0].id) == (micro, 4, "b4")
    assert str(got) == str(wanted)
    assert (got.step, got.micro_batch, got.note) == (wanted.step, wanted.micro_batch, wanted.note)
    assert [(row.index, row.id) for row in got.rows] == [(row.index, row.id) for row in wanted.rows]


def test_culprits_after_a_spike() -> None:
    pair = Pair(Squares().double(), lambda: [gr.on("step:*", SkipSpikes(3.0, window=6))], adamw)
    for number in range(8):
        pair.step(batch(number))
    x = batch(8)
    x[3] *= 1000
    pair.step(x)
    got, wanted = (model.monitor.culprits() for model in (pair.one, pair.two))
    assert wanted.rows[0].index == 3
    assert [row.index for row in got.rows] == [row.index for row in wanted.rows]
    assert got.note == wanted.note
    assert [row.norm for row in got.rows] == pytest.approx([row.norm for row in wanted.rows])


def test_a_check_that_warns() -> None:
    pair = Pair(Root().double(), lambda: [gr.on("error:*", CheckFinite("warn"))], sgd)
    x = batch(0) * 1e4
    texts = []

    def run(step: Callable[[Tensor], Any], model: Any) -> None:
        for _ in range(3):
            step(x)
        model.monitor.flush()

    for step, model in ((pair.step_of_one, pair.one), (functools.partial(in_two_phases, pair), pair.two)):
        with pytest.warns(gr.RewriteWarning) as caught:
            run(step, model)
        texts.append([str(w.message) for w in caught])
    assert "first non-finite" in texts[1][0]
    assert texts[0] == texts[1]


@pytest.mark.parametrize(
    "policy",
    [
        lambda: [gr.on("error:one", ClipByNorm(0.01, log=True))],
        lambda: [gr.on("error:one", ClipByValue(0.01, log=True)), gr.on("gradient:two.*", ClipByNorm(0.1, log=True))],
    ],
)
def test_lines(policy: Callable[[], Any], caplog: pytest.LogCaptureFixture) -> None:
    pair = Pair(SquaredTwoLayers().double(), policy, sgd, reads=False)
    with caplog.at_level(logging.INFO, logger="gradrewrite"):
        for number in range(3):
            pair.step(batch(number))
        for model in (pair.one, pair.two):
            model.monitor.flush()
    lines = Counter(text for r in caplog.records if "need clipping" in (text := r.getMessage()))
    assert len(lines) >= 3
    assert set(lines.values()) == {2}, lines


def test_locate_sees_the_model_of_a_training_step() -> None:
    pair = Pair(Root().double(), lambda: [gr.on("gradient:*", CheckFinite("skip"))], adamw)
    x = batch(0) * 1e4
    pair.step(x)
    pair.step(x)
    got, wanted = gr.locate(pair.one, x), gr.locate(pair.two, x)
    assert got is not None
    assert wanted is not None
    assert (got.op, got.source) == (wanted.op, wanted.source)
    assert got.op == "/sqrt"
    pair.step(batch(1))


def test_a_rule_that_matches_nothing() -> None:
    model = gr.transform(SquaredTwoLayers().double(), [gr.on("error:three", ClipByNorm(1.0))])
    step = gr.train_step(model, sgd(model.parameters()), compile=False)
    with pytest.raises(gr.NoSuchSiteError, match="three"):
        step(batch(0))


def test_a_rule_that_matches_nothing_in_a_loss() -> None:
    """It is told before anything is changed."""
    net = nn.Linear(4, 1).double()
    model = gr.transform(net, [gr.on("error:two", ClipByNorm(1.0))])
    step = gr.train_step(
        model, adamw(model.parameters()), compute_loss=lambda m, x: m(x).square().mean(), compile=False
    )
    before = net.weight.detach().clone()
    with pytest.raises(gr.NoSuchSiteError, match="two"):
        step(batch(0))
    assert torch.equal(net.weight, before)


def test_values_that_functions_read(monkeypatch: pytest.MonkeyPatch) -> None:
    limits = {"error": 0.01, "step": 0.02}

    def policy() -> list[Any]:
        return [
            gr.on("error:one", lambda g: g.clamp(-limits["error"], limits["error"])),
            gr.on("step:*", lambda g: g.clamp(-limits["step"], limits["step"])),
        ]

    pair = Pair(SquaredTwoLayers().double(), policy, sgd)
    for number in range(6):
        pair.step(batch(number))
        if number == 2:
            limits["error"] = 0.001
        if number == 4:
            limits["step"] = 0.001
    pair.finish(records=False)


def test_bounds_that_are_tensors_are_read_at_every_step() -> None:
    bounds = torch.tensor(0.5, dtype=torch.float64), torch.tensor(0.5, dtype=torch.float64)
    pair = Pair(
        SquaredTwoLayers().double(),
        lambda: [gr.on("error:one", ClipByNorm(bounds[0])), gr.on("step:*", ClipByGlobalNorm(bounds[1]))],
        sgd,
    )
    for number in range(6):
        for bound in bounds:
            bound.mul_(0.5)
        pair.step(batch(number))
    pair.finish()
    assert pair.one.monitor.history("total_norm@step:group:default")[-1] > 0.5**6
