"""What an update makes non-finite, and why."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from gradrewrite.auditing.update_watch import UpdateWatch, began_with, rows_text
from gradrewrite.diagnostics.causes import Cause

pytestmark = pytest.mark.pure

HALF = torch.float16
NAN, INF = math.nan, math.inf


class Net(nn.Module):
    def __init__(self, dtype: torch.dtype = HALF) -> None:
        super().__init__()
        self.w = nn.Parameter(torch.ones(5, 2, dtype=dtype))
        self.v = nn.Parameter(torch.ones(3, dtype=dtype))
        self.register_buffer("mask", torch.tensor([0.0, -INF]))
        self.register_buffer("count", torch.zeros(3))


def updated(
    make: Callable[[Iterable[Tensor]], torch.optim.Optimizer],
    *gradients: Tensor,
    dtype: torch.dtype = HALF,
    change: Callable[[Net], Any] = lambda _: None,
) -> Cause | None:
    """Make one update for each gradient of ``w``; the cause of the last."""
    net = Net(dtype)
    optimizer = make(net.parameters())
    watch = UpdateWatch(net, optimizer)
    cause = None
    for step, gradient in enumerate(gradients):
        net.w.grad, net.v.grad = gradient.to(dtype), torch.ones(3, dtype=dtype)
        watch.before()
        optimizer.step()
        change(net)
        cause = watch.after(step)
    return cause


ONES = torch.ones(5, 2)
WITHOUT_ROW_2 = torch.ones(5, 2).index_fill(0, torch.tensor([2]), 0.0)

Make = Callable[[Any], torch.optim.Optimizer]
REASONS: dict[str, tuple[Make, Tensor, str, str]] = {
    "adam": (lambda p: torch.optim.Adam(p), WITHOUT_ROW_2, "w NaN in row 2: eps 1e-08 is 0 in float16", "eps=0.0001"),
    "adamw": (lambda p: torch.optim.AdamW(p), WITHOUT_ROW_2, "w NaN in row 2: eps 1e-08 is 0 in float16", "eps=0.0001"),
    "rmsprop": (lambda p: torch.optim.RMSprop(p), WITHOUT_ROW_2, "and so is square_avg there", "eps=0.0001"),
    "adagrad": (lambda p: torch.optim.Adagrad(p), WITHOUT_ROW_2, "and so is sum there", "eps=0.0001"),
    "tiny": (lambda p: torch.optim.Adam(p), 1e-3 * ONES, "w infinite in all 5 rows: eps 1e-08 is 0", "float32"),
    "rate": (lambda p: torch.optim.SGD(p, lr=INF), ONES, "also v: lr of param group 0 is Infinity", "schedule"),
    "decay": (lambda p: torch.optim.SGD(p, lr=0.1, weight_decay=INF), ONES, "weight_decay of param group 0", "SGD"),
    "square": (
        lambda p: torch.optim.Adagrad(p, eps=1e-4),
        300 * ONES,
        "square of a gradient of 300 is beyond",
        "bfloat",
    ),
    "momentum": (
        lambda p: torch.optim.SGD(p, lr=1e-6, momentum=0.99),
        40000 * ONES,
        "momentum_buffer, a sum of gradients of up to 4e+04, is beyond float16",
        "bfloat16",
    ),
    "step": (
        lambda p: torch.optim.SGD(p, lr=1e4),
        10 * ONES,
        "an update of lr=1e+04 times 10 is beyond",
        "learning rate",
    ),
}


@pytest.mark.parametrize("name", REASONS)
def test_reasons(name: str) -> None:
    make, gradient, text, advice = REASONS[name]
    number = 2 if name == "momentum" else 1
    cause = updated(make, *[gradient] * number)
    assert cause is not None
    assert (cause.kind, cause.step, cause.rules) == ("update", number - 1, ())
    assert cause.text.startswith(f"step {number - 1}: every gradient was finite; step() made ")
    assert text in cause.text
    assert advice in cause.advice


@pytest.mark.parametrize("name", ["adam", "adamw", "rmsprop", "adagrad"])
def test_wider_parameters_have_no_cause(name: str) -> None:
    for dtype in (torch.bfloat16, torch.float32, torch.float64):
        assert updated(REASONS[name][0], WITHOUT_ROW_2, ONES, dtype=dtype) is None


def test_gradients_that_have_exploded() -> None:
    """The state of a wide dtype is no cause; a parameter is one, after what explains the gradients."""
    assert updated(lambda p: torch.optim.Adam(p), 1e25 * ONES, ONES, dtype=torch.float32) is None
    assert updated(lambda p: torch.optim.Adam(p), 1e25 * ONES, ONES, dtype=torch.bfloat16) is None
    cause = updated(lambda p: torch.optim.SGD(p, lr=100.0), 3e38 * ONES, dtype=torch.float32)
    assert cause is not None
    assert "beyond float32, which ends at 3.403e+38" in cause.text
    assert "what makes the gradients so large" in cause.advice
    assert cause.figures["limit"] > 1e30


def test_an_eps_of_0() -> None:
    cause = updated(lambda p: torch.optim.Adam(p, eps=0.0), WITHOUT_ROW_2, dtype=torch.float32)
    assert cause is not None
    assert "eps is 0, and so is exp_avg_sq there" in cause.text
    assert "eps=1e-08" in cause.advice


def test_gradients_that_are_not_finite_are_no_fault_of_the_update() -> None:
    assert updated(lambda p: torch.optim.SGD(p, lr=0.1), NAN * ONES) is None


def test_buffers() -> None:
    cause = updated(lambda p: torch.optim.SGD(p, lr=0.1), ONES, change=lambda net: net.count[1:].fill_(NAN))
    assert cause is not None
    assert (cause.site, cause.step) == ("buffer:count", 0)
    assert "the buffer count is NaN at elements 1 and 2." in cause.text
    assert updated(lambda p: torch.optim.SGD(p, lr=0.1), ONES, change=lambda net: net.count.fill_(INF)) is None


def test_what_began_so_is_no_updates_fault() -> None:
    net = Net(torch.float32)
    with torch.no_grad():
        net.w[3, 1], net.count[0] = NAN, NAN
    assert began_with(net) == {
        "w": "the parameter w was NaN in row 3 when the run began",
        "mask": "the buffer mask was infinite at element 1 when the run began",
        "count": "the buffer count was NaN at element 0 when the run began",
    }
    optimizer = torch.optim.Adam(net.parameters())
    watch = UpdateWatch(net, optimizer)
    net.w.grad = torch.ones(5, 2)
    watch.before()
    optimizer.step()
    assert watch.after(0) is None
    with torch.no_grad():
        net.w[4, 0] = INF
    cause = watch.after(1)
    assert cause is not None
    assert "w infinite in row 4" in cause.text


def test_lazy_parameters_are_looked_at_when_they_are_there() -> None:
    net = nn.Sequential(nn.LazyLinear(2), nn.LazyBatchNorm1d())
    assert began_with(net) == {}
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    watch = UpdateWatch(net, optimizer)
    net(torch.ones(3, 4)).sum().backward()
    watch.before()
    optimizer.step()
    assert watch.after(0) is None


@pytest.mark.parametrize(
    ("rows", "text"),
    [
        ([3], " in row 3"),
        ([3, 8], " in rows 3 and 8"),
        ([3, 8, 11], " in rows 3, 8 and 11"),
        (range(3, 13), " in rows 3, 4 and 5, and 7 more"),
        (range(20), " in all 20 rows"),
    ],
)
def test_rows_in_words(rows: Iterable[int], text: str) -> None:
    mask = torch.zeros(20, 2, dtype=torch.bool)
    mask[[*rows], 1] = True
    assert rows_text(mask) == text
    assert rows_text(mask[:, 1]) == text.replace("row", "element").replace(" in element", " at element")
    assert rows_text(torch.ones((), dtype=torch.bool)) == ""


def test_norms_and_who_may_clip() -> None:
    net = Net(torch.float32)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    watch = UpdateWatch(net, optimizer, measures=True)
    assert not watch.may_clip
    optimizer.register_step_pre_hook(lambda *_: torch.nn.utils.clip_grad_norm_(net.parameters(), 1.0) and None)
    assert watch.may_clip
    net.w.grad = torch.ones(5, 2)
    watch.before()
    optimizer.step()
    assert watch.after(4) is None
    assert watch.norms == {4: pytest.approx(1.0, rel=1e-5)}
