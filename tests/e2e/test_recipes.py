"""Each block of docs/recipes.md does what it says, in float64: against eager hooks, or its formula by hand."""

from __future__ import annotations

import math
import re
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import gradrewrite as gr
from gradrewrite.testing import assert_matches_eager

from helpers import ROOT
from models.small import Lambda

PAGE = (ROOT / "docs" / "recipes.md").read_text()
MODEL = re.search(r"```python\n(.*?)```", PAGE, re.DOTALL)
RECIPES = {
    name: code
    for name, code in re.findall(r"^###[^\n]*\{#(.*?)\}$.*?```python\n(.*?)```", PAGE, re.MULTILINE | re.DOTALL)
}
BY_HAND = (
    "straight-through",
    "relevance",
    "annealing",
    "pinn",
    "equal-losses",
    "automatic-clipping",
    "reweighting",
    "noise-scale",
)
# What acts behind the update, or only looks: a gradient is not changed.
UNCHANGED = ("freeze", "thaw", "prune", "mask", "rows", "selective", "decay", "gradcam", "tokens")


def names_of(recipe: str) -> dict[str, Any]:
    assert MODEL is not None
    names: dict[str, Any] = {"math": math}
    exec(MODEL[1], names)
    exec(RECIPES[recipe], names)
    return names


def make(names: dict[str, Any]) -> nn.Module:
    torch.manual_seed(0)
    if "Adapted" in names:
        return names["Adapted"]().double()
    return names["Net"]().double()


def tokens(rows: int = 6) -> Tensor:
    return torch.randint(0, 10, (rows, 5), generator=torch.Generator().manual_seed(0))


