"""Numbers of calls in a forward that runs in several graphs, against a model that is one graph."""

from __future__ import annotations

import copy
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

import gradrewrite as gr
from gradrewrite.backends.backend import make_backend
from gradrewrite.backends.engines import AotEager

pytestmark = pytest.mark.filterwarnings(
    "ignore:the tracer skipped a region:gradrewrite.RewriteWarning",
    "ignore:a part of this call ran outside:gradrewrite.RewriteWarning",
)


class Layer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        h: Tensor = self.linear(x)
        return h.tanh()


class Twice(nn.Module):
    """Calls a layer three times, with breaks between them."""

    def __init__(self, *, broken: bool) -> None:
        super().__init__()
        self.layer, self.broken = Layer(), broken

    def forward(self, x: Tensor) -> Tensor:
        h = self.layer(x).sin()
        if self.broken:
            torch._dynamo.graph_break()
        h = self.layer(h).sin()
        h = self.layer(h)
        if self.broken:
            torch._dynamo.graph_break()
        return h.cos().sum()


class Loop(nn.Module):
    """Dynamo leaves the loop, and compiles the layer's frame for all of its calls."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = Layer()

    def forward(self, x: Tensor) -> Tensor:
        for _ in range(3):
            torch._dynamo.graph_break()
            x = self.layer(x)
        return x.sum()


def halve(g: Tensor) -> Tensor:
    return g / 2


WAYS: dict[str, Callable[[nn.Module, gr.Policy], Callable[[Tensor], Tensor]]] = {
    "parts": lambda model, policy: gr.transform(model, policy, fullgraph=False),
    "backend": lambda model, policy: torch.compile(model, backend=make_backend(policy, None, AotEager())),
}


@pytest.mark.broad
@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("pattern", ["layer", "layer#0", "layer#1", "layer#2", "layer.linear#1", "/sin", "/sin#1"])
def test_a_call_is_that_of_the_forward(pattern: str, way: str) -> None:
    whole = Twice(broken=False)
    parts = copy.deepcopy(whole)
    parts.broken = True
    policy = gr.on(f"error:{pattern}", halve)
    runs = gr.transform(whole, policy), WAYS[way](parts, policy)
    for rows in (2, 2, 3):
        x = torch.randn(rows, 4)
        for model, run in zip((whole, parts), runs, strict=True):
            model.zero_grad()
            run(x).backward()
        for p, q in zip(parts.parameters(), whole.parameters(), strict=True):
            torch.testing.assert_close(p.grad, q.grad)


@pytest.mark.broad
def test_sites_and_states_of_calls_behind_a_break_are_their_own() -> None:
    count = gr.State(name="count")

    def counted(g: Tensor) -> Tensor:
        count.set(count + 1)
        return g

    model = gr.transform(Twice(broken=True), gr.on("error:layer", counted), fullgraph=False)
    for _ in range(2):
        model(torch.randn(2, 4)).backward()

    assert gr.state_dict(model)["states"] == {
        f"error:layer{call}/count": torch.tensor(2.0) for call in ("", "#1", "#2")
    }


@pytest.mark.broad
@pytest.mark.parametrize("call", [1, 2])
def test_one_frame_for_several_calls_refuses_a_number(call: int) -> None:
    loop = Loop()
    before = copy.deepcopy(loop.state_dict())
    model = gr.transform(loop, gr.on(f"error:layer.linear#{call}", halve), fullgraph=False)
    x = torch.randn(2, 4, requires_grad=True)
    with pytest.raises(gr.PolicyError, match=rf"'error:layer.linear#{call}': layer.linear is called several times"):
        model(x).backward()

    assert all(torch.equal(t, before[name]) for name, t in loop.state_dict().items())


@pytest.mark.broad
def test_one_frame_for_several_calls_takes_rules_without_a_number() -> None:
    plain = Loop()
    parts = copy.deepcopy(plain)
    model = gr.transform(parts, gr.on("error:layer.linear", halve), fullgraph=False)
    x = torch.randn(2, 4)
    model(x).backward()
    h = x
    for _ in range(3):
        h = plain.layer.linear(h)
        h.register_hook(lambda g: g / 2)
        h = h.tanh()
    h.sum().backward()

    torch.testing.assert_close(parts.layer.linear.weight.grad, plain.layer.linear.weight.grad)
