"""The code of docs/several-losses.md runs, and does what the page says, against eager autograd."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from torch import Tensor

import gradrewrite as gr

from helpers import ROOT

BLOCKS = re.findall(r"```python\n(.*?)```", (ROOT / "docs" / "several-losses.md").read_text(), re.DOTALL)


@pytest.fixture(scope="module")
def page() -> dict[str, Any]:
    """The names of the page, with its blocks run in order, op by op."""
    torch.manual_seed(0)
    known: dict[str, Any] = {}
    for block in BLOCKS:
        exec(block.replace("model.compile()\n", ""), known)
    return known


def test_the_page_has_the_code() -> None:
    assert len(BLOCKS) == 6


@pytest.mark.sample(6)
@pytest.mark.slow
@pytest.mark.inductor
def test_the_first_block_compiled(capsys: pytest.CaptureFixture[str]) -> None:
    exec(BLOCKS[0], {})
    weight, cosine = map(float, capsys.readouterr().out.split())

    assert weight >= 0.5
    assert -1 <= cosine <= 1


def gradients_of_losses(net: Any, batch: Sequence[Tensor], parameters: Sequence[Tensor]) -> list[list[Tensor]]:
    losses = net(*batch)
    return [list(torch.autograd.grad(loss, parameters, retain_graph=True)) for loss in losses]


def weights_of_two(rows: Sequence[Sequence[Tensor]]) -> list[float]:
    """UPGrad of two losses, in closed form: what of each conflicts with the other is projected away."""
    a, b = (torch.cat([g.flatten() for g in row]) for row in rows)
    product, squares = float(a @ b), (float(a @ a), float(b @ b))
    return [0.5 * (1 + max(0.0, -product / square)) for square in squares]


def clipped(g: Tensor, bound: float) -> Tensor:
    return g * min(1.0, bound / float(g.norm()))


@pytest.mark.broad
def test_the_order_of_actions(page: dict[str, Any]) -> None:
    torch.manual_seed(1)
    net = page["TwoTasks"]().double()
    x, y = torch.rand(16, 64).double(), page["y"]
    sum(gr.transform(net, page["policy"])(x, y)).backward()
    got = {name: p.grad for name, p in net.named_parameters()}
    names = [name for name in got if name.startswith("trunk")]
    parameters = [dict(net.named_parameters())[name] for name in names]

    hidden = net.trunk[1]
    handle = hidden.register_forward_hook(lambda _, __, out: out.register_hook(lambda g: clipped(g, 1.0)) and None)
    rows = gradients_of_losses(net, (x, y), parameters)
    handle.remove()
    rows = [[clipped(g, 1.0) for g in row] for row in rows]
    weights = weights_of_two(rows)
    wanted = [clipped(weights[0] * a + weights[1] * b, 0.1) for a, b in zip(*rows, strict=True)]
    torch.testing.assert_close([got[name] for name in names], wanted, rtol=1e-6, atol=1e-9)
    head = torch.autograd.grad(sum(net(x, y)), net.draw.weight)
    torch.testing.assert_close(got["draw.weight"], head[0])


def test_gradnorm(page: dict[str, Any]) -> None:
    """The function against gradient steps of the weights by autograd, as in the paper."""
    torch.manual_seed(0)
    weigh, used, first = page["gradnorm"](3), torch.ones(3).double(), None
    for _ in range(5):
        jacobian = torch.randn(3, 10).double() * torch.tensor([[1.0], [3.0], [0.5]]).double()
        losses = torch.rand(3).double() + 0.5
        torch.testing.assert_close(weigh(jacobian @ jacobian.mT, losses), used)
        first = losses if first is None else first
        leaf = used.clone().requires_grad_()
        norms = (leaf[:, None] * jacobian).norm(dim=1)
        pace = losses / first
        target = (norms.mean() * (pace / pace.mean()) ** 1.5).detach()
        (norms - target).abs().sum().backward()
        used = leaf.detach() - 0.025 * leaf.grad
        used = 3 * used / used.sum()


def test_gradnorm_in_a_training(page: dict[str, Any]) -> None:
    """It is given the losses, and its weights act from the second step on."""
    net = page["TwoTasks"]().double()
    x, y = torch.rand(16, 64).double(), page["y"]
    action = page["WeighLosses"](page["gradnorm"](2, rate=1e-5))
    model = gr.transform(net, gr.on("gradient:trunk.2.weight", action))
    found = []
    for _ in range(3):
        net.zero_grad()
        sum(model(x, y)).backward()
        weights = [model.monitor.latest()[f"loss_weight_{k}@group:default"] for k in range(2)]
        rows = gradients_of_losses(net, (x, y), [net.trunk[2].weight])
        wanted = sum(w * row[0] for w, row in zip(weights, rows, strict=True))
        torch.testing.assert_close(net.trunk[2].weight.grad, wanted, rtol=1e-6, atol=1e-9)
        found.append(weights)

    assert found[0] == [1.0, 1.0]
    assert found[1] != found[0]
    assert sum(found[2]) == pytest.approx(2.0)
