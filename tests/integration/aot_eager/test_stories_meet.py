"""Stories of non-finite values with the other ways to run a model."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

import gradrewrite as gr
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
