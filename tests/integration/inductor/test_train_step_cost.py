"""What a training step costs: Python calls, transient memory, compilations."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn
from torch._dynamo.utils import counters

import gradrewrite as gr
from gradrewrite.passes import CheckFinite, ClipByGlobalNorm, ClipByNorm

from benchmarks.train_step_cost import MLP, POLICIES, python_calls, transient, two_phases

pytestmark = [pytest.mark.inductor, pytest.mark.slow]


class Stack(nn.Module):
    """Four wide layers: their gradients are larger than their activations."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(*(nn.Linear(256, 256) for _ in range(4)))

    def forward(self, x: Tensor) -> Tensor:
        loss: Tensor = self.layers(x).square().mean()
        return loss


def steps_of(net: nn.Module, policy: list[gr.Rule]) -> gr.TrainStep:
    model = gr.transform(net, policy)
    return gr.train_step(model, torch.optim.AdamW(model.parameters(), lr=1e-3))


def test_a_step_calls_few_python_functions() -> None:
    step, x = steps_of(MLP(64), []), torch.randn(256, 16)
    for _ in range(3):
        step(x)
    assert python_calls(step, (x,)) <= 150


@pytest.mark.sample(2)
def test_a_gradient_dies_at_its_last_use() -> None:
    """A global clip needs all of them at once."""
    sizes = {}
    x = torch.randn(8, 256)
    for name in ("none", "global clip"):
        step = steps_of(Stack(), POLICIES[name])
        for _ in range(2):
            step(x)
        sizes[name] = transient(step, (x,))
    net = Stack()
    net.compile()
    run = two_phases(net, torch.optim.AdamW(net.parameters(), fused=True))
    run(x)
    two = transient(run, (x,))
    gradients = sum(p.nbytes for p in net.parameters()) / 2**20
    assert two >= gradients
    assert sizes["none"] <= 0.6 * two
    assert sizes["global clip"] >= gradients


@pytest.mark.sample(2)
def test_schedules_compile_nothing_and_code_is_stored() -> None:
    policy = [gr.on("error:net.0", ClipByNorm(0.1)), gr.on("gradient:*", [CheckFinite("skip"), ClipByGlobalNorm(1.0)])]
    x = torch.randn(8, 16)

    def train() -> int:
        torch.manual_seed(0)
        model = gr.transform(MLP(16), policy)
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
        scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 10)
        step = gr.train_step(model, optimizer)
        step(x)
        before = counters["inductor"]["fxgraph_cache_miss"] + counters["inductor"]["fxgraph_cache_hit"]
        for _ in range(4):
            scheduler.step()
            optimizer.param_groups[0]["weight_decay"] *= 0.5
            step(x)
        assert counters["inductor"]["fxgraph_cache_miss"] + counters["inductor"]["fxgraph_cache_hit"] == before
        return int(counters["inductor"]["fxgraph_cache_hit"])

    first = train()
    torch.compiler.reset()
    assert train() > first
