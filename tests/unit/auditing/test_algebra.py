"""Constants by algebra, against gradients in float64."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

import gradrewrite as gr

from models.cuts import Step, TwoParameters, flow

ROUNDING = 1e-12


def column(a: Tensor) -> Tensor:
    return a[:, :1]


def attention(a: Tensor, b: Tensor) -> Tensor:
    query, key = a.view(1, 4, 4), b[:1].view(1, 1, 4)
    return F.scaled_dot_product_attention(query, key, torch.arange(4.0, dtype=a.dtype).view(1, 1, 4)).sum()


# With each the op that is a constant in "a"; "b" is trained.
CONSTANTS: dict[str, tuple[Step, str]] = {
    "softmax": (lambda a, b: (column(a).softmax(-1) * b).sum(), "softmax"),
    "F.softmax": (lambda a, b: (F.softmax(column(a), dim=1) * b).sum(), "softmax"),
    "log_softmax": (lambda a, b: (column(a).log_softmax(-1) * b).sum() + b.sum(), "log_softmax"),
    "normalize": (lambda a, b: (F.normalize(column(a), dim=-1) * b).sum(), "normalize"),
    "layer_norm": (lambda a, b: (F.layer_norm(column(a), (1,)) + b).sum(), "layer_norm"),
    "one class": (lambda a, b: F.cross_entropy(column(a), torch.zeros(4).long()) + b.sum(), "cross_entropy"),
    "quotient": (lambda a, b: (a.exp() / a.exp() * b).sum(), "truediv"),
    "share of one": (lambda a, b: (column(a) / column(a).sum(-1, keepdim=True) * b).sum(), "truediv"),
    "of a multiple": (lambda a, b: ((2 * a) / (a + a) * b).sum(), "truediv"),
    "difference": (lambda a, b: ((a.sin() - a.sin()).exp() * b).sum(), "sub"),
    "difference of sums": (lambda a, b: ((a + 1 + a) - (2 * a) + b).sum(), "sub"),
    "term": (lambda a, b: (a.sin() * 3 + b - 3 * a.sin()).sum(), "sub"),
    "mean of one": (lambda a, b: ((column(a) - column(a).mean(-1, keepdim=True)).cos() * b).sum(), "sub"),
    "power": (lambda a, b: (a.abs().pow(0) * b).sum(), "pow"),
    "product with 0": (lambda a, b: (a.sin() * 0.0 + b).sum(), "mul"),
}


@pytest.mark.parametrize("name", CONSTANTS)
def test_a_constant_is_a_cut(name: str) -> None:
    step, op = CONSTANTS[name]
    model = TwoParameters(step).double()
    model().backward()
    found = flow(step)
    cut = next(cut for cut in found.cuts_before(found.loss) if cut.is_algebra)

    assert model.a.grad is not None

    assert model.b.grad is not None
    assert float(model.a.grad.abs().max()) < ROUNDING < float(model.b.grad.abs().max())
    assert [*found.bits(found.loss.trained)] == ["b"]
    assert (cut.op, [*found.bits(cut.stopped)]) == (op, ["a"])
    assert cut.is_meant == (name == "product with 0")


def test_query_and_key_of_one_key_get_no_gradient() -> None:
    model = TwoParameters(attention).double()
    model().backward()
    found = flow(attention)

    assert all(float(p.grad.abs().max()) < ROUNDING for p in (model.a, model.b) if p.grad is not None)
    assert [*found.bits(found.loss.trained)] == []
    assert "gives the one key all weight" in found.cuts[0].reason


# Nothing of these is a constant, though it looks alike.
NO_CONSTANTS: dict[str, Step] = {
    "other sizes": lambda a, b: (column(a) / a.sum(-1, keepdim=True) * b).sum(),
    "shifted": lambda a, b: ((a + 1).exp() - a.exp() + b).sum(),
    "broadcast": lambda a, b: (a - a[0] + b).sum(),
    "random": lambda a, b: (F.dropout(a, 0.5) - F.dropout(a, 0.5) + b).sum(),
    "a copy": lambda a, b: ((a - a.detach()) + b).sum(),
    "transposed": lambda a, b: (a - a.T + b * b.T).sin().sum(),
    "reversed": lambda a, b: (a - a.flip(0)).square().sum() + b.sum(),
    "other numbers": lambda a, b: (a.clamp(min=0.1) - a.clamp(min=0.2) + b).sum(),
    "sum over all": lambda a, b: (a - a.mean(-1, keepdim=True)).square().sum() + b.sum(),
    "exclusive sums": lambda a, b: (a.cumsum(-1) - a + b).sum(),
    "softmax of four": lambda a, b: (a.softmax(-1) * b).sum(),
}


def overwritten(a: Tensor, b: Tensor) -> Tensor:
    h = a.sin()
    first = h * 1
    h.mul_(2)
    return (h - first + b).sum()


@pytest.mark.parametrize("name", [*NO_CONSTANTS, "overwritten"])
def test_no_constant_where_values_differ(name: str) -> None:
    step = overwritten if name == "overwritten" else NO_CONSTANTS[name]
    model = TwoParameters(step).double()
    model().backward()
    found = flow(step)

    assert model.a.grad is not None

    assert float(model.a.grad.abs().max()) > ROUNDING
    assert [*found.bits(found.loss.trained)] == ["a", "b"]


def test_a_product_with_0_is_a_remark_and_no_fault() -> None:
    found = gr.audit(TwoParameters(CONSTANTS["product with 0"][0]))

    assert found.causes == ()
    assert any("no gradient by algebra: `mul` is a product with 0, at" in text for text in found.remarks)
