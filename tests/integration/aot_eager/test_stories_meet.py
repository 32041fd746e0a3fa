"""Stories of non-finite values with the other ways to run a model."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

import gradrewrite as gr
from gradrewrite import viz
from gradrewrite.passes import CheckFinite, ClipByNorm

RAISE = gr.on("gradient:*", CheckFinite())


def failure_of(model: nn.Module, x: Tensor, **options: str) -> gr.NonFiniteError:
    with pytest.raises(gr.NonFiniteError) as raised:
        gr.transform(model, RAISE, **options)(x).backward()
    return raised.value


class Cell(nn.Module):
    """A loop of 12 steps; ``f`` makes the next state of the product and the input."""

    def __init__(self, f: Callable[[Tensor, Tensor], Tensor]) -> None:
        super().__init__()
        self.f, self.wh, self.head = f, nn.Linear(4, 4, bias=False), nn.Linear(4, 1)
        nn.init.constant_(self.wh.weight, 0.1)

    def forward(self, x: Tensor) -> Tensor:
        h = torch.full((3, 4), 0.5)
        for t in range(12):
            h = self.f(self.wh(h), x[:, t])
        return self.head(h).sum()


@pytest.mark.parametrize(
    ("f", "names"),
    [
        (lambda z, x: torch.log(x) * 0 + z, ["x"]),
        (lambda z, x: z / x, ["wh/linear", "x"]),
        (lambda z, x: torch.sqrt(z * x), ["the backward of wh/linear", "the backward of /sqrt"]),
    ],
    ids=["log", "division", "root"],
)
def test_a_rolled_loop_tells_what_an_unrolled_one_does(f: Callable[[Tensor, Tensor], Tensor], names: list[str]) -> None:
    x = torch.full((3, 12, 4), 3.0)
    x[2, 5, 1] = 0
    torch.manual_seed(0)
    plain, rolled = (failure_of(Cell(f), x, loops=loops) for loops in ("unrolled", "rolled"))

    assert (rolled.op, rolled.source, str(rolled.story)) == (plain.op, plain.source, str(plain.story))
    assert (rolled.rows, plain.rows) == ((2,), (2,))
    assert [one.name for one in rolled.operands] == names


class Weighted(nn.Module):
    def __init__(self, f: Callable[[Tensor], Tensor], value: float) -> None:
        super().__init__()
        self.f, self.w = f, nn.Parameter(torch.ones(4, 4))
        self.w.data[1, 2] = value

    def forward(self, x: Tensor) -> Tensor:
        return (x @ self.f(self.w)).sum()


@pytest.mark.parametrize(
    ("f", "value"),
    [
        (torch.log, 0.0),
        (lambda w: torch.where(w > 0, torch.log(w), 0.0), 0.0),
        (lambda w: w * w, torch.nan),
    ],
    ids=["function", "gradient", "parameter"],
)
def test_values_of_parameters_have_no_rows_of_the_batch(f: Callable[[Tensor], Tensor], value: float) -> None:
    err = failure_of(Weighted(f, value), torch.ones(4, 4))
    assert (err.indices, err.rows) == ("row 1, column 2", ())


@pytest.mark.parametrize("is_rolled", [False, True])
def test_a_weight_is_not_taken_for_sequences(is_rolled: bool) -> None:
    """``[3 * H, H]`` looks like ``[B * T, H]`` with three rows."""
    net = nn.GRU(4, 4, batch_first=True)
    net.weight_hh_l0.data[0, 0] = torch.inf

    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.net = net

        def forward(self, x: Tensor) -> Tensor:
            return self.net(x)[0].sum()

    policy = [RAISE, gr.on("error:*/h", ClipByNorm(1.0))] if is_rolled else RAISE
    with pytest.raises(gr.NonFiniteError) as raised:
        gr.transform(Model(), policy)(torch.rand(3, 5, 4)).backward()
    assert (raised.value.indices, raised.value.rows) == ("row 0, column 0", ())


class Hidden(nn.Module):
    """Its gradient is NaN, and its loss is not, where an input is 0."""

    def __init__(self) -> None:
        super().__init__()
        self.w = nn.Parameter(torch.ones(4))

    def forward(self, x: Tensor) -> Tensor:
        return torch.sqrt(self.w * x).sum()


def trained(*, asks: bool) -> nn.Module:
    """Train until step 2 is not finite, with its update."""
    model = gr.transform(Hidden(), gr.on("gradient:*", CheckFinite("record")))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for step in range(3):
        x = torch.ones(3, 4)
        x[1, 2] = 0.0 if step == 2 else 1.0
        loss = model(x)
        loss.backward()
        model.monitor.log("loss", loss)
        if asks:
            model.monitor.diagnose()
        optimizer.step()
    return model


def test_what_was_replayed_is_kept_when_it_can_be_no_longer() -> None:
    model = trained(asks=True)
    monitor = model.monitor
    first = monitor.diagnose()[0]
    report = viz.report(monitor)

    assert "sqrt at 0" in first.text
    assert (report.health.verdict.causes[0], monitor.diagnose()[0]) == (first, first)
    assert "sqrt at 0" in report.cause
    assert "sqrt at 0" in str(monitor.failure(anywhere=True))


def test_what_cannot_be_replayed_says_so() -> None:
    model = trained(asks=False)
    monitor = model.monitor
    first = monitor.diagnose()[0]

    assert "the step could not be replayed: parameter w was overwritten since the forward" in first.text
    assert "right after such a backward, before its update" in first.advice
    assert "could not be replayed" in viz.report(monitor).cause


def test_records_tell_of_a_model_that_is_gone() -> None:
    monitor = trained(asks=False).monitor
    report = viz.report(monitor)

    assert report.cause == ""
    assert "is at gradient:w" in report.health.verdict.text
    assert "Right after such a step" in report.health.verdict.advice
