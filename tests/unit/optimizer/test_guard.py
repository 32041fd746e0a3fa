"""``gr.guard``: a bad step leaves parameters and optimizer state untouched."""

from __future__ import annotations

import copy
import logging
import math

import pytest
import torch
from torch import Tensor, nn

import gradrewrite as gr
from gradrewrite.passes import CheckFinite

from helpers import mostly_slow
from models.optimizers import OPTIMIZERS
from models.small import Lambda


def make_net() -> Lambda:
    return Lambda(lambda net, x: net.fc(x).square().mean(), fc=nn.Linear(3, 2))


SKIP = gr.on("gradient:*", CheckFinite("skip"))
GOOD, BAD = torch.ones(2, 3), torch.full((2, 3), math.nan)


def state_of(model: nn.Module, optimizer: torch.optim.Optimizer) -> list[Tensor]:
    state = optimizer.state_dict()["state"]
    tensors = [v for values in state.values() for v in values.values() if isinstance(v, Tensor)]
    return [t.clone() for t in (*model.parameters(), *tensors)]


def train(model: nn.Module, optimizer: torch.optim.Optimizer, *inputs: Tensor) -> None:
    for x in inputs:
        optimizer.zero_grad()
        model(x).backward()
        optimizer.step()


@pytest.mark.long
@pytest.mark.parametrize("name", mostly_slow(OPTIMIZERS, 3))
@pytest.mark.parametrize("inputs", [(GOOD, BAD, GOOD), (BAD, GOOD, BAD, BAD, GOOD)], ids=["later", "first"])
def test_bad_steps_leave_no_trace(name: str, inputs: tuple[Tensor, ...]) -> None:
    torch.manual_seed(0)
    plain = make_net()
    guarded = gr.transform(copy.deepcopy(plain), SKIP)
    optimizer = gr.guard(OPTIMIZERS[name](guarded.parameters()), guarded)
    train(guarded, optimizer, *inputs)
    other = OPTIMIZERS[name](plain.parameters())
    train(gr.transform(plain, []), other, *(x for x in inputs if x is GOOD))

    got, wanted = state_of(guarded, optimizer), state_of(plain, other)
    assert len(got) == len(wanted)
    assert all(torch.equal(a, b) for a, b in zip(got, wanted, strict=True))
    assert guarded.monitor.skipped == sum(x is BAD for x in inputs)


def test_state_is_untouched_bit_by_bit_in_the_bad_step() -> None:
    model = gr.transform(make_net(), SKIP)
    optimizer = gr.guard(torch.optim.AdamW(model.parameters(), fused=True), model)
    train(model, optimizer, GOOD, GOOD)
    before = state_of(model, optimizer)
    train(model, optimizer, BAD)

    assert all(torch.equal(a, b) for a, b in zip(before, state_of(model, optimizer), strict=True))
    assert not hasattr(optimizer, "found_inf")


@pytest.mark.broad
@pytest.mark.parametrize("fused", [False, True])
@pytest.mark.parametrize("bad", [0, 1, 2])
def test_one_bad_micro_batch_spoils_the_step(fused: bool, bad: int) -> None:
    model = gr.transform(make_net(), SKIP)
    optimizer = gr.guard(torch.optim.SGD(model.parameters(), lr=0.1, fused=fused), model)
    before = model.fc.weight.clone()
    optimizer.zero_grad()
    for number in range(3):
        model(BAD if number == bad else GOOD).backward()
    optimizer.step()
    assert torch.equal(model.fc.weight, before)
    train(model, optimizer, GOOD)
    assert not torch.equal(model.fc.weight, before)
    assert model.monitor.skipped == 1


