"""What several test files need."""

from __future__ import annotations

import copy
import itertools
import os
from collections.abc import Callable, Collection, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import gradrewrite as gr

from models.zoo import CASES, Case

__all__ = [
    "CASES",
    "ROOT",
    "TESTS",
    "Case",
    "Probe",
    "assert_same_gradients",
    "clip_norm",
    "clip_value",
    "eager_gradients",
    "failure",
    "gradient",
    "gradients_of",
    "make_case",
    "mostly_slow",
    "policy_at",
    "run_case",
    "run_probe",
]

TESTS = Path(__file__).parent
ROOT = TESTS.parent
TensorFunction = Callable[[Tensor], Tensor]
Gradients = dict[str, Tensor | None]


def node_modules() -> Path | None:
    """Return the folder of the npm packages that check the page; None if they are not installed."""
    found = Path(os.environ.get("GRADREWRITE_NODE_MODULES", ROOT / "tests" / "page" / "node_modules"))
    return found if (found / "axe-core").exists() else None


def mostly_slow(cases: Collection[Any], quick: int = 1) -> list[Any]:
    """Cases of ``pytest.mark.parametrize``, of which the default suite runs the first ones."""
    slow = [pytest.param(*(case if isinstance(case, tuple) else [case]), marks=pytest.mark.slow) for case in cases]
    return [*itertools.islice(cases, quick), *slow[quick:]]


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


class Probe(nn.Module):
    """Its error at ``h`` is exactly the argument."""

    def __init__(self, size: int | Sequence[int] = 2, dtype: torch.dtype = torch.float32) -> None:
        super().__init__()
        self.w = nn.Parameter(torch.zeros(size, dtype=dtype))

    def forward(self, error: Tensor) -> Tensor:
        return (gr.tap(self.w * 1, "h") * error).sum()


def run_probe(model: nn.Module, *values: float) -> None:
    """A backward for each value."""
    for value in values:
        model(torch.full((2,), value)).backward()


def failure(step: Callable[[], None]) -> gr.NonFiniteError:
    """The error that a failed check raises."""
    with pytest.raises(gr.NonFiniteError) as caught:
        step()
    return caught.value


def gradient(model: nn.Module, x: Tensor) -> Tensor:
    """The gradient of the first parameter; a plain model may share it with a rewritten one, which watches ``.grad``."""
    model.zero_grad()
    (first, *_) = model.parameters()
    loss = model(x).sum()
    if not isinstance(model, gr.RewrittenModule):
        return torch.autograd.grad(loss, first)[0]
    loss.backward()
    assert first.grad is not None
    return first.grad.clone()


def clip_value(g: Tensor) -> Tensor:
    return g.clamp(-0.05, 0.05)


def clip_norm(g: Tensor) -> Tensor:
    norm = g.norm()
    return torch.where(norm > 0.1, g * (0.1 / norm), g)


def policy_at(hooked: tuple[str, ...], action: Any) -> gr.Policy:
    return lambda site: action if site.kind == "error" and site.name in hooked else None


def assert_same_gradients(got: dict[str, Tensor | None], expected: dict[str, Tensor | None], rtol: float) -> None:
    assert got.keys() == expected.keys()
    # A gradient that is zero but for rounding (a bias before BatchNorm) is compared with the size of the others.
    scale = max(float(g.abs().max()) for g in expected.values() if g is not None)
    for name, gradient in got.items():
        wanted = expected[name]
        if wanted is None or gradient is None:
            # torch.compile gives zeros where a parameter reaches only outputs that the loss ignores.
            left = gradient if wanted is None else wanted
            assert left is None or not left.any(), name
            continue
        torch.testing.assert_close(gradient, wanted, rtol=rtol, atol=rtol * scale, msg=lambda m, n=name: f"{n}: {m}")
