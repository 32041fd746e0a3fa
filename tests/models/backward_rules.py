"""Programs with one op whose backward is replaced by a rule, and the same backward written by hand."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

import gradrewrite as gr

Op = Callable[..., Any]


def by_hand(forward: Op, backward: Callable[..., Any]) -> Op:
    """Return an op with ``backward(errors, inputs, output)``, as an ``autograd.Function``."""

    class Function(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, *args: Any) -> Any:
            out = forward(*args)
            ctx.save_for_backward(*args, *(out if isinstance(out, tuple) else (out,)))
            ctx.num_args = len(args)
            if isinstance(out, tuple):
                ctx.mark_non_differentiable(*(t for t in out if not t.is_floating_point()))
            return out

        @staticmethod
        def backward(ctx: Any, *errors: Tensor) -> Any:
            saved = ctx.saved_tensors
            return backward(errors, saved[: ctx.num_args], saved[ctx.num_args :])

    return Function.apply


def hooked(op: Op, change: Callable[[Tensor], Tensor]) -> Op:
    """Return an op that is handed another error."""

    def run(*args: Tensor) -> Any:
        out = op(*args)
        for made in out if isinstance(out, tuple | list) else (out,):
            if made.requires_grad:
                made.register_hook(lambda e: None if e is None else change(e))
        return out

    return run


def clamp(error: Tensor) -> Tensor:
    return error.clamp(-0.1, 0.1)


def clipped(op: gr.BackwardOp) -> Any:
    """Clip what the op is handed; of several results each."""
    if isinstance(op.error, tuple):
        return op.vjp(tuple(None if e is None else clamp(e) for e in op.error))
    return op.vjp(clamp(op.error))


def reversed_(op: gr.BackwardOp) -> Any:
    return tuple(None if g is None else -g for g in op.vjp(op.error))


def _linear_reversed(errors: Any, inputs: Any, _: Any) -> Any:
    (e,), (x, w, _b) = errors, inputs
    rows, given = e.flatten(0, -2), x.flatten(0, -2)
    return -(rows @ w).view_as(x), -(rows.mT @ given), -rows.sum(0)


def _softmax_clipped(errors: Any, _: Any, outputs: Any) -> Any:
    (y,) = outputs
    return torch._softmax_backward_data(clamp(errors[0]), y, -1, y.dtype)


def _max_of_rows(errors: Any, inputs: Any, outputs: Any) -> Any:
    return torch.zeros_like(inputs[0]).scatter_(-1, outputs[1][..., None], 2 * errors[0][..., None])


class Sign(torch.autograd.Function):
    """A custom function of the user."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.sign()

    @staticmethod
    def backward(ctx: Any, error: Tensor) -> Tensor:
        return error * 0.5


def _straight(op: gr.BackwardOp) -> Any:
    return op.error


@dataclass(frozen=True)
class Case:
    """One op in the program: the op, the rule at its site, and the op with that backward by hand."""

    site: str
    op: Op
    rule: Callable[[gr.BackwardOp], Any]
    by_hand: Op
    num_inputs: int = 1
    is_exact: bool = True  # the reference computes the same bits


def _linear(x: Tensor, w: Tensor, b: Tensor) -> Tensor:
    return F.linear(x, w, b)


def _softmax(x: Tensor) -> Tensor:
    return x.softmax(-1)


def _positive(e: Tensor, y: Tensor) -> Tensor:
    return torch.where((e > 0) & (y > 0), e, 0)


def _columns(split: Op) -> Op:
    return lambda x: torch.cat([split(x)[n] for n in (0, 2, 2, 0)], -1)


def _split(x: Tensor) -> Any:
    return x.split(1, -1)


def _largest(largest: Op) -> Op:
    return lambda x: largest(x)[0][..., None] + x


def _max(x: Tensor) -> Any:
    return x.max(-1)


def _leaky(x: Tensor) -> Tensor:
    return F.leaky_relu(x, negative_slope=0.25)


def _by_slope(op: gr.BackwardOp) -> Any:
    return op.error * op.kwargs["negative_slope"]


def _relu_(x: Tensor) -> Tensor:
    return (x * 1).relu_()


def _normalize(x: Tensor) -> Tensor:
    return F.normalize(x, dim=-1)


def _attention(attention: Op) -> Op:
    return lambda x: attention(x, 2 * x, x + 1)


def _twice(op: Op) -> Op:
    return lambda x: op(x, x)


def _batch_norm(x: Tensor) -> Tensor:
    return F.batch_norm(x, None, None, training=True)


def _rows(op: Op) -> Op:
    return lambda x: op(x.flatten(0, 1)).view_as(x)


def _dropout(x: Tensor) -> Tensor:
    return F.dropout(x, 0.5)


