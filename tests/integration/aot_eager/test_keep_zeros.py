"""KeepZeros: an error of 0 that meets an infinite derivative stays 0."""

from __future__ import annotations

import copy
import math
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import gradrewrite as gr
from gradrewrite.passes import KeepZeros

from models.small import Lambda
from models.zero_errors import PROGRAMS, Program, gradient

EVERYWHERE = gr.on("backward:*/*", KeepZeros())


@pytest.mark.parametrize("name", PROGRAMS)
def test_programs_with_a_mask_behind(name: str) -> None:
    loss, wanted = gradient(Program(name, covered=True), name)
    plain_loss, plain = gradient(Program(name), name)
    kept_loss, kept = gradient(gr.transform(Program(name), EVERYWHERE), name)

    assert not plain.isfinite().all()
    assert torch.equal(kept_loss, plain_loss)
    torch.testing.assert_close(loss, plain_loss)
    torch.testing.assert_close(kept, wanted, rtol=1e-6, atol=1e-7)
    assert torch.equal(kept[plain.isfinite()], plain[plain.isfinite()])


@pytest.mark.inductor
@pytest.mark.parametrize("name", PROGRAMS)
def test_compiled(name: str) -> None:
    _, wanted = gradient(gr.transform(Program(name, covered=True), []).compile(), name)
    _, kept = gradient(gr.transform(Program(name), EVERYWHERE).compile(), name)

    torch.testing.assert_close(kept, wanted, rtol=1e-6, atol=1e-6)


INF = float("inf")


class Wide(torch.autograd.Function):
    """A backward that joins errors and values, and adds products to values."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        return x.clone()

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> Tensor:
        (x,) = ctx.saved_tensors
        return torch.cat([g[:1] * x[:1].log(), torch.ones(2)]) * x


class Added(Wide):
    @staticmethod
    def backward(ctx: Any, g: Tensor) -> Tensor:
        (x,) = ctx.saved_tensors
        return x.addcmul(g, x.log())


PROGRAMS_OF_ONE_OP: dict[str, tuple[Any, list[float], list[float]]] = {
    "a number as a factor": (lambda x: torch.where(x > 0, x, x * INF).sum(), [1, 2, -3], [1, 1, INF]),
    "a divisor 0": (lambda x: torch.where(x > 0, x, x / 0.0).sum(), [1, 2, -3], [1, 1, INF]),
    "alpha": (lambda x: torch.where(x > 0, x, x.add(x.detach(), alpha=INF)).sum(), [1, 2, -3], [1, 1, 1]),
    "joined with values": (lambda x: (Wide.apply(x) * (x.detach() > 0)).sum(), [0, 1, 2], [0, 1, 2]),
    "a real NaN": (lambda x: (Added.apply(x) * (x.detach() > 0)).sum(), [-1, 1, 2], [math.nan, 1, 2 + math.log(2)]),
    "an error that is not 0": (lambda x: (x.sqrt() * 2).sum(), [0, 4], [INF, 0.5]),
}


@pytest.mark.parametrize("name", PROGRAMS_OF_ONE_OP)
def test_programs_of_one_op(name: str) -> None:
    program, given, wanted = PROGRAMS_OF_ONE_OP[name]
    x = torch.tensor(given, dtype=torch.float32, requires_grad=True)
    gr.transform(Lambda(lambda _, x: program(x)), EVERYWHERE)(x).backward()

    assert x.grad is not None
    torch.testing.assert_close(x.grad, torch.tensor(wanted, dtype=torch.float32), equal_nan=True)


@pytest.mark.parametrize("name", ["group norm", "batch norm"])
def test_layouts_of_norms(name: str) -> None:
    def program(m: Any, x: Tensor) -> Tensor:
        h = m.norm(x * 1) if name == "group norm" else F.batch_norm(x * 1, None, None, training=True)
        return h.sigmoid().pow(3).sum()

    found = []
    policies: tuple[Any, ...] = ([], EVERYWHERE)
    for policy in policies:
        x = torch.randn(2, 4, 3, 3, generator=torch.Generator().manual_seed(0))
        x = x.to(memory_format=torch.channels_last).requires_grad_()
        gr.transform(Lambda(program, norm=nn.GroupNorm(2, 4)), policy)(x).backward()
        found.append(x.grad)

    assert torch.equal(*found)


def test_values_from_outside_a_rolled_loop() -> None:
    """They are factors like others; parameters are not mended, inside a loop or not."""
    is_bad = torch.arange(4) == 1

    def program(m: Any, x: Tensor) -> Tensor:
        factor = torch.where(is_bad, INF, m.weight * 0.3)
        for _ in range(6):
            x = torch.where(is_bad, 0.0, x @ factor) + x * 0.1 + 0.1
        return x.square().sum()

    found = []
    for loops in ("unrolled", "rolled"):
        torch.manual_seed(0)
        model = gr.transform(Lambda(program, weight=nn.Parameter(torch.randn(4, 4))), EVERYWHERE, loops=loops)
        x = torch.ones(2, 4, requires_grad=True)
        model(x).backward()
        found.append(x.grad)

    assert found[0] is not None
    assert found[0].isfinite().all()
    torch.testing.assert_close(*found)


@pytest.mark.parametrize("number", range(8))
def test_symbolic_sizes(number: int) -> None:
    torch.manual_seed(0)
    layers = (nn.BatchNorm1d(4), nn.LayerNorm(4), nn.Softmax(-1), nn.Dropout(0.5), nn.Linear(4, 4))
    layers += (Lambda(lambda _, x: x.cumsum(0)), Lambda(lambda _, x: x - x.amax(0)), Lambda(lambda _, x: x.T @ x))
    plain = nn.Sequential(nn.Linear(4, 4), layers[number], Lambda(lambda _, x: x.square().mean())).double()
    model = gr.transform(copy.deepcopy(plain), EVERYWHERE, dynamic=True)
    for rows in (5, 7):
        x = torch.randn(rows, 4, dtype=torch.float64)
        for net in (plain, model):
            torch.manual_seed(1)
            net(x).backward()
        for one, other in zip(model.parameters(), plain.parameters(), strict=True):
            torch.testing.assert_close(one.grad, other.grad)


def test_what_is_not_covered_is_listed() -> None:
    f = Lambda(lambda _, x: torch.cdist(x, x * 2).sum() + (x * 1).view(-1).relu_().sum() + x.exp().sum())
    model = gr.transform(f, EVERYWHERE)
    model(torch.randn(3, 2, requires_grad=True)).backward()
    text = str(model.explain())

    assert "KeepZeros() at cdist (backward:/cdist): not covered: _cdist_backward" in text
    assert "KeepZeros() at relu_ (backward:/relu_): not covered: writes in place into a view" in text
    assert "KeepZeros() at exp (backward:/exp): 1 select" in text


def test_beside_a_rule() -> None:
    """A rule is given the backward that keeps zeros."""
    x = torch.tensor([0.0, 4.0], requires_grad=True)
    program = Lambda(lambda _, x: (x.sqrt() * torch.tensor([0.0, 1.0])).sum())
    twice = gr.on("backward:*/sqrt", lambda op: 2 * op.vjp(op.error * 1)[0])
    gr.transform(program, [twice, EVERYWHERE])(x).backward()

    assert x.grad is not None
    assert x.grad.tolist() == [0.0, 0.5]
