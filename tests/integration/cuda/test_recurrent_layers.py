"""Recurrent layers on a GPU: cuDNN's call where nothing is inside, loops without a wait, CUDA graphs."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import gradrewrite as gr
from gradrewrite.instrumentation import recurrent
from gradrewrite.passes import ClipByNorm, Observe

from gpu import twins
from gpu.log import SimulatedGpu
from models.cudnn import cudnn_on_cpu

pytestmark = pytest.mark.cuda
WIDTH, FEATURES, LENGTH, BATCH = 7, 5, 4, 3
LAYERS = {
    "lstm": lambda **settings: nn.LSTM(FEATURES, WIDTH, **settings),
    "gru": lambda **settings: nn.GRU(FEATURES, WIDTH, **settings),
    "tanh": lambda **settings: nn.RNN(FEATURES, WIDTH, **settings),
    "relu": lambda **settings: nn.RNN(FEATURES, WIDTH, nonlinearity="relu", **settings),
}


@pytest.fixture
def cudnn(simulation: SimulatedGpu | None, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """cuDNN's layers, or on the simulated GPU others that compute the same."""
    if simulation is None:
        yield
        return
    monkeypatch.setattr(nn.RNNBase, "flatten_parameters", lambda self: None)
    monkeypatch.setattr(recurrent, "has_cudnn", lambda x: x.device.type == "cuda")
    with cudnn_on_cpu():
        yield


class Net(nn.Module):
    """A layer and a loss of all its results."""

    def __init__(self, rec: nn.Module) -> None:
        super().__init__()
        self.rec = rec

    def forward(self, x: Tensor) -> Tensor:
        output, states = self.rec(x)
        states = states if isinstance(states, tuple) else (states,)
        return output.square().sum() + sum(s.sum() for s in states)


def on_host(tensor: Tensor | None, simulation: SimulatedGpu | None) -> Tensor:
    assert tensor is not None
    return tensor.cpu() if simulation is None else twins.twin(tensor.detach())


def moved_to_gpu(model: nn.Module, simulation: SimulatedGpu | None) -> nn.Module:
    moved: Any = copy.deepcopy(model).cuda()
    if simulation is not None:  # which moves the parameters behind the layer's back
        moved.rec._init_flat_weights()
    return moved


def compare(
    model: nn.Module, policy: Any, x: Tensor, simulation: SimulatedGpu | None, **settings: Any
) -> gr.RewrittenModule:
    """Compare a training step on the GPU with that of the policy on the CPU."""
    plain = gr.transform(copy.deepcopy(model), policy)
    rewritten = gr.transform(moved_to_gpu(model, simulation), policy)
    if settings:
        rewritten.compile(**settings)
    plain(x).backward()
    rewritten(x.cuda()).backward()
    found = [on_host(p.grad, simulation) for p in rewritten.parameters()]
    wanted = [on_host(p.grad, simulation) for p in plain.parameters()]
    with twins.plain():
        torch.testing.assert_close(found, wanted, rtol=1e-4, atol=1e-5)
    return rewritten


@pytest.mark.usefixtures("cudnn")
@pytest.mark.parametrize(
    "settings", [{}, {"num_layers": 2, "bidirectional": True, "batch_first": True}, {"bias": False}]
)
@pytest.mark.parametrize("name", LAYERS)
def test_a_layer_without_an_action_inside_is_one_call_of_cudnn(
    name: str, settings: dict[str, Any], simulation: SimulatedGpu | None
) -> None:
    rewritten = compare(Net(LAYERS[name](**settings)), [], torch.randn(LENGTH, BATCH, FEATURES), simulation)
    code = rewritten.trace(torch.randn(LENGTH, BATCH, FEATURES).cuda()).code
    assert (code.count("cudnn_layers.default("), code.count("cudnn_layers_backward.default(")) == (1, 1)
    assert "loop" not in code


@pytest.mark.usefixtures("cudnn")
def test_dropout_between_layers(simulation: SimulatedGpu | None) -> None:
    """A call of cuDNN for each layer, and torch's dropout between them; of evaluation one call."""
    model = Net(nn.LSTM(FEATURES, WIDTH, num_layers=3, dropout=0.5))
    x = torch.randn(LENGTH, BATCH, FEATURES)
    compare(model.eval(), [], x, simulation)
    moved = moved_to_gpu(model.train(), simulation)
    code = gr.transform(moved, []).trace(x.cuda()).code
    assert code.count("cudnn_layers.default(") == code.count("cudnn_layers_backward.default(") == 3


@pytest.mark.usefixtures("cudnn")
@pytest.mark.parametrize("name", LAYERS)
def test_an_action_inside_does_not_wait(name: str, simulation: SimulatedGpu | None) -> None:
    """The loop runs on the device; the host counts the iterations, and reads nothing."""
    policy = [gr.on("error:rec.l0/h", ClipByNorm(0.1)), gr.on("error:rec.l0/gates", Observe("norm"))]
    model, x = Net(LAYERS[name]()), torch.randn(LENGTH, BATCH, FEATURES)
    rewritten = compare(model, policy, x, simulation)
    x = x.cuda()
    torch.cuda.set_sync_debug_mode("error")
    try:
        rewritten(x).backward()
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert len(rewritten.monitor.latest()) == 4 * LENGTH


@pytest.mark.inductor
@pytest.mark.usefixtures("cudnn")
@pytest.mark.parametrize("dynamic", [None, False])
def test_cuda_graphs(dynamic: bool | None, simulation: SimulatedGpu | None) -> None:
    model, x = Net(nn.GRU(FEATURES, WIDTH)), torch.randn(LENGTH, BATCH, FEATURES)
    policy = gr.on("error:rec.l0/h", ClipByNorm(0.1))
    rewritten = compare(model, policy, x, simulation, mode="reduce-overhead", dynamic=dynamic)
    for _ in range(3):
        rewritten(x.cuda()).backward()
    if simulation is not None:
        assert (simulation.num_graphs, simulation.graph_refusals) == (2, [])
