"""Calls of loops in a Dynamo graph; AOTAutograd traces each as one operator and its backward."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, fx

from gradrewrite.ir.marked_loops import find_loop, loop_backward, loop_forward


def run_loop(body: fx.GraphModule, key: str, *tensors: Tensor) -> tuple[Tensor, ...]:
    """Run the loop with this body and key; see ``Loop``."""
    results: tuple[Tensor, ...] = _Loop.apply(key, *tensors)  # type: ignore[no-untyped-call]
    return results


class _Loop(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, key: str, *tensors: Tensor) -> tuple[Tensor, ...]:
        ctx.key = key
        ctx.save_for_backward(*tensors)
        results = loop_forward(list(tensors), key)
        loop = find_loop(key)
        ctx.differentiable = [n for n, r in enumerate(results) if loop.is_differentiable(n, r)]
        ctx.mark_non_differentiable(*(r for n, r in enumerate(results) if n not in ctx.differentiable))
        return tuple(results)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        needed = ctx.needs_input_grad[1:]
        wanted = [n for n, needs in enumerate(needed) if needs]
        tangents = [gradients[n].contiguous() for n in ctx.differentiable]
        found = iter(loop_backward(list(ctx.saved_tensors), tangents, wanted, ctx.key))
        return (None, *(next(found) if needs else None for needs in needed))
