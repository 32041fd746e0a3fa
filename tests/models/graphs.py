"""Rewritten graphs for pictures; each is traced once in a process."""

from __future__ import annotations

import functools

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

import gradrewrite as gr
from gradrewrite.passes import CheckFinite, ClipByGlobalNorm, ClipByNorm, ClipByValue, Observe

from models.gpt import Gpt, batch

ODD_NAMES = (
    "quote\"and'quote",
    "a<b>{c}|[d]&amp;$x$\\n",
    "\u5c64 \U0001f525 \u00e9",
    "<script>alert(1)</script>",
    "</script><title>",
    "long" * 75,
    "percent%s{{code}}",
)


class Three(nn.Module):
    """Three layers, the loss inside."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second, self.third = nn.Linear(4, 8), nn.Linear(8, 8), nn.Linear(8, 1)

    def forward(self, x: Tensor) -> Tensor:
        h = torch.tanh(self.first(x))
        return functional.mse_loss(self.third(torch.tanh(self.second(h))), x[:, :1])


class Recurrent(nn.Module):
    """One cell, run once a step."""

    def __init__(self) -> None:
        super().__init__()
        self.step = Step()
        self.head = nn.Linear(5, 2)

    def forward(self, x: Tensor) -> Tensor:
        state = x.new_zeros(x.shape[0], 5)
        for n in range(x.shape[1]):
            state = self.step(x[:, n], state)
        return self.head(state).square().mean()


class Step(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.read, self.keep = nn.Linear(3, 5), nn.Linear(5, 5)

    def forward(self, x: Tensor, state: Tensor) -> Tensor:
        return torch.tanh(self.read(x) + self.keep(state))


class Inner(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a = nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        return torch.tanh(self.a(x)).reshape(-1).exp().sin()


class Constants(nn.Module):
    """A tensor written into the forward, and a buffer that every run updates."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.inner, self.last = nn.BatchNorm1d(4), Inner(), nn.Linear(16, 2)

    def forward(self, x: Tensor) -> Tensor:
        x = self.norm(x) * torch.tensor([1.0, 2.0, 3.0, 4.0])
        return self.last(self.inner(x)).square().sum()


class Odd(nn.Module):
    """Modules whose names no one would give."""

    def __init__(self) -> None:
        super().__init__()
        for name in ODD_NAMES:
            self.add_module(name, nn.Linear(3, 3))

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.children():
            x = torch.relu(layer(x))
        return x.sum()


@functools.cache
def three_layers() -> gr.JointGraph:
    policy = [
        gr.on("error:second", ClipByValue(0.5, log=True)),
        gr.on("error:first", lambda g: g),  # inserts nothing
        gr.on("gradient:*", ClipByGlobalNorm(1.0)),
        gr.on("activation:second", Observe("zeros")),
        gr.on("gradient:*", CheckFinite("record")),
    ]
    return gr.transform(Three(), policy).trace(torch.ones(2, 4))


@functools.cache
def live_thresholds() -> gr.JointGraph:
    """Thresholds that are tensors, a constant of the model, an updated buffer, an edit without nodes in a reshape."""
    bound = torch.tensor(0.5)
    policy = [
        gr.on("error:inner", ClipByValue(bound, log=True)),
        gr.on("gradient:*", ClipByNorm(bound)),
        gr.on("error:inner/reshape", lambda g: g),
    ]
    return gr.transform(Constants(), policy).trace(torch.ones(4, 4))


@functools.cache
def no_edits() -> gr.JointGraph:
    return gr.transform(Three(), []).trace(torch.ones(2, 4))


@functools.cache
def recurrent() -> gr.JointGraph:
    policy = [gr.on("error:step", ClipByNorm(1.0)), gr.on("gradient:*", ClipByValue(1.0))]
    return gr.transform(Recurrent(), policy).trace(torch.ones(2, 40, 3))


@functools.cache
def odd_names() -> gr.JointGraph:
    return gr.transform(Odd(), gr.on("error:*", ClipByValue(1.0, log=True))).trace(torch.ones(2, 3))


@functools.cache
def transformer(layers: int = 2, *, clips_gradients: bool = True) -> gr.JointGraph:
    policy = [gr.on("error:blocks.*", ClipByValue(1.0, log=clips_gradients))]
    if clips_gradients:
        policy.append(gr.on("gradient:*", ClipByNorm(1.0)))
    return gr.transform(Gpt(layers=layers), policy).trace(*batch())


GRAPHS = {
    graph.__name__: graph for graph in (three_layers, live_thresholds, no_edits, recurrent, odd_names, transformer)
}
EACH = pytest.mark.parametrize(
    "make",
    [
        pytest.param(make, id=name, marks=pytest.mark.slow if name == "recurrent" else ())  # a graph of 1000 nodes
        for name, make in GRAPHS.items()
    ],
)
