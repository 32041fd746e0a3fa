"""Tensors that functions close over, and that change between a forward and its backward."""

from __future__ import annotations

import warnings
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import gradrewrite as gr
from gradrewrite.passes import ClipByNorm

POLICIES = {
    "function": lambda bound: gr.on("gradient:0.weight", lambda g: g * bound),
    "bound": lambda bound: gr.on("gradient:0.weight", ClipByNorm(bound)),
    "error": lambda bound: gr.on("error:0", lambda g: g * bound),
}


def made(kind: str, **options: Any) -> tuple[gr.RewrittenModule, Tensor]:
    bound = torch.tensor(1.0)
    net = nn.Sequential(nn.Linear(3, 3), nn.Tanh(), nn.Linear(3, 1))
    return gr.transform(net, POLICIES[kind](bound), **options), bound


# A region that saves its input alone, as a linear layer does, cannot tell calls with the same input apart.
@pytest.mark.broad
@pytest.mark.parametrize(
    ("options", "is_same_input"),
    [({}, False), ({}, True), ({"regions": "0"}, False), ({"fullgraph": False}, False), ({"fullgraph": False}, True)],
)
@pytest.mark.parametrize("kind", POLICIES)
def test_two_forwards_before_two_backwards(kind: str, options: dict[str, Any], is_same_input: bool) -> None:
    model, bound = made(kind, **options)
    x = torch.randn(2, 3)
    first = model(x).sum()
    bound.fill_(2.0)
    second = model(x if is_same_input else torch.randn(2, 3)).sum()
    site = "error:0" if kind == "error" else "gradient:0.weight"
    with pytest.warns(gr.RewriteWarning, match=rf"{site}: a tensor of shape \(\) has changed since the forward"):
        torch.autograd.backward([first])
    second.backward()


@pytest.mark.broad
@pytest.mark.parametrize("kind", POLICIES)
def test_what_changes_in_an_ordinary_loop_is_no_matter(kind: str) -> None:
    model, bound = made(kind)
    losses = []
    for step in range(4):
        loss = model(torch.randn(2, 3)).sum()
        bound.fill_(1.0 + step)  # read when the backward runs
        loss.backward()
        losses.append(loss)
        model(torch.randn(2, 3))  # without a backward
        bound.fill_(2.0 + step)
    first, second = model(torch.randn(2, 3)).sum(), model(torch.randn(2, 3)).sum()
    first.backward()
    second.backward()


def test_a_buffer_that_the_forward_writes_is_named() -> None:
    net = nn.Sequential(nn.Linear(3, 3), nn.BatchNorm1d(3), nn.Linear(3, 1))
    mean = net[1].running_mean
    assert isinstance(mean, Tensor)
    model = gr.transform(net, gr.on("error:0", lambda g: g + mean))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        model(torch.randn(4, 3)).sum().backward()
    first, second = (model(torch.randn(4, 3)).sum() for _ in range(2))
    with pytest.warns(gr.RewriteWarning, match="error:0: 1.running_mean has changed since the forward"):
        first.backward()
    second.backward()


def test_schedules_and_states_change_by_themselves() -> None:
    mean = gr.State()

    def follow(g: Tensor) -> Tensor:
        mean.set((mean + g.abs().amax()) / 2)
        return g * mean

    policy = [gr.on("gradient:0.weight", [follow, ClipByNorm(gr.Schedule(lambda step: 1.0 / (1 + step)))])]
    model = gr.transform(nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 1)), policy)
    for _ in range(3):
        first, second = (model(torch.randn(2, 3)).sum() for _ in range(2))
        first.backward()
        second.backward()
