"""Eager training steps; all state is given back."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from gradrewrite._utils.kept_state import give_back, kept_state
from gradrewrite.auditing.step_graphs import scalar_of
from gradrewrite.backends.traced_step import ComputeLoss

_STEP_SIZE = 0.01  # of an update, relative to the size of a parameter, or to 1 where that is 0
_ROUNDING = {torch.float32: 1e-5, torch.float64: 1e-13}  # of a bias's gradient to that of its weight

_SURE = 1e3  # rounding steps of the largest gradient


@dataclass
class EagerSteps:
    """The gradients of some eager steps.

    Attributes:
        got: Names of the parameters with a gradient.
        nonzero: Names of those with a gradient that was not 0 throughout.
        sure: Names of those with a gradient beyond rounding errors, by the largest of the step.
        rounding: Names of biases with gradients of the size of rounding errors.
        kept: The gradients of each step of the parameters that were asked for.
        num_steps: Number of the steps.
        has_drawn: Whether they drew from Python's or NumPy's random numbers.
    """

    got: set[str] = field(default_factory=set)
    nonzero: set[str] = field(default_factory=set)
    sure: set[str] = field(default_factory=set)
    rounding: set[str] = field(default_factory=set)
    kept: list[dict[str, Tensor]] = field(default_factory=list)
    num_steps: int = 0
    has_drawn: bool = False


def run_eager_steps(
    model: nn.Module,
    compute_loss: ComputeLoss | None,
    args: tuple[Any, ...],
    kwargs: Mapping[str, Any],
    *,
    steps: int,
    keep: Collection[str] = (),
    written: Collection[int] | None = None,
    read: Iterable[Any] = (),
) -> EagerSteps:
    """Run eager steps on one batch, until no gradient is 0.

    Between them each parameter is moved by 1 % of its size against its gradient: zeros of a first step that are gone
    by then (LoRA with B = 0, a gate of 0) are none. Parameters, gradients, buffers, inputs and random state are given
    back bit for bit, with attributes of modules. ``written`` has the identities of the parameters and inputs
    that the forward overwrites; None if that is not known, and all are saved. ``read`` has further tensors that the
    step reads, as parameters of another model. Hooks behind an accumulated gradient (an optimizer in the backward)
    do not run.
    """
    found = EagerSteps()
    if not steps:
        return found
    named = {name: p for name, p in model.named_parameters() if p.requires_grad}
    with contextlib.ExitStack() as stack:
        state = stack.enter_context(kept_state(model, (args, kwargs), written))
        for tensor in read:
            if isinstance(tensor, Tensor) and tensor.is_leaf:
                state.add([tensor], are_written=not isinstance(tensor, nn.Parameter))
        stack.enter_context(_without_updates(named.values()))
        for number in range(steps):
            found.num_steps += 1
            with torch.enable_grad():
                given, named_given = _without_graph(args), _without_graph(kwargs)  # a step may overwrite them
                output = (compute_loss or type(model).__call__)(model, *given, **named_given)
                loss = scalar_of(output)
            found.has_drawn |= state.has_drawn()
            if loss is None or not loss.requires_grad:
                return found
            loss.backward()
            del loss
            _note(found, named, keep)
            if found.got == found.nonzero and not keep:
                break
            if number + 1 < steps:
                if not number:
                    stack.enter_context(_kept_values(named))
                _move(named)
                for p in named.values():
                    p.grad = None
    return found


def _note(found: EagerSteps, named: Mapping[str, nn.Parameter], keep: Collection[str]) -> None:
    sizes: dict[str, float] = {}
    for name, p in named.items():
        if p.grad is None:
            continue
        found.got.add(name)
        gradient = p.grad.coalesce().values() if p.grad.is_sparse else p.grad
        sizes[name] = float(gradient.detach().abs().max()) if gradient.numel() else 0.0
        if sizes[name] != 0:  # NaN is no 0
            found.nonzero.add(name)
    largest = max(sizes.values(), default=0.0)
    found.sure.update(n for n, size in sizes.items() if size > largest * torch.finfo(named[n].dtype).eps * _SURE)
    found.kept.append({name: p.grad.clone() for name, p in named.items() if name in keep and p.grad is not None})
    small = {name for name in sizes if _is_rounding(name, sizes, named)}
    found.rounding = small if found.num_steps == 1 else found.rounding & small


def _is_rounding(name: str, sizes: Mapping[str, float], named: Mapping[str, nn.Parameter]) -> bool:
    """Whether the gradient of a bias is a rounding error."""
    module, _, last = name.rpartition(".")
    weight = sizes.get(f"{module}.weight" if module else "weight", math.nan)
    limit = _ROUNDING.get(named[name].dtype, 0.0)
    return last == "bias" and 0 < sizes[name] <= limit * weight


def _without_graph(value: Any) -> Any:
    """Return nested inputs without the graph of another model behind them."""
    if isinstance(value, Tensor):
        return value if value.is_leaf else value.detach().requires_grad_().clone()
    if type(value) is dict:
        return {key: _without_graph(item) for key, item in value.items()}
    return type(value)(map(_without_graph, value)) if type(value) in (list, tuple) else value


@contextlib.contextmanager
def _without_updates(parameters: Iterable[nn.Parameter]) -> Iterator[None]:
    """Take off the hooks behind an accumulated gradient: they may update."""
    hooks = [hooks for p in parameters if (hooks := p._post_accumulate_grad_hooks)]
    own = [dict(given) for given in hooks]
    try:
        for given in hooks:  # setting None in the place of them leaves them on
            given.clear()
        yield
    finally:
        for given, items in zip(hooks, own, strict=True):
            given.update(items)


@contextlib.contextmanager
def _kept_values(named: Mapping[str, nn.Parameter]) -> Iterator[None]:
    before = [(p, p.detach().clone()) for p in named.values()]
    try:
        yield
    finally:
        for p, value in before:
            give_back(p, value)


def _move(named: Mapping[str, nn.Parameter]) -> None:
    with torch.no_grad():
        for p in named.values():
            if p.grad is None or p.grad.is_sparse or not p.numel():
                continue
            size, slope = float(p.norm()), float(p.grad.norm())
            if 0 < slope < math.inf:
                target = (size or math.sqrt(p.numel())) * _STEP_SIZE
                p.sub_(p.grad, alpha=target / slope)