def _own(f: Callable[[Tensor, Tensor, Tensor], Tensor]) -> Callable[..., Tensor]:
    """Return a backward of error, input and output of an op with one of each."""
    return lambda errors, inputs, outputs: f(errors[0], inputs[0], outputs[0])


_ATTENTION = F.scaled_dot_product_attention
_SPLIT = _columns(hooked(_split, clamp))
_CLIPPED_ATTENTION = _attention(hooked(_ATTENTION, clamp))
_GUIDED = _own(lambda e, x, y: _positive(e, y))
_SCALED = by_hand(torch.abs, _own(lambda e, x, y: e * x))
_HALF = by_hand(torch.exp, _own(lambda e, x, y: e * y / 2))
_BY_HAND_MAX = _largest(by_hand(_max, _max_of_rows))

CASES: dict[str, Case] = {
    "straight through": Case("round", torch.round, _straight, by_hand(torch.round, _own(lambda e, x, y: e))),
    "method": Case("floor", lambda x: x.floor(), _straight, by_hand(torch.floor, _own(lambda e, x, y: e))),
    "reversal": Case("linear", _linear, reversed_, by_hand(_linear, _linear_reversed), 3),
    "softmax": Case("softmax", _softmax, clipped, by_hand(_softmax, _softmax_clipped)),
    "output": Case("exp", torch.exp, lambda op: op.error * op.output / 2, _HALF),
    "input": Case("abs", torch.abs, lambda op: op.error * op.inputs[0], _SCALED),
    "argument": Case("leaky_relu", _leaky, _by_slope, by_hand(_leaky, _own(lambda e, x, y: e * 0.25))),
    "several results": Case("max", _largest(_max), lambda op: 2 * op.vjp(op.error)[0], _BY_HAND_MAX),
    "unused result": Case("split", _columns(_split), clipped, _SPLIT),
    "in place": Case("relu_", _relu_, lambda op: _positive(op.error, op.output), by_hand(torch.relu, _GUIDED)),
    "custom function": Case("apply", Sign.apply, _straight, by_hand(torch.sign, _own(lambda e, x, y: e))),
    "several parts": Case("normalize", _normalize, clipped, hooked(_normalize, clamp), is_exact=False),
    "twice": Case("multiply", _twice(torch.multiply), clipped, _twice(hooked(torch.multiply, clamp)), is_exact=False),
    "attention": Case(_ATTENTION.__name__, _attention(_ATTENTION), clipped, _CLIPPED_ATTENTION, is_exact=False),
    "batch norm": Case("batch_norm", _rows(_batch_norm), clipped, _rows(hooked(_batch_norm, clamp))),
    "dropout": Case("dropout", _dropout, clipped, hooked(_dropout, clamp)),
}  # fmt: skip


class Block(nn.Module):
    """A layer around the op of a case: ``[B, T, 4]`` to the same."""

    def __init__(self, case: Case, *, is_by_hand: bool, way: str) -> None:
        super().__init__()
        self.before, self.weight = nn.Linear(4, 4), nn.Parameter(torch.randn(4, 4) / 2)
        self.bias = nn.Parameter(torch.randn(4))
        self.op = case.by_hand if is_by_hand else case.op
        self.num_inputs, self.way = case.num_inputs, way

    def compute(self, x: Tensor) -> Tensor:
        h = self.before(x) * 2
        made: Tensor = self.op(h, self.weight, self.bias) if self.num_inputs == 3 else self.op(h)
        return (made * torch.arange(1.0, 5.0)).sin() + h

    def forward(self, x: Tensor) -> Tensor:
        if self.way == "checkpoint":
            made: Tensor = checkpoint(self.compute, x, use_reentrant=False)
            return made
        return self.compute(x)


class Program(nn.Module):
    """Two layers with the op of a case; ``way`` is "", "checkpoint" or "loop"."""

    def __init__(self, name: str, *, is_by_hand: bool = False, way: str = "", frozen: bool = False) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.ModuleList(Block(CASES[name], is_by_hand=is_by_hand, way=way) for _ in range(2))
        self.way = way
        for layer in self.layers:
            layer.before.weight.requires_grad_(not frozen)

    def forward(self, x: Tensor) -> Tensor:
        if self.way == "loop":
            for t in range(5):
                x = self.layers[0](x) * 0.5 + t * 0.1
        for layer in self.layers:
            x = layer(x)
        return x.square().mean()


def inputs() -> Tensor:
    return torch.randn(2, 3, 4, generator=torch.Generator().manual_seed(1))


def step(model: Any) -> tuple[Tensor, dict[str, Tensor], Tensor]:
    """Return loss, gradients and gradient of the input."""
    x = inputs().to(next(model.parameters()).dtype).requires_grad_()
    torch.manual_seed(3)
    loss = model(x)
    loss.backward()
    assert x.grad is not None
    return loss.detach(), {n: p.grad for n, p in model.named_parameters() if p.grad is not None}, x.grad
