"""Weights of losses: constant ones, from statistics of gradients, and everywhere; against eager autograd."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import gradrewrite as gr
from gradrewrite.passes import ClipByValue, Observe, UPGrad, WeighLosses

SHARED = ("one.weight", "one.bias", "two.weight", "two.bias")


class Net(nn.Module):
    """Three losses behind a trunk; the third does not reach all of it, and each has parameters of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.one, self.two = nn.Linear(4, 6), nn.Linear(6, 5)
        self.a, self.b, self.c = nn.Linear(5, 2), nn.Linear(5, 2), nn.Linear(6, 2)

    def forward(self, x: Tensor) -> tuple[Tensor, ...]:
        early = self.one(x).tanh()
        h = self.two(early).tanh()
        return (self.a(h) - 1).square().mean(), 10 * (self.b(h) + 2).square().mean(), self.c(early).square().sum()


def made() -> tuple[Net, Tensor]:
    torch.manual_seed(0)
    return Net().double(), torch.randn(3, 4, dtype=torch.float64)


def annealed(gramian: Tensor, max_abs: Tensor, mean_abs: Tensor) -> Tensor:
    """Weights of learning-rate annealing (Wang, Teng, Perdikaris 2021): the first loss sets the scale."""
    return torch.where(torch.arange(len(gramian)) == 0, 1.0, max_abs[0] / mean_abs)


def by_losses(gramian: Tensor, losses: Tensor, mean_abs: Tensor) -> Tensor:
    return losses / losses.sum() / mean_abs + 0 * gramian[0]


def reference(
    net: Net, x: Tensor, weights: Callable[[list[Tensor], Tensor], Tensor], *, everywhere: bool
) -> dict[str, Tensor]:
    """Gradients by name; ``weights`` of the flat gradients of each loss over the shared parameters, and the losses."""
    losses = net(x)
    named = dict(net.named_parameters())
    of = [torch.autograd.grad(loss, list(named.values()), retain_graph=True, allow_unused=True) for loss in losses]
    by_loss = [dict(zip(named, own, strict=True)) for own in of]
    flat = [
        torch.cat([(torch.zeros_like(named[n]) if own[n] is None else own[n]).flatten() for n in SHARED])
        for own in by_loss
    ]
    found = weights(flat, torch.stack([loss.detach() for loss in losses]))
    total = {}
    for name in named:
        terms = [
            (w if name in SHARED or everywhere else 1.0) * g
            for w, own in zip(found, by_loss, strict=True)
            if (g := own[name]) is not None
        ]
        total[name] = torch.stack(terms).sum(0)
    return total


CASES: dict[str, tuple[dict[str, Any], Any, Callable[[list[Tensor], Tensor], Tensor]]] = {
    "max and mean": (
        {"statistics": ("max_abs", "mean_abs")},
        annealed,
        lambda flat, _: annealed(
            torch.zeros(3, 3), torch.stack([f.abs().amax() for f in flat]), torch.stack([f.abs().mean() for f in flat])
        ),
    ),
    "losses and mean": (
        {"statistics": ("mean_abs",)},
        by_losses,
        lambda flat, losses: losses / losses.sum() / torch.stack([f.abs().mean() for f in flat]),
    ),
    "numbers": ({}, (1.0, 0.5, 2.0), lambda flat, _: torch.tensor([1.0, 0.5, 2.0])),
    "tensor": ({}, torch.tensor([1.0, 0.5, 2.0]), lambda flat, _: torch.tensor([1.0, 0.5, 2.0])),
}


@pytest.mark.parametrize("everywhere", [False, True])
@pytest.mark.parametrize("name", CASES)
def test_equals_eager_autograd(name: str, everywhere: bool) -> None:
    options, weighting, weights = CASES[name]
    net, x = made()
    action = WeighLosses(weighting, everywhere=everywhere, **options)
    model = gr.transform(copy.deepcopy(net), gr.on("gradient:*", action))
    for step in range(6):
        model.zero_grad()
        sum(model(x + step)).backward()
        wanted = reference(net, x + step, weights, everywhere=everywhere)
        for key, p in model.named_parameters():
            torch.testing.assert_close(p.grad, wanted[key], rtol=1e-10, atol=1e-12)


@pytest.mark.inductor
@pytest.mark.parametrize("name", ["max and mean", "tensor"])
def test_compiled(name: str) -> None:
    options, weighting, weights = CASES[name]
    net, x = made()
    model = gr.transform(copy.deepcopy(net), gr.on("gradient:*", WeighLosses(weighting, everywhere=True, **options)))
    sum(model.compile()(x)).backward()
    wanted = reference(net, x, weights, everywhere=True)
    for key, p in model.named_parameters():
        torch.testing.assert_close(p.grad, wanted[key], rtol=1e-5, atol=1e-8)


