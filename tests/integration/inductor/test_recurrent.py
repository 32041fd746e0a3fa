"""``nn.LSTM``, ``nn.GRU`` and ``nn.RNN`` compiled, with actions inside: against eager loops over cells with hooks."""

from __future__ import annotations

import gc
from typing import Any

import pytest
import torch
from torch import nn
from torch._dynamo.utils import counters

import gradrewrite as gr
from gradrewrite.passes import ClipByNorm, Observe
from gradrewrite.testing import assert_matches_eager

from models.recurrent import Recurrent, loop_over_cells

pytestmark = pytest.mark.inductor
FEATURES, WIDTH = 5, 7


class Cells(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.cell = nn.LSTMCell(FEATURES, WIDTH)

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, ...]:
        h = c = x.new_zeros(x.shape[1], WIDTH)
        for step in x:
            h, c = self.cell(step, (h, c))
        return h, c


def weighted(outputs: tuple[torch.Tensor, ...]) -> torch.Tensor:
    torch.manual_seed(1)
    return torch.stack([(out * torch.randn(out.shape, dtype=out.dtype)).sum() for out in outputs]).sum()


def scaled(error: torch.Tensor) -> torch.Tensor:
    return error * (0.7 / error.norm().clamp(min=0.7))


@pytest.mark.parametrize(
    ("layer", "dtype"), [(nn.LSTM, torch.float64), (nn.GRU, torch.float32), (nn.RNN, torch.float64)]
)
def test_clips_inside_for_all_lengths_and_batches(layer: Any, dtype: torch.dtype) -> None:
    tolerance = 1e-10 if dtype == torch.float64 else 2e-5
    model = Recurrent(layer(FEATURES, WIDTH).to(dtype))
    rewritten = gr.transform(
        model, [gr.on("error:rec.l0/h", ClipByNorm(0.7)), gr.on("activation:*/gates", Observe("norm"))]
    )
    rewritten.compile()
    for length, batch in ((6, 3), (9, 3), (5, 4), (7, 2), (1, 3)):
        x = torch.randn(length, batch, FEATURES, dtype=dtype)
        found, wanted = rewritten(x), loop_over_cells(model.rec, x, {"h": lambda _: scaled})
        own = torch.autograd.grad(weighted(found), list(model.parameters()))
        other = torch.autograd.grad(weighted(wanted), list(model.parameters()))
        for a, b in zip((*found, *own), (*wanted, *other), strict=True):
            torch.testing.assert_close(a, b, rtol=tolerance, atol=tolerance)
        assert len([a for a in rewritten.monitor.latest() if a.startswith("norm@error")]) == length


@pytest.mark.slow
@pytest.mark.parametrize("policy", [[], gr.on("error:*/h", ClipByNorm(0.7))], ids=["plain", "inside"])
@pytest.mark.parametrize("layer", [nn.LSTM, nn.GRU])
def test_layers_and_directions(layer: Any, policy: Any) -> None:
    model = Recurrent(layer(FEATURES, WIDTH, num_layers=2, bidirectional=True, batch_first=True).double())
    x = torch.randn(3, 6, FEATURES, dtype=torch.float64)
    compiled, plain = gr.transform(model, policy), gr.transform(model, policy)
    compiled.compile()
    found, wanted = compiled(x), plain(x)
    own = torch.autograd.grad(weighted(found), list(model.parameters()))
    other = torch.autograd.grad(weighted(wanted), list(model.parameters()))
    for a, b in zip((*found, *own), (*wanted, *other), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-10, atol=1e-10)


@pytest.mark.parametrize("layer", [nn.LSTM, nn.GRU, nn.RNN, "rolled"])
def test_gradients_of_two_biases_are_two_tensors(layer: Any) -> None:
    if layer == "rolled":
        plain, options = Cells(), {"loops": "rolled"}
    else:
        plain, options = Recurrent(layer(FEATURES, WIDTH)), {}
    model = gr.transform(plain.double(), [], **options).compile()
    x = torch.randn(6, 2, FEATURES, dtype=torch.float64)
    for number in (1, 2, 3):  # autograd adds to a gradient in place
        weighted(model(x)).backward()
        found = [p.grad.clone() for p in model.parameters()]
        if number == 1:
            first = found

    assert len({p.grad.untyped_storage().data_ptr() for p in model.parameters()}) == len(found)
    for grad, once in zip(found, first, strict=True):
        torch.testing.assert_close(grad, 3 * once)


def test_a_state_for_each_iteration() -> None:
    mean = gr.State((), 1.0, torch.float64, name="mean")

    def divide(error: torch.Tensor) -> torch.Tensor:
        mean.set(0.5 * mean.value + 0.5 * error.abs().mean())
        return error / (1 + 10 * mean.value)

    x = torch.randn(6, 3, FEATURES, dtype=torch.float64)
    model = Recurrent(nn.LSTM(FEATURES, WIDTH, bidirectional=True).double())
    assert len(assert_matches_eager(model, gr.on("error:*/h", divide), x, steps=3).changed) == 12


def test_code_comes_from_inductor_s_cache() -> None:
    def found() -> tuple[int, int]:
        model = gr.transform(Recurrent(nn.LSTM(FEATURES, WIDTH)), gr.on("error:rec.l0/h", ClipByNorm(0.7))).compile()
        counters.clear()
        weighted(model(torch.randn(6, 3, FEATURES))).backward()
        return counters["inductor"]["fxgraph_cache_hit"], counters["inductor"]["fxgraph_cache_bypass"]

    found()
    torch.compiler.reset()
    gc.collect()  # the code of loops is shared as long as a model with it is alive
    assert found() == (4, 0)  # forward, backward, and the bodies of both


@pytest.mark.parametrize("layer", [nn.GRU, nn.LSTM, nn.RNN])
@pytest.mark.parametrize("batch_first", [False, True])
def test_evaluation_is_torch_s_layer(layer: type[nn.GRU | nn.LSTM | nn.RNN], batch_first: bool) -> None:
    model = Recurrent(layer(FEATURES, WIDTH, batch_first=batch_first))
    rewritten = gr.transform(model, gr.on("error:rec.l0/h", Observe("norm")))
    rewritten.compile()
    x = torch.randn(6, 3, FEATURES)
    with torch.no_grad():
        for a, b in zip(rewritten(x), model(x), strict=True):
            if batch_first:
                torch.testing.assert_close(a, b, rtol=1e-6, atol=1e-6)
            else:
                assert torch.equal(a, b)
