"""Non-finite values that begin inside a loop: the answer is that of the unrolled loop, with op, line and iteration."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import gradrewrite as gr
from gradrewrite.passes import CheckFinite, ClipByNorm, Scale

WINDOW = "; just before it[^;]*"  # rows that an iteration reads are read at its beginning
COVER = "; the loss does not show it: .* hides? it"  # what hides a value inside of a loop is not looked for
REACHED = "; it reaches [^;]* first"  # a loop keeps what its backward reads, and that may hold the value or not


Forward = Callable[[Any, Tensor], Tensor]


class Faulty(nn.Module):
    """A loop with a fault."""

    def __init__(self, name: str) -> None:
        super().__init__()
        self.inside, self.back = nn.Linear(4, 4), nn.Linear(4, 4)
        self.name = name

    def forward(self, x: Tensor) -> Tensor:
        return FORWARDS[self.name](self, x)


def loop_of(function: Callable[[Tensor, Tensor], Tensor]) -> Forward:
    """Return a loop with a function in each of its iterations."""

    def forward(s: Any, x: Tensor) -> Tensor:
        h, states = x[:, 0], []
        for t in range(x.shape[1]):
            h = s.back(function(s.inside(h).tanh(), x[:, t]))
            states.append(h)
        return torch.stack(states, 1)

    return forward


def logarithm(h: Tensor, x: Tensor) -> Tensor:
    return torch.log(x - 3) + h  # NaN where x is small


def root(h: Tensor, x: Tensor) -> Tensor:
    return torch.sqrt(h * 0) * x + h  # an infinite gradient


def discarded(h: Tensor, x: Tensor) -> Tensor:
    """Return a logarithm, of which the infinite values are discarded, and 1 / 0 at one place."""
    return torch.where(x > 0, torch.log(x * 0 + 1), torch.log(x * 0)) * 0.1 + h / x[..., :1]


def trap(h: Tensor, x: Tensor) -> Tensor:
    """Discard infinite values, whose gradient is 0 times infinity."""
    return torch.where(x >= 0, h, torch.exp(1e4 + h))


def running_maximum(s: Any, x: Tensor) -> Tensor:
    """Begin with an infinity that the program wrote."""
    h, largest, states = x[:, 0], x.new_full((3, 4), float("-inf")), []
    for t in range(x.shape[1]):
        h = root(s.inside(h).tanh(), x[:, t])
        largest = torch.maximum(largest, h)
        states.append(torch.exp(h - largest))
    return torch.stack(states, 1)


def masked(s: Any, x: Tensor) -> Tensor:
    """Return infinities that the program wrote, which softmax reads."""
    h, states = x[:, 0], []
    for t in range(x.shape[1]):
        h = root(s.inside(h).tanh(), x[:, t])
        states.append(s.back(h).masked_fill(x[:, t] < 4.2, float("-inf")))
    return torch.softmax(torch.stack(states, 1), 1)


def discarded_output(s: Any, x: Tensor) -> Tensor:
    """Discard outside what is not finite inside, from the first iteration on."""
    h, states, others = x[:, 0], [], []
    for t in range(x.shape[1]):
        h = s.inside(h).tanh() / x[:, t, :1]
        others.append(torch.log(h.detach() * 0) * 2)
        states.append(h)
    return torch.where(x.detach() > -1, torch.stack(states, 1), torch.stack(others, 1))


def discarded_row(s: Any, x: Tensor) -> Tensor:
    """Discard inside what is not finite outside."""
    rows, h, states = torch.log(x.detach() - x.detach()[:, :1]), x[:, 0], []
    for t in range(x.shape[1]):
        h = s.inside(h).tanh() / x[:, t, :1] + torch.where(x[:, t] > -1, x[:, t], rows[:, t])
        states.append(h)
    return torch.stack(states, 1)


def second_loop(s: Any, x: Tensor) -> Tensor:
    """Read in a loop what another one made."""
    h, states, g, others = x[:, 0], [], x[:, 1], []
    for _ in range(x.shape[1]):
        h = s.inside(h).tanh()
        states.append(h)
    for t in range(x.shape[1]):
        g = s.back(g * states[t]).tanh() / x[:, t, :1]
        others.append(g)
    return torch.stack(others, 1)


def first_loop(s: Any, x: Tensor) -> Tensor:
    """Hand on what is not finite to another loop."""
    h, states, g, others = x[:, 0], [], x[:, 1], []
    for t in range(x.shape[1]):
        h = s.inside(h).tanh() / x[:, t, :1]
        states.append(h)
    for t in range(x.shape[1]):
        g = s.back(g + states[t]).tanh()
        others.append(g)
    return torch.stack(others, 1)


FORWARDS: dict[str, Forward] = {one.__name__: loop_of(one) for one in (logarithm, root, discarded, trap)}
FORWARDS |= {
    one.__name__: one for one in (running_maximum, masked, discarded_output, discarded_row, second_loop, first_loop)
}


def by_call(site: gr.Site) -> Any:
    """Return a factor that overflows in one iteration."""
    if site.kind == "error" and site.name == "back":
        return Scale(4e300 if site.call == 4 else 1e20 if site.call == 5 else 1.0)
    return None


POLICIES: dict[str, Any] = {
    "everywhere": [gr.on(f"{kind}:*/*", CheckFinite()) for kind in ("activation", "error")],
    "errors": gr.on("error:*/*", CheckFinite()),
    "modules": [gr.on(f"{kind}:*", CheckFinite()) for kind in ("activation", "error")],
    "gradients": gr.on("gradient:*", CheckFinite()),
    "factors": [by_call, gr.on("gradient:*", CheckFinite())],
    "clipped": [gr.on("error:*", ClipByNorm(1.0)), gr.on("gradient:*", CheckFinite())],
}


def inputs() -> Tensor:
    x = torch.rand(3, 8, 4, generator=torch.Generator().manual_seed(0), dtype=torch.float64) + 4
    x[1, 3, 0] = 0.0
    return x


def fault_of(model: Any, x: Tensor) -> gr.NonFiniteError:
    loss = model(x).square().mean()

    def step() -> None:
        loss.backward()
        model.monitor.flush()

    with pytest.raises(gr.NonFiniteError) as caught:
        step()
    return caught.value


def error_of(function: str, policy: str, loops: Any) -> gr.NonFiniteError:
    torch.manual_seed(0)
    model = gr.transform(Faulty(function).double(), POLICIES[policy], loops=loops)
    x = inputs().requires_grad_()
    return fault_of(model, x)


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("function", FORWARDS)
def test_the_answer_is_that_of_the_unrolled_loop(function: str, policy: str) -> None:
    rolled, unrolled = (error_of(function, policy, loops) for loops in ("rolled", None))

    assert unrolled.op
    assert unrolled.source
    assert {*map(str, rolled.others)} == {*map(str, unrolled.others)}
    one, other = (re.sub(f"{WINDOW}|{REACHED}|{COVER}", "", str(err)) for err in (rolled, unrolled))
    assert one == other


class Recurrent(nn.Module):
    """States that grow until they are infinite."""

    def __init__(self) -> None:
        super().__init__()
        self.rec = nn.RNN(4, 4, nonlinearity="relu", batch_first=True, dtype=torch.float64)
        with torch.no_grad():
            self.rec.weight_hh_l0.fill_(1e60)

    def forward(self, x: Tensor) -> Tensor:
        output: Tensor = self.rec(x)[0]
        return output


@pytest.mark.parametrize("compiled", [False, pytest.param(True, marks=pytest.mark.inductor)])
@pytest.mark.parametrize("pattern", ["error:*/*", "gradient:*", "activation:*/*"])
def test_recurrent_layers(pattern: str, compiled: bool) -> None:
    torch.manual_seed(0)
    policy = [gr.on(pattern, CheckFinite()), gr.on("error:rec.l0/h", ClipByNorm(1e300))]
    model = gr.transform(Recurrent(), policy)
    if compiled:
        model.compile()
    error = fault_of(model, torch.ones(2, 9, 4, dtype=torch.float64))

    assert str(error.site) == "activation:rec.l0/gates#6"
    assert error.op == "rec/gates"
    assert error.site.iteration == 6
    assert [str(seen.site) for seen in error.window[-2:]] == ["activation:rec.l0/gates#5", "activation:rec.l0/h#5"]


@pytest.mark.inductor
def test_compiled() -> None:
    torch.manual_seed(0)
    model = gr.transform(Faulty("root").double(), POLICIES["gradients"], loops="rolled").compile()
    error = fault_of(model, inputs())

    assert str(error).startswith(
        "step 0: first non-finite: error:/mul#14, 100 % of 12 elements, made by the backward of"
    )
    assert "/sqrt, test_faults_in_loops.py" in str(error)
