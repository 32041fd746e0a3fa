"""Rules at the backward of torch's database of ops, and infinities whose error is 0."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

import gradrewrite as gr
from gradrewrite.errors import NoSuchSiteError, RewriteError
from gradrewrite.passes import KeepZeros

from conformance.op_db import DIFFERENTIABLE, Op, samples_of


def _copied(op: gr.BackwardOp) -> Any:
    error = op.error
    return op.vjp(tuple(None if e is None else e * 1 for e in error) if isinstance(error, tuple) else error * 1)


# Each leaves a finite backward as it is, bit for bit: as nodes of the graph, and as copies of them.
RULES = {
    "the same": gr.on("backward:*/*", lambda op: op.vjp(op.error)),
    "copied": gr.on("backward:*/*", _copied),
    "zeros": gr.on("backward:*/*", KeepZeros()),
}


class Weighted(nn.Module):
    """An op whose errors are these."""

    def __init__(self, op: Op, errors: list[Tensor]) -> None:
        super().__init__()
        self.op, self.errors = op, errors  # where an output counts

    def forward(self, *inputs: Tensor) -> Any:
        outputs = differentiable(self.op(*inputs))
        return sum(torch.where(e, o, 0).sum() for o, e in zip(outputs, self.errors, strict=True))


def differentiable(made: Any) -> list[Tensor]:
    return [t for t in pytree.tree_leaves(made) if isinstance(t, Tensor) and t.requires_grad]


def gradients(module: nn.Module, inputs: list[Tensor], policy: Any) -> tuple[list[Tensor | None], Any]:
    """Return the gradients of the inputs of a module under a policy, and the model."""
    torch.compiler.reset()
    torch.manual_seed(1)
    own = [t.detach().clone().requires_grad_(t.requires_grad) for t in inputs]
    model = gr.transform(module, policy)
    outputs = differentiable(model(*own))
    torch.manual_seed(2)
    seeds = [torch.randn_like(o) for o in outputs]
    wanted = [t for t in own if t.requires_grad]
    return list(torch.autograd.grad(outputs, wanted, seeds, allow_unused=True)), model


def is_same(a: Tensor | None, b: Tensor | None) -> bool:
    return (a is None and b is None) or (a is not None and b is not None and torch.allclose(a, b, 0, 0, equal_nan=True))


@dataclass(frozen=True)
class Planted:
    """A sample with an infinity in an input, and errors that are 0 where the outputs depend on it."""

    module: Weighted
    inputs: list[Tensor]


def planted(name: str) -> Iterator[Planted]:
    """Yield a sample of an op with an infinity in each of its differentiable inputs, one after the other."""
    for op, inputs in samples_of(DIFFERENTIABLE[name], 3):
        own = [t.detach().clone().requires_grad_(t.requires_grad) for t in inputs]
        torch.manual_seed(1)
        before = [o.detach() for o in differentiable(op(*own))]
        for number, x in enumerate(inputs):
            is_weight = number > 0 and any(part in name for part in ("norm", "conv"))  # taken as it is
            if is_weight or not (x.requires_grad and x.numel() > 1 and x.is_floating_point()):
                continue
            changed = [t.detach().clone() for t in inputs]
            changed[number][(-1,) * x.dim()] = float("inf")
            given = [t.requires_grad_(x.requires_grad) for t, x in zip(changed, inputs, strict=True)]
            torch.manual_seed(1)
            try:
                after = [o.detach() for o in differentiable(op(*given))]
            except Exception:
                continue
            if [o.shape for o in after] != [o.shape for o in before]:
                continue
            kept = [(a == b) & a.isfinite() for a, b in zip(before, after, strict=True)]
            if "conv" in name:  # samples of zeros
                kept = [k.flatten(1).all(1).view(-1, *[1] * (k.dim() - 1)).expand(k.shape) for k in kept]
            if any(bool(k.any()) for k in kept):  # else all errors are 0
                yield Planted(Weighted(op, kept), given)


class NotCoveredError(Exception):
    """The backward of an op is not covered, as ``explain()`` says."""


def check_planted(case: Planted) -> None:
    """Raise AssertionError for a gradient that is NaN."""
    try:
        found, model = gradients(case.module, case.inputs, RULES["zeros"])
    except NoSuchSiteError:  # all its gradients are 0, as those of the number of elements that are not 0
        raise NotCoveredError from None
    covers = [cover for graph in model.explain().graphs for _, cover in graph.zeros]
    if any(cover.not_covered for cover in covers):
        raise NotCoveredError(sorted({name for cover in covers for name in cover.not_covered}))
    assert not any(bool(g.isnan().any()) for g in found if g is not None)


__all__ = ["RULES", "NotCoveredError", "RewriteError", "check_planted", "gradients", "is_same", "planted"]
