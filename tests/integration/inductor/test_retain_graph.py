"""``backward(retain_graph=True)`` of a compiled rewritten model, against hooks in eager mode."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch._dynamo.utils import counters
from torch._inductor.utils import fresh_cache

import gradrewrite as gr
from gradrewrite._compat import inductor
from gradrewrite.passes import CheckFinite, ClipByValue, Observe

from helpers import failure

BOUND = 1e-2
POLICY = gr.on("error:first", [ClipByValue(BOUND), Observe("max_abs")])


class Net(nn.Module):
    """Gelu and tanh keep tensors that a compiled backward may overwrite."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(8, 32), nn.Linear(32, 2)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        out = self.second(torch.tanh(nn.functional.gelu(self.first(x)))).square()
        return out[:, 0].sum(), out[:, 1].sum()


def compiled(policy: Any, build: type[Net]) -> Any:
    """A compiled model after a plain step: torch then refuses to keep a graph whose buffers it donated."""
    torch.manual_seed(0)
    torch._dynamo.reset()
    model = gr.transform(build(), policy)
    model.compile()
    sum(model(X)).backward()
    model.zero_grad()
    return model


def gradients(losses: tuple[Tensor, Tensor], model: nn.Module) -> list[Tensor]:
    losses[0].backward(retain_graph=True)
    losses[1].backward(retain_graph=True)
    (losses[0] + losses[1]).backward()
    return [p.grad for p in model.parameters()]


X = torch.linspace(-2, 2, 32).reshape(4, 8)


def wanted() -> list[Tensor]:
    torch.manual_seed(0)
    model = Net()
    model.first.register_forward_hook(lambda _, __, out: out.register_hook(lambda g: g.clamp(-BOUND, BOUND)) and None)
    return gradients(model(X), model)


@pytest.mark.inductor
@pytest.mark.slow
def test_three_backwards_of_one_graph_equal_hooks() -> None:
    plain = torch.compile(Net())
    sum(plain(X)).backward()
    with pytest.raises(RuntimeError, match="donated buffers"):
        gradients(plain(X), plain)

    model = compiled(POLICY, Net)
    got = gradients(model(X), model)

    torch.testing.assert_close(got, wanted())
    assert len(model.monitor.history("max_abs@error:first")) == 4


@pytest.mark.inductor
@pytest.mark.slow
@pytest.mark.skipif(not inductor.knows_cache(), reason="its parts are private, and unknown of this torch")
def test_code_out_of_the_cache_keeps_its_graph_too() -> None:
    with fresh_cache():
        for _ in range(2):
            counters.clear()
            model = compiled(POLICY, Net)
            got = gradients(model(X), model)

    assert counters["aot_autograd"]["autograd_cache_hit"] == 1
    torch.testing.assert_close(got, wanted())


@pytest.mark.inductor
@pytest.mark.slow
def test_a_failed_check_of_the_second_backward_is_replayed() -> None:
    class Large(Net):
        def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
            first, second = super().forward(x)
            small = second - second.detach()
            return first, (small * 1e30).mul(1e30)

    model = gr.transform(Large(), gr.on("error:*", CheckFinite()))
    model.compile()
    first, second = model(X)
    first.backward()
    first, second = model(X)
    first.backward(retain_graph=True)

    err = failure(second.backward)
    assert err.op == "/mul"
    assert "small * 1e30" in err.source
    assert err.step == 2
