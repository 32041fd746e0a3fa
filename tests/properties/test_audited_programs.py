"""Random programs of three parameters: the flow of gradients through the graph is that of eager autograd."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import pytest
import torch
from hypothesis import assume, given
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

from gradrewrite.auditing.gradient_flow import flow_of
from gradrewrite.auditing.step_graphs import trace_step

from models.cuts import NoGradient

SIZE, ROUNDING = 3, 1e-10
Op = Callable[[Tensor, Tensor], Tensor]


def without_gradient(a: Tensor, b: Tensor) -> Tensor:
    with torch.no_grad():
        return a * b


def added_in_place(a: Tensor, b: Tensor) -> Tensor:
    return a.add_(b)


def row_written(a: Tensor, b: Tensor) -> Tensor:
    a[0] = b[1]
    return a


def detached_row_written(a: Tensor, b: Tensor) -> Tensor:
    a[0] = b[1].detach()
    return a


def one_hot(a: Tensor, b: Tensor) -> Tensor:
    return functional.one_hot(a.argmax(-1), SIZE).to(a.dtype) * b


def of_one_column(a: Tensor, b: Tensor) -> Tensor:
    column = a[:, :1]
    return column.softmax(-1) * b


OPS: dict[str, Op] = {
    "add": lambda a, b: a + b,
    "sub": lambda a, b: a - b,
    "mul": lambda a, b: a * b,
    "matmul": lambda a, b: a @ b,
    "double": lambda a, b: a * 2 - b * 0.5,
    "divided": lambda a, b: a / (b.square() + 1),
    "sin": lambda a, b: a.sin(),
    "turned": lambda a, b: a.mT.reshape(SIZE, SIZE) + b,
    "where": lambda a, b: torch.where(a > 0, a, b),
    "masked": lambda a, b: a.masked_fill(b > 0, 0.5),
    "softmax": lambda a, b: a.softmax(-1) + b,
    "mean": lambda a, b: a - b.mean(-1, keepdim=True),
    "detach": lambda a, b: a.detach() * b,
    "round": lambda a, b: (a * 3).round() + b,
    "straight through": lambda a, b: a + (a.round() - a).detach() * b,
    "no_grad": without_gradient,
    "in place": added_in_place,
    "row": row_written,
    "detached row": detached_row_written,
    "one hot": one_hot,
    "of one column": of_one_column,
    "function": lambda a, b: NoGradient.apply(a) + b,
    "checkpoint": lambda a, b: checkpoint(lambda x, y: x.cos() * y, a, b, use_reentrant=False),
    "copy": lambda a, b: a.clone(),
}


class Program(nn.Module):
    """Runs ops on three parameters and on the results of earlier ops."""

    def __init__(self, steps: Sequence[tuple[str, int, int]]) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.a, self.b, self.c = (nn.Parameter(torch.randn(SIZE, SIZE, dtype=torch.float64)) for _ in range(3))
        self.steps = steps

    def forward(self) -> Tensor:
        values = [self.a * 1, self.b * 1, self.c * 1]
        for name, first, second in self.steps:
            if name == "break":
                torch._dynamo.graph_break()
                continue
            values.append(OPS[name](values[first % len(values)], values[second % len(values)]))
        return (values[-1] * torch.arange(1.0, 10.0, dtype=torch.float64).view(SIZE, SIZE)).sum()


def programs() -> st.SearchStrategy[list[tuple[str, int, int]]]:
    """Lists of ops with the numbers of their operands."""
    step = st.tuples(st.sampled_from([*OPS]), st.integers(0, 20), st.integers(0, 20))
    return st.lists(step, min_size=1, max_size=9)


@pytest.mark.broad
@given(programs())
def test_flow_is_that_of_autograd(steps: Sequence[tuple[str, int, int]]) -> None:
    check(steps)


@pytest.mark.broad
@given(programs(), st.integers(0, 9), st.integers(0, 9))
def test_flow_through_several_graphs(steps: list[tuple[str, int, int]], first: int, second: int) -> None:
    for place in (first, second):
        steps.insert(place, ("break", 0, 0))
    check(steps)


def check(steps: Sequence[tuple[str, int, int]]) -> None:
    """Compare the parameters that a graph trains with those that have a gradient."""
    model = Program(steps)
    loss = model()
    try:
        if loss.requires_grad:
            loss.backward()
    except RuntimeError:
        assume(False)  # an op has overwritten what a backward needs
    found = flow_of(trace_step(model, None, (), {}), model)
    trained = {*found.bits(found.loss.trained)}

    for name, parameter in model.named_parameters():
        if parameter.grad is None:
            assert name not in trained, name
        elif float(parameter.grad.abs().max()) > ROUNDING:
            assert name in trained, name
    torch.compiler.reset()
