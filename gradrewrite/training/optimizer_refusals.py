"""Reasons to keep an optimizer out of a compiled step."""

from __future__ import annotations

import inspect
import linecache
import traceback
from collections.abc import Sequence
from pathlib import Path

import torch
from torch import Tensor
from torch.optim import Optimizer

from gradrewrite._compat import fake_tensors, optimizers, traced_numbers
from gradrewrite.errors import TraceError
from gradrewrite.training.shadows import numbered

TWO_PHASES = "Update in two phases: loss.backward(); optimizer.step(); optimizer.zero_grad()"
_TORCH = str(Path(torch.__file__).parent)
_OPTIM = str(Path(torch.optim.__file__).parent)
_OWN = str(Path(__file__).parents[1])


def refusal(optimizer: Optimizer, what: str, line: str = "") -> TraceError:
    """Return the error for an optimizer without a graph."""
    lines = [f"{type(optimizer).__name__} cannot be part of a compiled training step: {what}"]
    lines += [f"  {line}"] if line else []
    return TraceError("\n".join([*lines, f"  {TWO_PHASES}"]), code="optimizer-not-traced")


def refusal_of(optimizer: Optimizer, err: Exception) -> TraceError:
    """Return the error for one raised by its code."""
    known = isinstance(err, traced_numbers.HostReadError)
    what = str(err) if known else f"its step raised {type(err).__name__}: {str(err).strip().partition(chr(10))[0]}"
    return refusal(optimizer, what, line_of(err))


def line_of(err: BaseException) -> str:
    """Return the innermost line of an optimizer; ``""`` without one.

    It reads ``file:line "code"``.
    """
    for frame in reversed(traceback.extract_tb(err.__traceback__)):
        name = frame.filename
        is_own = name.startswith(_OWN) or (name.startswith(_TORCH) and not name.startswith(_OPTIM))
        if not is_own and not name.endswith(("contextlib.py", "functools.py")) and not name.startswith("<"):
            return f'{name}:{frame.lineno} "{linecache.getline(name, frame.lineno or 0).strip()}"'
    return ""


def check_by_name(optimizer: Optimizer) -> None:
    """Raise TraceError for known obstacles; nothing is run."""
    what = _known_kind(optimizer) or _known_part(optimizer)
    if what:
        raise refusal(optimizer, what)
    for _, _, parameter in numbered(optimizer):
        if fake_tensors.is_wrapper(parameter):
            raise refusal(optimizer, f"a parameter is a {type(parameter).__name__}, which has tensors inside")
    keys = {id(p) for _, _, p in numbered(optimizer)}
    for key, state in optimizer.state.items():
        if id(key) not in keys:
            raise refusal(optimizer, f"its state has the entry {key!r}, which belongs to none of its parameters")
        check_state(optimizer, state)


def _known_kind(optimizer: Optimizer) -> str:
    kind = type(optimizer)
    step = inspect.unwrap(kind.step)
    closure = list(inspect.signature(step).parameters.values())[1:2]
    if any(base.__module__.partition(".")[0] == "bitsandbytes" for base in kind.__mro__):
        return "bitsandbytes updates by kernels of its own, which have no graph of operators"
    if isinstance(optimizer, torch.optim.SparseAdam):
        return "it takes sparse gradients alone"
    if closure and closure[0].default is inspect.Parameter.empty:
        return f"its step needs a {closure[0].name}: it computes the loss several times in one step"
    return ""


def _known_part(optimizer: Optimizer) -> str:
    if optimizers.has_step_hooks(optimizer):
        return "it has hooks around its step (register_step_pre_hook, register_step_post_hook), which no graph calls"
    inner = [name for name, value in vars(optimizer).items() if isinstance(value, Optimizer)]
    return f"it has another optimizer inside (.{inner[0]})" if inner else ""


def check_state(optimizer: Optimizer, state: object) -> None:
    """Raise TraceError for packed or nested tensors of state."""
    if not isinstance(state, dict):
        raise refusal(optimizer, f"the state of a parameter is a {type(state).__name__} in the place of a dict")
    for key, value in state.items():
        if isinstance(value, list | tuple | dict | set) and _has_tensors(value):
            raise refusal(optimizer, f"its state {key!r} is a {type(value).__name__} with tensors inside")
        if isinstance(value, Tensor) and value.dtype in (torch.uint8, torch.int8) and value.dim():
            raise refusal(optimizer, f"its state {key!r} is {value.dtype}: it is packed, by kernels without a graph")


def _has_tensors(value: object) -> bool:
    if isinstance(value, dict):
        return any(map(_has_tensors, value.values()))
    return isinstance(value, Tensor) or (isinstance(value, list | tuple | set) and any(map(_has_tensors, value)))


def check_gradients(optimizer: Optimizer, gradients: Sequence[Tensor | None]) -> None:
    """Raise TraceError for sparse gradients.

    ValueError for another number of them than of parameters.
    """
    parameters = [p for _, _, p in numbered(optimizer)]
    if len(parameters) != len(gradients):
        raise ValueError(f"{len(gradients)} gradients for {len(parameters)} parameters of the optimizer")
    for parameter, gradient in zip(parameters, gradients, strict=True):
        if gradient is not None and gradient.layout is not torch.strided:
            raise refusal(
                optimizer, f"a gradient is sparse ({gradient.layout}), of a parameter of {list(parameter.shape)}"
            )
