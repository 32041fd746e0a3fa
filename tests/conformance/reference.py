"""The shared reference: clips as hooks of eager autograd, and the same clips as a policy on a transformed module."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

import gradrewrite as gr
from gradrewrite.passes import CheckFinite, ClipByValue

from conformance.outcomes import TorchRefusesError

ERROR_BOUND = 0.25  # errors are cosines of 0, 1, 2, ...: it acts at the first element of each output


@dataclass(frozen=True)
class Step:
    """The differentiable outputs, the gradients of inputs and parameters, and the buffers of one step."""

    outputs: list[Tensor]
    gradients: dict[str, Tensor | None]
    buffers: dict[str, Tensor]

    @property
    def is_finite(self) -> bool:
        values = [*self.outputs, *(g for g in self.gradients.values() if g is not None)]
        return all(bool(torch.isfinite(t).all()) for t in values)


class Wrapped(nn.Module):
    """A module as a submodule, so that its outputs have errors; the loss is computed behind it."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, *inputs: Any) -> tuple[Tensor, list[Tensor]]:
        outputs = differentiable(self.inner(*inputs))
        return loss_of(outputs), [t.detach().clone() for t in outputs]


def differentiable(out: Any) -> list[Tensor]:
    """The outputs that have an error."""
    return [t for t in pytree.tree_leaves(out) if isinstance(t, Tensor) and t.requires_grad]


def loss_of(outputs: Sequence[Tensor]) -> Tensor:
    """A sum in which each element has another weight, at most 1."""
    return torch.stack([_weighted(t) for t in outputs]).sum()


def _weighted(t: Tensor) -> Tensor:
    flat = (torch.view_as_real(t.resolve_conj()) if t.is_complex() else t).reshape(-1).to(torch.float64)
    return (flat * torch.cos(torch.arange(flat.numel(), dtype=torch.float64))).sum()


class NoGradientError(Exception):
    """No output of a sample depends on what needs a gradient."""


class Comparison:
    """One module on one sample: the plain step with hooks, and the rewritten one.

    Args:
        make: Makes the module, with the same parameters each time.
        inputs: Its inputs; leaves that require a gradient are compared too.
    """

    def __init__(self, make: Callable[[], nn.Module], inputs: Sequence[Any]) -> None:
        self.make, self.inputs = make, inputs

    def check(self) -> None:
        """Clip errors and gradients, look for values that are not finite, and compare with hooks.

        A traced op may compute otherwise than an eager one, so the reference may also be what plain torch.compile makes
        of the module; the hooks are on its outputs in both cases.
        """
        wanted = self._eager()
        bound = input_bound(wanted)
        found = self.rewritten(policy_of(bound, checks=wanted.is_finite))
        try:
            compare(found, clamped(wanted, bound))
        except AssertionError:
            compare(found, clamped(self.hooked(self.make(), backend="aot_eager"), bound))

    def check_inert(self) -> None:
        """With the empty policy all is equal bit for bit."""
        found = self.rewritten([])
        try:
            compare(found, self.hooked(self.make(), clip=False), exact=True)
        except AssertionError:
            compare(found, self.hooked(self.make(), backend="aot_eager", clip=False), exact=True)

    def _eager(self) -> Step:
        try:
            return self.hooked(self.make())
        except NoGradientError:
            raise
        except Exception as err:
            raise TorchRefusesError from err

    def hooked(self, module: nn.Module, *, backend: str = "eager", clip: bool = True) -> Step:
        """The step of the plain module, with hooks on its outputs."""
        torch.manual_seed(1)
        inputs = fresh(self.inputs)
        run = module if backend == "eager" else torch.compile(module, backend=backend, fullgraph=True, dynamic=False)
        outputs = differentiable(run(*inputs))
        if not outputs:
            raise NoGradientError
        for output in {id(t): t for t in outputs if clip and not t.is_complex()}.values():
            output.register_hook(lambda error: error.clamp(-ERROR_BOUND, ERROR_BOUND))
        loss_of(outputs).backward()
        return step_of(module, [t.detach().clone() for t in outputs], inputs)

    def rewritten(self, policy: Any) -> Step:
        """The step of the transformed module."""
        inputs, module = fresh(self.inputs), Wrapped(self.make())
        torch.manual_seed(1)
        try:
            loss, outputs = gr.transform(module, policy)(*inputs)
            loss.backward()
        except Exception:
            self._raise_if_torch_refuses()
            raise
        return step_of(module.inner, outputs, inputs)

    def _raise_if_torch_refuses(self) -> None:
        torch.compiler.reset()
        torch.manual_seed(1)
        try:
            plain = torch.compile(Wrapped(self.make()), backend="aot_eager", fullgraph=True, dynamic=False)
            loss, _ = plain(*fresh(self.inputs))
            loss.backward()
        except Exception as err:
            raise TorchRefusesError from err