@pytest.mark.broad
@pytest.mark.parametrize("fused", [False, True])
@pytest.mark.parametrize("set_to_none", [False, True])
def test_gradients_that_are_thrown_away_spoil_nothing(fused: bool, set_to_none: bool) -> None:
    model = gr.transform(make_net(), SKIP)
    optimizer = gr.guard(torch.optim.SGD(model.parameters(), lr=0.1, fused=fused), model)
    before = model.fc.weight.clone()
    model(BAD).backward()
    optimizer.zero_grad(set_to_none=set_to_none)
    model(GOOD).backward()
    optimizer.step()
    assert not torch.equal(model.fc.weight, before)
    model(BAD).backward()
    model.zero_grad()  # the module's: no gradient is left when the next backward begins
    before = model.fc.weight.clone()
    model(GOOD).backward()
    optimizer.step()
    assert not torch.equal(model.fc.weight, before)
    assert model.monitor.skipped == 2  # two updates never came


@pytest.mark.broad
@pytest.mark.parametrize("fused", [False, True])
def test_together_with_a_grad_scaler(fused: bool) -> None:
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0, growth_interval=1000)
    plain = make_net()
    model = gr.transform(copy.deepcopy(plain), SKIP, loss_scale=scaler)
    optimizer = gr.guard(torch.optim.AdamW(model.parameters(), lr=0.1, fused=fused), model)
    other = torch.optim.AdamW(plain.parameters(), lr=0.1, fused=fused)
    for x in (GOOD, BAD, GOOD, BAD, BAD, GOOD):
        optimizer.zero_grad()
        scaler.scale(model(x)).backward()
        scaler.step(optimizer)
        scaler.update()
        if x is GOOD:
            other.zero_grad()
            plain(x).backward()
            other.step()

    for got, wanted in zip(model.parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(got, wanted)
    assert scaler.get_scale() == 128.0  # halved three times
    assert not hasattr(optimizer, "found_inf")
    assert model.monitor.skipped == 3  # without a fused kernel the scaler does not even call step()


def test_verdict_is_ours_where_the_scaler_sees_nothing() -> None:
    """The gradient is finite again behind a clip; the check before it failed."""
    from gradrewrite.passes import NanToNum

    scaler = torch.amp.GradScaler("cpu", init_scale=4.0)
    model = gr.transform(make_net(), gr.on("gradient:*", [CheckFinite("skip"), NanToNum()]), loss_scale=scaler)
    optimizer = gr.guard(torch.optim.AdamW(model.parameters(), fused=True), model)
    before = model.fc.weight.clone()
    scaler.scale(model(BAD)).backward()
    scaler.step(optimizer)
    scaler.update()
    assert torch.equal(model.fc.weight, before)


@pytest.mark.parametrize("fused", [False, True])
def test_too_many_skips_in_a_row_raise(fused: bool) -> None:
    model = gr.transform(make_net(), SKIP)
    optimizer = gr.guard(torch.optim.AdamW(model.parameters(), fused=fused), model, max_consecutive_skips=3)
    train(model, optimizer, BAD, BAD, GOOD, BAD, BAD)
    with pytest.raises(gr.NonFiniteError, match="3 updates in a row were skipped") as caught:
        train(model, optimizer, BAD)
    assert caught.value.cause == "the input x was not finite already"
    assert model.monitor.skipped == 5


def test_the_table_says_which_updates_were_skipped() -> None:
    model = gr.transform(make_net(), SKIP, monitor=gr.Monitor(capacity=4))
    train(model, gr.guard(torch.optim.SGD(model.parameters(), lr=0.1), model), BAD, GOOD, GOOD, BAD, GOOD, BAD)

    reason = "not finite, first at data:x"
    assert (
        f"3 updates skipped, of those in the buffer, first in step 3, last in step 5 ({reason})"
        in model.monitor.table().caption
    )


def test_too_many_skips_name_the_micro_batch_that_failed() -> None:
    model = gr.transform(make_net(), SKIP)
    optimizer = gr.guard(torch.optim.SGD(model.parameters(), lr=0.1), model, max_consecutive_skips=1)
    for x in (BAD, GOOD):
        model(x).backward()
    with pytest.raises(gr.NonFiniteError, match="its inputs have been let go") as caught:
        optimizer.step()
    assert caught.value.step == 0


@pytest.mark.slow
def test_every_hundredth_skip_is_reported(caplog: pytest.LogCaptureFixture) -> None:
    model = gr.transform(make_net(), SKIP)
    optimizer = gr.guard(torch.optim.SGD(model.parameters(), lr=0.1), model, max_consecutive_skips=1000)
    with caplog.at_level(logging.WARNING, "gradrewrite"):
        train(model, optimizer, *[BAD] * 201)

    assert [r.getMessage() for r in caplog.records] == [
        "100 updates skipped so far, because a finite check failed",
        "200 updates skipped so far, because a finite check failed",
    ]
    assert "201 updates skipped" in model.monitor.table().caption


def test_closures_run_once_and_schedulers_work() -> None:
    model = gr.transform(make_net(), SKIP)
    optimizer = gr.guard(torch.optim.SGD(model.parameters(), lr=1.0), model)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1, gamma=0.1)
    calls = []

    def closure() -> Tensor:
        calls.append(1)
        optimizer.zero_grad()
        loss = model(GOOD)
        loss.backward()
        return loss

    loss = optimizer.step(closure)
    scheduler.step()
    assert len(calls) == 1
    assert isinstance(loss, Tensor)
    assert optimizer.param_groups[0]["lr"] == pytest.approx(0.1)
    assert model.monitor.latest()["lr@optimizer:0"] == 1.0
    train(model, optimizer, GOOD)
    assert model.monitor.history("lr@optimizer:0") == pytest.approx([1.0, 0.1])


