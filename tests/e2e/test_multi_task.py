"""The gradients of the example with two tasks are those of eager backwards, one a loss."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

import gradrewrite as gr
from gradrewrite.examples import multi_task

pytest.importorskip("sklearn", reason="scikit-learn is not installed")


def upgrad(gramian: Tensor) -> Tensor:
    """Of two losses, without regularization."""
    product = gramian[0, 1]
    return 0.5 * (1 + torch.stack([-product / gramian[0, 0], -product / gramian[1, 1]]).clamp(min=0))


def mgda(gramian: Tensor) -> Tensor:
    """The shortest vector between two gradients."""
    first = (gramian[1, 1] - gramian[0, 1]) / (gramian[0, 0] + gramian[1, 1] - 2 * gramian[0, 1])
    return torch.stack([first.clamp(0, 1), 1 - first.clamp(0, 1)])


def start() -> tuple[multi_task.ReadAndDraw, Tensor, Tensor]:
    torch.manual_seed(0)
    return multi_task.ReadAndDraw().double(), torch.rand(16, 64).double(), torch.randint(0, 10, (16,))


@pytest.mark.broad
@pytest.mark.parametrize(("way", "weights"), [("UPGrad", upgrad), ("MGDA", mgda)])
def test_gradients_of_the_trunk(way: str, weights: Any) -> None:
    net, images, labels = start()
    sum(gr.transform(net, multi_task.POLICIES[way])(images, labels)).backward()
    shared = list(net.trunk.parameters())
    rows = [torch.autograd.grad(loss, shared, retain_graph=True) for loss in net(images, labels)]
    jacobian = torch.stack([torch.cat([g.flatten() for g in row]) for row in rows])
    found = weights(jacobian @ jacobian.mT)

    for number, parameter in enumerate(shared):
        wanted = found[0] * rows[0][number] + found[1] * rows[1][number]
        torch.testing.assert_close(parameter.grad, wanted, rtol=1e-8, atol=1e-10)


def test_errors_of_the_features() -> None:
    """At an error site the losses are weighed by their errors, and the trunk sees one error."""
    net, images, labels = start()
    sum(gr.transform(net, multi_task.POLICIES["MGDA at the features"])(images, labels)).backward()
    shared = list(net.trunk.parameters())
    features = net.trunk(images)
    drawing = (multi_task.GREYS * (net.draw(features) - images)).square().sum(1).mean()
    losses = torch.nn.functional.cross_entropy(net.read(features), labels), drawing
    rows = torch.stack([torch.autograd.grad(loss, features, retain_graph=True)[0].flatten() for loss in losses])
    error = mgda(rows @ rows.mT) @ rows
    wanted = torch.autograd.grad(features, shared, error.view_as(features))

    torch.testing.assert_close([p.grad for p in shared], list(wanted), rtol=1e-8, atol=1e-10)