def check_samples(samples: Iterable[Comparison], *, is_inert: bool = False) -> None:
    """Compare all samples that have a gradient; without one the case is skipped."""
    number = 0
    for sample in samples:
        with contextlib.suppress(NoGradientError):
            sample.check()
            torch.compiler.reset()
            if is_inert:
                sample.check_inert()
            number += 1
    if not number:
        pytest.skip("no sample has a strided tensor with a gradient")


def policy_of(bound: float, *, checks: bool) -> gr.Policy:
    """Clips at the module's outputs and at the inputs, and a check everywhere."""

    def policy(site: gr.Site) -> Any:
        is_real = site.dtype is not None and not site.dtype.is_complex
        clips: list[Any] = []
        if is_real and site.kind == "input":
            clips.append(ClipByValue(bound))
        is_output = site.kind == "error" and site.matches("inner")
        if is_real and is_output:
            clips.append(ClipByValue(ERROR_BOUND))
        return [*clips, CheckFinite()] if checks and (site.kind != "error" or is_output) else clips

    return policy


def fresh(inputs: Sequence[Any]) -> list[Any]:
    """Copies of the inputs; leaves stay leaves."""
    return pytree.tree_map_only(Tensor, lambda t: t.detach().clone().requires_grad_(t.requires_grad), list(inputs))


def tensors(value: Any) -> list[Tensor]:
    return [t for t in pytree.tree_leaves(value) if isinstance(t, Tensor)]


def step_of(module: nn.Module, outputs: list[Tensor], inputs: Sequence[Any]) -> Step:
    gradients = {f"input {n}": t.grad for n, t in enumerate(tensors(inputs)) if t.requires_grad}
    gradients |= {name: p.grad for name, p in module.named_parameters() if p.requires_grad}
    return Step(outputs, gradients, dict(module.named_buffers()))


def input_bound(step: Step) -> float:
    """Half of the largest gradient of an input, so that the clip acts; 1 if all are zero."""
    gradients = [g for name, g in step.gradients.items() if name.startswith("input ") and g is not None and g.numel()]
    largest = max((float(g.abs().nan_to_num(0.0, 0.0, 0.0).max()) for g in gradients), default=0.0)
    return largest / 2 or 1.0


def clamped(step: Step, bound: float) -> Step:
    def clamp(name: str, g: Tensor | None) -> Tensor | None:
        is_clipped = name.startswith("input ") and g is not None and not g.is_complex()
        return g.clamp(-bound, bound) if is_clipped else g

    return Step(step.outputs, {name: clamp(name, g) for name, g in step.gradients.items()}, step.buffers)


def compare(found: Step, wanted: Step, *, exact: bool = False) -> None:
    """Outputs and buffers have to be equal bit for bit, gradients to rounding (or bit for bit)."""
    assert len(found.outputs) == len(wanted.outputs)
    named = zip((f"output {n}" for n in range(len(wanted.outputs))), found.outputs, wanted.outputs, strict=True)
    buffers = ((name, b, wanted.buffers[name]) for name, b in found.buffers.items())
    for name, ours, theirs in (*named, *buffers):
        assert ours.shape == theirs.shape, name
        assert ours.dtype == theirs.dtype, name
        torch.testing.assert_close(ours, theirs, rtol=0, atol=0, equal_nan=True, msg=lambda m, n=name: f"{n}: {m}")
    scale = max((_largest(g) for g in wanted.gradients.values()), default=0.0)
    assert found.gradients.keys() == wanted.gradients.keys()
    for name, gradient in found.gradients.items():
        _compare_gradients(name, gradient, wanted.gradients[name], 0.0 if exact else 1e-9, scale)


def _compare_gradients(name: str, found: Tensor | None, wanted: Tensor | None, rtol: float, scale: float) -> None:
    if found is None or wanted is None:
        # torch.compile gives zeros where an input reaches only outputs that the loss ignores; eager autograd None.
        left = found if wanted is None else wanted
        assert left is None or not left.any(), f"{name}: a gradient on one side alone"
        return
    ours, theirs = (g.to_dense() if g.layout is not torch.strided else g for g in (found, wanted))
    tolerance = rtol if ours.dtype in (torch.float64, torch.complex128) else max(rtol, 1e-4 if rtol else 0.0)
    torch.testing.assert_close(
        ours, theirs, rtol=tolerance, atol=tolerance * scale, equal_nan=True, msg=lambda m: f"{name}: {m}"
    )


def _largest(g: Tensor | None) -> float:
    return 0.0 if g is None or not g.numel() else float(g.to_dense().abs().nan_to_num(0.0, 0.0, 0.0).max())
