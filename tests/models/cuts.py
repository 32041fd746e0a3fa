"""Cuts of gradients, ten kinds, planted behind a module of any model."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from gradrewrite.auditing.gradient_flow import GradientFlow, flow_of
from gradrewrite.auditing.step_graphs import trace_step

ROUNDING = 1e-11  # of a gradient in float64 that is 0 by algebra, relative to that without the cut


Step = Callable[[Tensor, Tensor], Tensor]  # of two parameters, "a" and "b", both [4, 4]


class TwoParameters(nn.Module):
    """A loss of two parameters."""

    def __init__(self, step: Step) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.a, self.b = nn.Parameter(torch.randn(4, 4)), nn.Parameter(torch.randn(4, 4))
        self.step = step

    def forward(self) -> Tensor:
        return self.step(self.a, self.b)


def flow(step: Step) -> GradientFlow:
    model = TwoParameters(step)
    return flow_of(trace_step(model, None, (), {}), model)


class NoGradient(torch.autograd.Function):
    """The identity, without a gradient."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> None:
        return None


def detach(given: Tensor, x: Tensor) -> Tensor:
    return x.detach() * 0.5


def data(given: Tensor, x: Tensor) -> Tensor:
    return x.data * 0.5


def no_grad(given: Tensor, x: Tensor) -> Tensor:
    with torch.no_grad():
        return x.tanh()


def argmax(given: Tensor, x: Tensor) -> Tensor:
    chosen = x.argmax(-1)
    return functional.one_hot(chosen, x.shape[-1]).to(x.dtype)


def rounded(given: Tensor, x: Tensor) -> Tensor:
    return torch.round(x * 8) / 8


def function(given: Tensor, x: Tensor) -> Tensor:
    return NoGradient.apply(x)


def comparison(given: Tensor, x: Tensor) -> Tensor:
    return torch.gt(x, 0.0).to(x.dtype)


def integer(given: Tensor, x: Tensor) -> Tensor:
    return (x * 8).to(torch.int64).to(x.dtype) / 8


def constant(given: Tensor, x: Tensor) -> Tensor:
    weights = x.exp().unsqueeze(-1)
    weights = weights / weights.sum(-1, keepdim=True)
    return weights.squeeze(-1)


def cancels(given: Tensor, x: Tensor) -> Tensor:
    shifted = torch.cos(x) * 2
    own = torch.linspace(-1.0, 1.0, x.numel(), dtype=x.dtype).reshape(x.shape) * given.flatten()[0]
    return own.add(shifted).sub(shifted)


@dataclass(frozen=True)
class CutKind:
    """One way to stop a gradient, with the name and a part of the line that an audit gives."""

    apply: Callable[[Tensor, Tensor], Tensor]  # of input and output of a module
    op: str
    line: str


KINDS = {
    "detach": CutKind(detach, "detach", "x.detach() * 0.5"),
    "data": CutKind(data, ".data", "x.data * 0.5"),
    "no_grad": CutKind(no_grad, "no_grad", "return x.tanh()"),
    "argmax": CutKind(argmax, "argmax", "chosen = x.argmax(-1)"),
    "round": CutKind(rounded, "round", "torch.round(x * 8)"),
    "function": CutKind(function, "NoGradient", "NoGradient.apply(x)"),
    "comparison": CutKind(comparison, "gt", "torch.gt(x, 0.0)"),
    "integer": CutKind(integer, "to", "(x * 8).to(torch.int64)"),
    "constant": CutKind(constant, "truediv", "weights = weights / weights.sum(-1, keepdim=True)"),
    "cancels": CutKind(cancels, "sub", ".sub(shifted)"),
}


@contextmanager
def planted(module: nn.Module, kind: CutKind) -> Iterator[None]:
    """Cut the gradient of a module's output inside the block."""

    def hook(_: nn.Module, given: tuple[Any, ...], output: Tensor) -> Tensor:
        read = next((t for t in given if isinstance(t, Tensor) and t.is_floating_point()), torch.ones_like(output))
        return kind.apply(read, output)

    handle = module.register_forward_hook(hook)
    try:
        yield
    finally:
        handle.remove()


def modules_to_cut(model: nn.Module, run: Callable[[], Any]) -> list[str]:
    """Return the modules with trained parameters that are called once and return one floating tensor."""
    calls: dict[str, list[bool]] = {}

    def look(name: str) -> Callable[..., None]:
        def hook(module: nn.Module, given: Any, output: Any) -> None:
            is_fit = isinstance(output, Tensor) and output.is_floating_point() and output.requires_grad
            calls.setdefault(name, []).append(is_fit and output.dim() > 1)

        return hook

    named = [(name, m) for name, m in model.named_modules() if name and any(p.requires_grad for p in m.parameters())]
    handles = [module.register_forward_hook(look(name)) for name, module in named]
    try:
        run()
    finally:
        for handle in handles:
            handle.remove()
    return [name for name, fit in calls.items() if fit == [True]]


def choose(names: list[str], seed: int) -> str:
    """Draw one module."""
    return random.Random(seed).choice(names)


def without_gradient(model: nn.Module, run: Callable[[], Tensor], before: Mapping[str, float]) -> set[str]:
    """Return the parameters whose gradient a cut has taken: none, 0, or a rounding error of what it was."""
    sizes = gradient_sizes(model, run)
    return {name for name, size in before.items() if size > 0 and sizes[name] <= ROUNDING * size}


def gradient_sizes(model: nn.Module, run: Callable[[], Tensor]) -> dict[str, float]:
    """Return the largest gradient element of each parameter, from eager autograd; 0 where there is none."""
    model.zero_grad()
    torch.manual_seed(1)
    loss = run()
    if loss.requires_grad:
        loss.backward()
    named = [(name, p) for name, p in model.named_parameters() if p.requires_grad]
    return {name: 0.0 if p.grad is None else float(p.grad.abs().max()) for name, p in named}