def test_everywhere_equals_the_weighted_sum_of_the_losses() -> None:
    net, x = made()
    model = gr.transform(copy.deepcopy(net), gr.on("gradient:*", WeighLosses((0.5, 2.0, 3.0), everywhere=True)))
    sum(model(x)).backward()
    sum(w * loss for w, loss in zip((0.5, 2.0, 3.0), net(x), strict=True)).backward()
    for p, q in zip(model.parameters(), net.parameters(), strict=True):
        torch.testing.assert_close(p.grad, q.grad, rtol=1e-10, atol=1e-12)


def test_what_comes_before_and_behind_a_gradient_of_one_loss() -> None:
    net, x = made()
    policy = [
        gr.on("gradient:a.weight", [ClipByValue(1e-2), Observe("max_abs")]),
        gr.on("gradient:*", WeighLosses((3.0, 1.0, 1.0), everywhere=True)),
        gr.on("gradient:a.weight", Observe("max_abs")),
    ]
    model = gr.transform(net, policy)
    sum(model(x)).backward()
    assert float(net.a.weight.grad.abs().max()) == pytest.approx(3e-2)
    found = sorted(v for k, v in model.monitor.latest().items() if k.startswith("max_abs") and "a.weight" in k)
    assert found == pytest.approx([1e-2, 3e-2])


def test_a_tensor_of_weights_is_read_at_each_backward() -> None:
    net, x = made()
    weights = torch.ones(3)
    model = gr.transform(net, gr.on("gradient:*", WeighLosses(weights, everywhere=True)))
    found = []
    for number in (1.0, 4.0):
        weights.fill_(number)
        model.zero_grad()
        sum(model(x)).backward()
        found.append(net.one.weight.grad.clone())
    torch.testing.assert_close(4 * found[0], found[1])


def test_statistics_are_those_of_the_unscaled_losses() -> None:
    found = []
    for scale in (None, torch.tensor(64.0, dtype=torch.float64)):
        net, x = made()
        action = WeighLosses(annealed, statistics=("max_abs", "mean_abs"))
        losses = gr.transform(net, gr.on("gradient:*", action), loss_scale=scale)(x)
        total = sum(losses)
        (total if scale is None else total * scale).backward()
        found.append([p.grad / (1 if scale is None else scale) for p in net.parameters() if p.grad is not None])
    for one, other in zip(*found, strict=True):
        torch.testing.assert_close(one, other)


def test_nothing_shared_and_everywhere() -> None:
    class Apart(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.b = nn.Linear(4, 1), nn.Linear(4, 1)

        def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
            return self.a(x).sum(), self.b(x).sum()

    net = Apart().double()
    x = made()[1]
    model = gr.transform(copy.deepcopy(net), gr.on("gradient:*", WeighLosses((2.0, 3.0), everywhere=True)))
    sum(model(x)).backward()
    a, b = net(x)
    (2 * a + 3 * b).backward()
    for p, q in zip(model.parameters(), net.parameters(), strict=True):
        torch.testing.assert_close(p.grad, q.grad)


def test_wrong_arguments() -> None:
    with pytest.raises(ValueError, match="statistics is a tuple of 'max_abs', 'mean_abs', got"):
        WeighLosses(annealed, statistics=("norm",))
    with pytest.raises(ValueError, match="statistics is a tuple"):
        WeighLosses(annealed, statistics="max_abs")
    with pytest.raises(ValueError, match="constant weights take no statistics"):
        WeighLosses((1.0, 2.0), statistics=("max_abs",))
    with pytest.raises(ValueError, match="statistics is a tuple"):
        WeighLosses(annealed, statistics=("max_abs", "max_abs"))
    with pytest.raises(TypeError, match=r"takes \(gramian, max_abs\) or \(gramian, losses, max_abs\); it takes 1"):
        WeighLosses(UPGrad(), statistics=("max_abs",))
    with pytest.raises(TypeError, match="or K numbers, got"):
        WeighLosses(("a", "b"))
    net, x = made()
    with pytest.raises(gr.CallbackError, match="has 2 weights, and the model returns 3 losses"):
        gr.transform(net, gr.on("gradient:*", WeighLosses((1.0, 2.0))))(x)


def test_text() -> None:
    assert {WeighLosses([1.0, 2.0]), WeighLosses((1.0, 2.0))} == {WeighLosses((1.0, 2.0))}
    weights = torch.ones(2)
    assert WeighLosses(weights) == WeighLosses(weights) != WeighLosses(torch.ones(2))
    assert WeighLosses(UPGrad()) == WeighLosses(UPGrad()) != WeighLosses(UPGrad(), everywhere=True)
    text = "WeighLosses((1.0, 2.0), everywhere=True, group='trunk')"
    assert repr(WeighLosses((1.0, 2.0), everywhere=True, group="trunk")) == text
    assert "statistics=('max_abs',)" in repr(WeighLosses(lambda g, m: m, statistics=("max_abs",)))
