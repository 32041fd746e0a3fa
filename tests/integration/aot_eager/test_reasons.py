"""Why an op made a non-finite value: each row of the table, in a model that is traced, with its remedy tried."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

import gradrewrite as gr
from gradrewrite.replay.reason_table import TABLE

INF = torch.inf
X = torch.tensor([[1.0, 2.0, 3.0, 4.0], [0.5, 0.0, 2.0, 1.0], [1.0, 1.0, 1.0, 1.0]])  # 0 in row 1, column 1


@dataclass(frozen=True)
class Fault:
    """A faulty function of a parameter of ones and an input, and the right answer.

    Attributes:
        row: The row of the table.
        f: The function ``(w, x) -> loss``.
        x: The input.
        op: The op.
        why: A part of the reason.
        indices: The places.
        advice: A part of the advice.
        cover: A part of what hides it.
        backward: Whether the backward of the op made it.
        tried: Whether the remedy is tried and helps.
    """

    row: str
    f: Callable[[Tensor, Tensor], Tensor]
    x: Tensor
    op: str
    why: str
    indices: str = "row 1, column 1"
    advice: str = "before it"
    cover: str = ""
    backward: bool = False
    tried: bool = True


def masked(scores: Tensor) -> Tensor:
    """Leave row 2 without a key."""
    mask = torch.zeros(3, 4).masked_fill(torch.arange(3)[:, None] == 2, -INF)
    return scores + mask


def bounded(p: Tensor) -> Tensor:
    return torch.log(1 - p.clamp(1e-6, 1 - 1e-6))  # bfloat16 has no such bound


FAULTS = [
    Fault("log of 0", lambda w, x: torch.log(w * x).sum(), X, "log", "log of 0 for 1 of 12", advice="log(x + 1e-6)"),
    Fault(
        "log of 0",
        lambda w, x: bounded(w.bfloat16() * x.bfloat16()).sum(),
        torch.tensor([[0.5, 0.5], [0.5, 1.0]]),
        "log",
        "log of 0 for 1 of 4: 1 - 1e-06 is 1 in bfloat16",
    ),
    Fault("log of a negative number", lambda w, x: torch.log(w * x - 0.135).sum(), X, "log", "log of -0.135"),
    Fault("log1p of -1 or less", lambda w, x: torch.log1p(w * x - 1).sum(), X, "log1p", "log1p of -1 for 1 of 12"),
    Fault("division by 0", lambda w, x: (w / x).sum(), X, "truediv", "divisor 0 for 1 of 12", advice="clamp_min"),
    Fault("0/0", lambda w, x: (w * x / x).sum(), X, "truediv", "0/0 for 1 of 12", advice="n.clamp_min(1)"),
    Fault(
        "underflow of exp in a divisor",
        lambda w, x: (w * x / torch.exp(-w * x).sum(1, keepdim=True)).sum(),
        torch.tensor([[1.0, 2.0], [300.0, 400.0]]),
        "truediv",
        "divisor 0 for 2 of 4: every exp in it is too small for float32",
        "row 1",
        "Subtract the maximum",
    ),
    Fault(
        "exp beyond its dtype",
        lambda w, x: torch.exp(w * x).clamp(max=10.0).sum(),
        torch.tensor([[1.0, 2.0], [0.0, 101.0]]),
        "exp",
        "exp of up to 101, limit 88.7",
        cover="clamp",
    ),
    Fault("reciprocal root of 0", lambda w, x: torch.rsqrt(w * x).sum(), X, "rsqrt", "rsqrt of 0", advice="epsilon"),
    Fault("root of a negative number", lambda w, x: torch.sqrt(w * x - 0.25).sum(), X, "sqrt", "sqrt of -0.25"),
    Fault("power of 0 or of a negative number", lambda w, x: ((w * x) ** -1.5).sum(), X, "pow", "pow of 0 for 1 of 12"),
    Fault(
        "acos or asin beyond 1",
        lambda w, x: torch.acos(w * x).sum(),
        torch.tensor([[0.5, 0.2], [0.1, 1.0000001]]),
        "acos",
        "acos of 1.00000012",
    ),
    Fault(
        "logit at 0 or 1",
        lambda w, x: torch.logit(w * x).sum(),
        X[1:2] * 0.5,
        "logit",
        "logit of 0 or 1 for 2 of 4",
        "row 0, columns 1 and 2",
    ),
    Fault(
        "softmax over a row of -inf",
        lambda w, x: torch.softmax(masked(w * x), -1)[:2].sum(),
        X,
        "softmax",
        "softmax over a row of -inf",
        "row 2",
        "see a key",
        cover="getitem",
    ),
    Fault(
        "softmax of infinity",
        lambda w, x: torch.softmax((w * x).masked_fill(x == 0, INF), -1)[:1].sum(),
        X,
        "softmax",
        "softmax of infinity",
        advice="mask with -inf",
        cover="getitem",
    ),
    Fault(
        "inf - inf",
        lambda w, x: ((w * x).masked_fill(x == 0, INF) - (w + x).masked_fill(x == 0, INF)).sum(),
        X,
        "sub",
        "inf - inf for 1 of 12",
        advice="Fill infinite values",
    ),
    Fault(
        "0 x inf",
        lambda w, x: torch.nan_to_num(torch.exp(-w) * x, posinf=0.0, neginf=0.0).sum(),
        X.masked_fill(X == 0, -INF),
        "mul",
        "0 x inf for 1 of 12",
        advice="Fill infinite values",
        cover="nan_to_num",
        backward=True,
    ),
    Fault(
        "root at 0",
        lambda w, x: torch.sqrt(w * x).sum(),
        X,
        "sqrt",
        "sqrt at 0 for 1 of 12",
        advice="inside of the root",
        backward=True,
    ),
    Fault(
        "root at 0",
        lambda w, x: ((w * x) ** 0.5).sum(),
        X,
        "pow",
        "pow at 0 for 1 of 12",
        advice="inside of the root",
        backward=True,
    ),
    Fault(
        "acos or asin at 1",
        lambda w, x: torch.acos(w * x).sum(),
        torch.tensor([[0.5, 0.2], [0.1, 1.0]]),
        "acos",
        "acos at 1 or -1 for 1 of 4",
        advice="inside of 1",
        backward=True,
    ),
    Fault(
        "log at 0, hidden",
        lambda w, x: torch.where(x > 0, torch.log(w * x), 0.0).sum(),
        X,
        "log",
        "log at 0 for 1 of 12",
        advice="log(where(mask, x, 1))",
        cover="where",
        backward=True,
    ),
    Fault(
        "division by 0, hidden",
        lambda w, x: torch.where(x > 0, w / x, 0.0).sum(),
        X,
        "truediv",
        "truediv at 0 for 1 of 12",
        advice="where(mask, y, 1)",
        cover="where",
        backward=True,
    ),
    Fault(
        "softmax over a row of -inf",
        lambda w, x: torch.logsumexp(masked(w * x), -1)[:2].sum(),
        X,
        "logsumexp",
        "logsumexp over a row of -inf",
        "row 2",
        "see a key",
        cover="getitem",
    ),
    Fault(
        "reciprocal of 0",
        lambda w, x: torch.where(x > 0, 1 / (w * x), 0.0).sum(),
        X,
        "truediv",
        "reciprocal of 0 for 1 of 12",
        advice="clamp_min",
        cover="where",
    ),
    Fault(
        "mean of nothing",
        lambda w, x: (w * x)[:0].mean() + (w * x).sum(),
        X,
        "mean",
        "mean of no elements",
        "",
        "A mask left nothing",
    ),
    Fault(
        "variance of one element",
        lambda w, x: (w * x).std(0).sum(),
        X[:1],
        "std",
        "std of one element",
        "",
        "correction=0",
        tried=False,
    ),
    Fault(
        "cross-entropy without targets",
        lambda w, x: functional.cross_entropy(w * x, torch.full((3,), -100)),
        X,
        "cross_entropy",
        "every target is ignored (3 of 3 are -100)",
        "",
        "at least 1",
    ),
    Fault(
        "cross-entropy without targets",
        lambda w, x: functional.cross_entropy(w * x, torch.ones(3, dtype=torch.long), torch.tensor([1.0, 0, 1, 1])),
        X,
        "cross_entropy",
        "the class of every target (3 of 3) has weight 0",
        "",
        "at least 1",
    ),
    Fault(
        "0/0 of a norm",
        lambda w, x: ((w * x) / (w * x).norm(dim=1, keepdim=True)).sum(),
        X * torch.tensor([[1.0], [0.0], [1.0]]),
        "truediv",
        "0/0 for 4 of 12: the norm is 0",
        "row 1",
        "F.normalize",
    ),
    Fault(
        "0/0 of a root",
        lambda w, x: ((w * x) / (w * x).square().sum(1, keepdim=True).sqrt()).sum(),
        X * torch.tensor([[1.0], [0.0], [1.0]]),
        "truediv",
        "0/0 for 4 of 12: the root is 0",
        "row 1",
        "the epsilon inside",
    ),
    Fault(
        "equal eigenvalues",
        lambda w, x: torch.linalg.eigh(torch.diag_embed(w * x))[1].sum(),
        torch.tensor([[1.0, 2.0], [3.0, 3.0]]),
        "linalg_eigh",
        "divisor 0 for",
        "row 1, every position",
        "add a small diagonal",
        backward=True,
    ),
    Fault(
        "logarithm of a determinant of 0",
        lambda w, x: torch.logdet(torch.diag_embed(w * x)).sum(),
        torch.tensor([[1.0, 2.0], [3.0, 0.0], [1.0, 1.0]]),
        "logdet",
        "slogdet of a determinant of 0 for 1 of 3",
        "row 1",
        "torch.eye(n)",
    ),
    Fault(
        "0/0 of a standard deviation",
        lambda w, x: (w * (x - x.mean(1, keepdim=True)) / x.std(1, keepdim=True)).sum(),
        X,
        "truediv",
        "0/0 for 4 of 12: the standard deviation is 0",
        "row 2",
        "std + 1e-4",
    ),
    Fault(
        "0/0 of a standard deviation",  # groups of two rows, of four
        lambda w, x: (w[:, 0] * ((g := x[:, 0].view(2, 2)) - 1).div(g.std(1, keepdim=True)).flatten()).sum(),
        torch.tensor([[0.5], [2.0], [1.0], [1.0]]),
        "div",
        "0/0 for 2 of 4: the standard deviation is 0",
        "rows 2 and 3",
        "leave such groups out",
    ),
    Fault("x log y at y = 0", lambda w, x: torch.xlogy(w, x).sum(), X, "xlogy", "log of 0 for 1 of 12"),
    Fault("gamma function at a pole", lambda w, x: torch.lgamma(w * x).sum(), X, "lgamma", "lgamma of 0 for 1 of 12"),
    Fault(
        "atanh at 1 or beyond",
        lambda w, x: torch.atanh(w * x).sum(),
        torch.tensor([[0.5, 0.2], [0.1, 1.0]]),
        "atanh",
        "atanh of 1 for 1 of 4",
        advice="atanh(x.clamp(",
    ),
    Fault(
        "beyond float16",
        lambda w, x: (w.half() * x.half()).square().sum().float(),
        torch.tensor([[1.0, 2.0], [3.0, 300.0]]),
        "square",
        "exceeds 6.55e+04, the largest of float16",
        advice="float32",
    ),
    Fault(
        "beyond float16",
        lambda w, x: ((w.half() * x.half()) ** 2).sum().float(),
        torch.tensor([[1.0, 0.0], [3.0, 300.0]]),
        "pow",
        "exceeds 6.55e+04, the largest of float16",
        advice="float32",
    ),
    Fault(
        "overflow",
        lambda w, x: (w * x).square().sum(),
        torch.tensor([[1.0, 2.0], [3.0, 3e19]]),
        "square",
        "exceeds 3.403e+38, the largest of float32",
        advice="too large",
        tried=False,
    ),
]


class Faulty(nn.Module):
    def __init__(self, f: Callable[[Tensor, Tensor], Tensor], x: Tensor) -> None:
        super().__init__()
        self.f, self.w = f, nn.Parameter(torch.ones_like(x))

    def forward(self, x: Tensor) -> Tensor:
        return self.f(self.w, x)


@pytest.mark.filterwarnings("ignore:std|var")
@pytest.mark.parametrize("fault", FAULTS, ids=lambda fault: fault.row)
def test_reason_place_and_remedy(fault: Fault) -> None:
    err = gr.locate(Faulty(fault.f, fault.x), fault.x)

    assert err is not None
    told = str(err)
    assert err.op == f"/{fault.op}", told
    assert fault.why in err.story.why, told
    assert err.indices == fault.indices, told
    assert fault.advice in err.story.advice, told
    assert err.in_backward == fault.backward, told
    assert any(fault.cover in one for one in err.cover) if fault.cover else err.cover == (), told
    assert err.story.is_tried == fault.tried, told
    assert err.operands, told
    for part in (err.story.why, err.indices, f"What to change: {err.story.advice}"):
        assert part in told


def test_what_a_remedy_uncovers_is_told_with_it() -> None:
    def si_snr(w: Tensor, x: Tensor) -> Tensor:
        projected = w * x * (w * x * x).sum(1, keepdim=True) / x.square().sum(1, keepdim=True)
        return torch.log10(projected.square().sum(1)).sum()  # log of 0 where the reference is silent

    err = gr.locate(Faulty(si_snr, X * torch.tensor([[1.0], [0.0], [1.0]])), X * torch.tensor([[1.0], [0.0], [1.0]]))

    assert err is not None
    assert (err.op, err.indices, err.story.is_tried) == ("/truediv", "row 1", True)
    first, _, behind = err.story.advice.partition("With that alone it is not finite yet: ")
    assert "x / (y + 1e-6)" in first
    assert behind.startswith("/log10, test_reasons.py:")
    assert behind.count("With that alone") == 0
    assert "log10 of 0 for 1 of 3 at row 1" in behind


def test_every_row_of_the_table_has_a_case() -> None:
    missing = {row.name for row in TABLE} - {fault.row for fault in FAULTS}
    # torch's math takes such rows as zeros (torch 2.5), and CTC stops the tracer: tests/unit/replay have these
    assert missing == {"attention without a key", "ctc_loss of a target longer than its input"}