def adamw(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.AdamW(parameters, lr=0.01, weight_decay=0.1)


def test_every_recipe_is_found() -> None:
    assert len(RECIPES) == len(re.findall("^### ", PAGE, re.MULTILINE)) >= 30


@pytest.mark.broad
@pytest.mark.parametrize("recipe", [name for name in RECIPES if name not in BY_HAND])
def test_equals_hooks_of_eager_autograd(recipe: str) -> None:
    names = names_of(recipe)
    net = make(names)
    x = torch.randn(3, 4, dtype=torch.float64) if "Adapted" in names else tokens()
    if recipe in ("prune", "mask"):
        with torch.no_grad():
            net.body[0].weight[0] = 0.0
    found = assert_matches_eager(net, names["policy"], x, steps=4, compiled=False, optimizer=adamw)
    assert found.acted
    assert bool(found.changed) == (recipe not in UNCHANGED)


def losses_of(names: dict[str, Any]) -> nn.Module:
    base: Any = names["Net"]

    class Losses(base):
        def forward(self, tokens: Tensor) -> tuple[Tensor, Tensor]:
            policy, value = super().forward(tokens)
            return policy.square().mean(), 3 * value.sin().mean()

    torch.manual_seed(0)
    return Losses().double()


def examples_of(names: dict[str, Any]) -> nn.Module:
    base: Any = names["Net"]

    class Mean(base):
        def forward(self, tokens: Tensor) -> Tensor:
            policy, value = super().forward(tokens)
            return (policy.square().sum(-1) + value.sin().squeeze(-1)).mean()

    torch.manual_seed(0)
    return Mean().double()


def gradients(net: nn.Module, loss: Tensor) -> dict[str, Tensor]:
    own = dict(net.named_parameters())
    found = torch.autograd.grad(loss, list(own.values()), retain_graph=True, allow_unused=True)
    return {name: torch.zeros_like(own[name]) if g is None else g for name, g in zip(own, found, strict=True)}


def assert_gradients(net: nn.Module, wanted: dict[str, Tensor]) -> None:
    for name, p in net.named_parameters():
        assert p.grad is not None
        torch.testing.assert_close(p.grad, wanted[name], rtol=1e-9, atol=1e-12, msg=lambda m, n=name: f"{n}: {m}")


def test_straight_through() -> None:
    names = names_of("straight-through")
    torch.manual_seed(0)
    net = names["Rounded"](4, 4).double()
    with torch.no_grad():
        net.weight[0, 0] = 5 / 8  # whose eightfold is outside of the range
    x = torch.randn(3, 4, dtype=torch.float64)
    model = gr.transform(net, names["policy"])
    model(x).square().sum().backward()
    rounded = (net.weight.detach() * 8).round() / 8
    rounded.requires_grad_()
    nn.functional.linear(x, rounded, net.bias.detach()).square().sum().backward()
    assert rounded.grad is not None
    torch.testing.assert_close(net.weight.grad, rounded.grad * ((8 * net.weight.detach()).abs() < 4))


class ByRatio(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        return x.tanh()

    @staticmethod
    def backward(ctx: Any, error: Tensor) -> Tensor:
        (x,) = ctx.saved_tensors
        return error * x.tanh() / (x + 1e-6 * x.sign())


def test_relevance() -> None:
    names = names_of("relevance")
    net, plain = make(names), make(names)
    plain.body = nn.Sequential(plain.body[0], Lambda(lambda module, x: ByRatio.apply(x)))
    for run in (gr.transform(net, names["policy"]), plain):
        sum(output.sin().sum() for output in run(tokens())).backward()
    assert_gradients(net, {name: p.grad for name, p in plain.named_parameters() if p.grad is not None})


def test_the_frame_of_all_recipes() -> None:
    _, frame = re.findall(r"```python\n(.*?)```", PAGE.split("## Parts that")[0], re.DOTALL)
    names = names_of("detach")
    exec(frame, names)
    assert "error:h" in names["names"]


@pytest.mark.parametrize("recipe", ["annealing", "pinn", "equal-losses"])
def test_losses(recipe: str) -> None:
    names = names_of(recipe)
    net = losses_of(names)
    model = gr.transform(net, names["policy"])
    by_loss = [gradients(net, loss) for loss in net(tokens())]
    weights, behind = torch.ones(2, dtype=torch.float64), list(by_loss[0])
    if recipe == "annealing":
        names["weights"][1] = weights[1] = 0.25
    elif recipe == "pinn":
        shared = [name for name in behind if all(bool(found[name].any()) for found in by_loss)]
        residual, boundary = (torch.cat([found[name].flatten() for name in shared]).abs() for found in by_loss)
        weights[1] = 0.9 + 0.1 * residual.max() / boundary.mean()
    else:
        behind = [name for name in behind if name.startswith("body.")]
        flat = torch.stack([torch.cat([found[name].flatten() for name in behind]) for found in by_loss])
        weights = flat.square().sum(1).rsqrt()
    sum(model(tokens())).backward()
    weighed: dict[str, Any] = {}
    for name in by_loss[0]:
        own = weights if name in behind else torch.ones(2, dtype=torch.float64)
        weighed[name] = sum(w * found[name] for w, found in zip(own, by_loss, strict=True))
    assert_gradients(net, weighed)


@pytest.mark.parametrize("recipe", ["automatic-clipping", "reweighting", "noise-scale"])
def test_examples(recipe: str) -> None:
    names = names_of(recipe)
    net = examples_of(names)
    model = gr.transform(net, names["policy"])
    x = tokens(12)
    model(x).backward()
    rows = [gradients(net, net(row)) for row in x.split(1)]
    norms = torch.stack([torch.stack([g.norm() for g in row.values()]).norm() for row in rows])
    factors = torch.ones(12, dtype=torch.float64)
    if recipe == "automatic-clipping":
        factors = 1 / (norms + 0.01)
    if recipe == "reweighting":
        factors = (norms <= norms.quantile(0.9)).double()
        assert 0 < factors.sum() < 12
    pairs = list(zip(factors, rows, strict=True))
    assert_gradients(net, {name: sum(f * row[name] for f, row in pairs) / 12 for name in rows[0]})
    if recipe == "noise-scale":
        assert math.isfinite(model.monitor.latest()["noise_scale@group:default"])


def test_what_is_kept_has_the_shapes_of_the_page() -> None:
    names = names_of("gradcam")
    model = gr.transform(make(names), names["policy"] + [names_of("tokens")["policy"]])
    model(tokens())[0].sum().backward()
    kept = model.monitor.kept()
    assert (kept["error:h"] * kept["activation:h"]).sum(-1).relu().shape == (6,)
    assert kept["error:embed"].norm(dim=-1).shape == (6, 5)