def test_guard_before_and_after_a_scheduler() -> None:
    model = gr.transform(make_net(), SKIP)
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1)
    assert gr.guard(optimizer, model.monitor) is optimizer
    before = model.fc.weight.clone()
    train(model, optimizer, BAD)
    scheduler.step()
    assert torch.equal(model.fc.weight, before)


@pytest.mark.long
def test_two_optimizers_of_one_model() -> None:
    model = gr.transform(make_net(), SKIP)
    one, two = (gr.guard(torch.optim.SGD([p], lr=0.1), model) for p in model.parameters())
    before = [p.clone() for p in model.parameters()]
    model(BAD).backward()
    one.step()
    two.step()
    assert all(torch.equal(p, b) for p, b in zip(model.parameters(), before, strict=True))


@pytest.mark.pure
def test_bad_arguments() -> None:
    model = gr.transform(make_net(), SKIP)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with pytest.raises(TypeError, match=r"torch\.optim\.Optimizer, got Lambda"):
        gr.guard(make_net(), model)  # type: ignore[type-var]
    with pytest.raises(TypeError, match="has no monitor"):
        gr.guard(optimizer, nn.Linear(1, 1))
    with pytest.raises(ValueError, match="max_consecutive_skips"):
        gr.guard(optimizer, model, max_consecutive_skips=0)
    with pytest.raises(TypeError, match="LBFGS"):
        gr.guard(torch.optim.LBFGS(model.parameters()), model)
    gr.guard(optimizer, model)
    with pytest.raises(TypeError, match="has a guard already"):
        gr.guard(optimizer, model)


def test_parameters_that_were_replaced_are_judged() -> None:
    model = gr.transform(nn.Linear(4, 2), gr.on("gradient:*", CheckFinite("skip")))
    x = torch.ones(1, 4)
    model(x).sum().backward()
    model.zero_grad()
    model.load_state_dict({name: value.clone() for name, value in model.state_dict().items()}, assign=True)
    optimizer = gr.guard(torch.optim.SGD(model.parameters(), lr=0.1), model)
    before = [p.detach().clone() for p in model.parameters()]
    (model(x).sum() * float("nan")).backward()
    optimizer.step()

    assert model.monitor.skipped == 1
    assert all(map(torch.equal, before, model.parameters()))
