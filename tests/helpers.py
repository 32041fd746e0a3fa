"""What several test files need."""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from models.zoo import CASES, Case

__all__ = ["CASES", "Case", "eager_gradients", "gradients_of", "make_case", "run_case"]

TensorFunction = Callable[[Tensor], Tensor]
Gradients = dict[str, Tensor | None]


def make_case(case: Case, dtype: torch.dtype, seed: int = 0) -> tuple[nn.Module, tuple[Tensor, ...]]:
    torch.manual_seed(seed)
    model = case.make().to(dtype)
    inputs = tuple(t.to(dtype) if t.is_floating_point() else t for t in case.inputs())
    return model, inputs


def gradients_of(model: nn.Module) -> Gradients:
    return {name: p.grad for name, p in model.named_parameters()}


def run_case(case: Case, model: nn.Module, inputs: Sequence[Tensor], seed: int = 1) -> tuple[Any, Gradients]:
    """One training step without an optimizer: the outputs, and the gradients."""
    torch.manual_seed(seed)
    model.zero_grad()
    with torch.autocast("cpu", dtype=torch.bfloat16, enabled=case.autocast):
        out = model(*inputs)
        loss = case.loss(out)
    loss.backward()
    return out, {name: None if g is None else g.clone() for name, g in gradients_of(model).items()}


def eager_gradients(
    case: Case, model: nn.Module, inputs: Sequence[Tensor], hooked: Sequence[str], fn: TensorFunction
) -> tuple[Any, Gradients]:
    """The oracle: the plain model with tensor hooks on the outputs of modules."""
    model = copy.deepcopy(model)
    for name in hooked:
        model.get_submodule(name).register_forward_hook(_hook(fn))
    return run_case(case, model, inputs)


def _hook(fn: TensorFunction) -> Callable[[nn.Module, Any, Any], None]:
    def hook(_: nn.Module, __: Any, output: Any) -> None:
        if isinstance(output, Tensor) and output.requires_grad:
            output.register_hook(fn)

    return hook
