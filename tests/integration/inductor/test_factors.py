"""Functions whose ops have a factor mean the same compiled: behind matrix products, convolutions and at step sites."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import Tensor, nn

import gradrewrite as gr
from gradrewrite.testing import assert_matches_eager

from models.factors import FUNCTIONS, Function


class Products(nn.Module):
    """For each function a linear layer, a convolution and a product of batches."""

    def __init__(self) -> None:
        super().__init__()
        self.linears = nn.ModuleList(nn.Linear(4, 3, dtype=torch.float64) for _ in FUNCTIONS)
        self.convs = nn.ModuleList(nn.Conv1d(2, 3, 3, padding=1, dtype=torch.float64) for _ in FUNCTIONS)
        self.stacks = nn.ParameterList(torch.randn(2, 4, 4, dtype=torch.float64) for _ in FUNCTIONS)

    def forward(self, x: Tensor) -> Tensor:
        found = []
        for linear, conv, stack in zip(self.linears, self.convs, self.stacks, strict=True):
            found += [linear(torch.bmm(conv(x)[:, :2], stack)).square().mean()]
        return torch.stack(found).sum()


@pytest.mark.parametrize("kind", ["gradient", "error"])
def test_gradients_equal_eager(kind: str) -> None:
    names = {
        "gradient": ("gradient:linears.{}.weight", "gradient:convs.{}.weight", "gradient:stacks.{}"),
        "error": ("error:linears.{}", "error:convs.{}"),
    }[kind]
    policy = [gr.on(name.format(n), run) for n, run in enumerate(FUNCTIONS.values()) for name in names]
    model = Products()
    found = assert_matches_eager(model, policy, torch.randn(2, 2, 4, dtype=torch.float64), rtol=1e-9)

    assert len(found.changed) == len(names) * len(FUNCTIONS)


def test_updates_equal_op_by_op() -> None:
    policy = [gr.on(f"step:linears.{n}.weight", run) for n, run in enumerate(FUNCTIONS.values())]
    model, x = Products(), torch.randn(2, 2, 4, dtype=torch.float64)
    models = [gr.transform(copy.deepcopy(model), policy) for _ in range(2)]
    models[0].compile()
    for one in models:
        optimizer = gr.guard(torch.optim.SGD(one.parameters(), lr=0.1), one)
        one(x).backward()
        optimizer.step()
    for (name, p), q in zip(models[0].named_parameters(), models[1].parameters(), strict=True):
        torch.testing.assert_close(p, q, rtol=1e-12, atol=1e-12, msg=lambda m, name=name: f"{name}: {m}")


def test_a_decay_is_that_of_its_factor() -> None:
    """0.01 of a parameter is 0.01 of it, in float32 too."""
    torch.manual_seed(0)
    plain, x = nn.Linear(8, 4), torch.randn(16, 8)
    plain(x).square().mean().backward()
    decay: Function = lambda g, p: g.add(p, alpha=0.01)  # noqa: E731
    model = gr.transform(copy.deepcopy(plain), gr.on("gradient:*", decay))
    model.zero_grad()
    model.compile()
    model(x).square().mean().backward()

    for p, q in zip(model.parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(p.grad, q.grad + 0.01 * q)
