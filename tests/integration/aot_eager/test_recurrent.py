"""Recurrent layers, with ``torch._dynamo.config.allow_rnn``: gradients against eager autograd with hooks."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import gradrewrite as gr
from gradrewrite.passes import ClipByValue, Scale

from helpers import gradients_of, mostly_slow

BOUND = 0.05


class Recurrent(nn.Module):
    def __init__(self, layer: type[nn.RNNBase], **settings: Any) -> None:
        super().__init__()
        self.rnn = layer(3, 4, batch_first=True, **settings)
        self.head = nn.Linear(4 * (1 + self.rnn.bidirectional), 2)

    def forward(self, x: Tensor) -> Tensor:
        output, _ = self.rnn(x)
        return self.head(output).square().sum()


@pytest.fixture(autouse=True)
def _allowed() -> Iterator[None]:
    with torch._dynamo.config.patch(allow_rnn=True):
        yield


@pytest.fixture
def sequence() -> Tensor:
    return torch.randn(2, 5, 3)


def clipped_by_a_hook(model: nn.Module, x: Tensor) -> dict[str, Tensor | None]:
    model = copy.deepcopy(model)
    model.rnn.register_forward_hook(lambda _, __, out: out[0].register_hook(lambda g: g.clamp(-BOUND, BOUND)) and None)
    model(x).backward()
    return gradients_of(model)


@pytest.mark.long
@pytest.mark.parametrize(
    ("layer", "settings", "input_needs_grad"),
    mostly_slow(
        [
            (nn.LSTM, {}, False),
            (nn.LSTM, {}, True),
            (nn.LSTM, {"num_layers": 2, "bidirectional": True}, False),
            (nn.GRU, {"num_layers": 2, "bidirectional": True}, False),
            (nn.RNN, {}, False),
        ],
        1,
    ),
)
def test_clip_at_the_output(
    layer: type[nn.RNNBase], settings: dict[str, Any], input_needs_grad: bool, sequence: Tensor
) -> None:
    plain = Recurrent(layer, **settings)
    wanted = clipped_by_a_hook(plain, sequence)
    sequence.requires_grad_(input_needs_grad)
    model = gr.transform(plain, gr.on("error:rnn#0", ClipByValue(BOUND)))
    model(sequence).backward()

    assert any(str(s) == "error:rnn" for g in model.explain().graphs for s in g.sites)
    for name, gradient in gradients_of(model).items():
        torch.testing.assert_close(gradient, wanted[name])
    (free,) = torch.autograd.grad(plain(sequence), [plain.rnn.weight_ih_l0])
    assert not torch.allclose(free, wanted["rnn.weight_ih_l0"])  # the clip acts


@pytest.mark.parametrize("layer", [nn.LSTM, nn.GRU])
@pytest.mark.slow
def test_evaluation(layer: type[nn.RNNBase], sequence: Tensor) -> None:
    plain = Recurrent(layer)
    model = gr.transform(plain, gr.on("gradient:*", Scale(2.0)))
    model(sequence).backward()

    with torch.no_grad():
        assert torch.equal(model(sequence), plain(sequence))
    assert not sequence.requires_grad
    assert torch.backends.mkldnn.enabled == torch.backends.mkldnn.is_available()


@pytest.mark.inductor
@pytest.mark.parametrize("layer", [nn.LSTM, nn.GRU])
def test_inductor(layer: type[nn.RNNBase], sequence: Tensor) -> None:
    plain = Recurrent(layer)
    wanted = clipped_by_a_hook(plain, sequence)
    model = gr.transform(plain, gr.on("error:rnn", ClipByValue(BOUND)))
    model.compile()
    model(sequence).backward()

    for name, gradient in gradients_of(model).items():
        torch.testing.assert_close(gradient, wanted[name])
