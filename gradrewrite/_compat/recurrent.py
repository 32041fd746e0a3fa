"""Recurrent layers of torch while Dynamo traces: their results without their time steps."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping
from contextvars import ContextVar
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from gradrewrite._compat.versions import needed_for

with needed_for("an operator's Python kernels, which decompose it while it is traced, can be replaced"):
    from torch._C import DispatchKey

_KEYS = (DispatchKey.CompositeImplicitAutograd, DispatchKey.Autograd)
_OPS = ("lstm", "gru", "rnn_tanh", "rnn_relu")


_Kernels = Mapping[Any, Mapping[Any, Callable[..., Any]]]  # by operator and dispatch key
_plain_kernels: ContextVar[_Kernels | None] = ContextVar("gradrewrite_recurrent_kernels", default=None)


@contextlib.contextmanager
def without_time_steps() -> Iterator[None]:
    """Give the results of recurrent layers by their shapes while Dynamo traces, on this thread.

    torch's decompositions run each time step, which takes long, and makes a symbolic length a number.
    """
    kernels = {
        getattr(getattr(torch.ops.aten, name), overload): dict.fromkeys(
            _KEYS, _kernel(name, is_packed=overload == "data")
        )
        for name in _OPS
        for overload in ("input", "data")
    }
    with _replaced(kernels) as before:
        token = _plain_kernels.set(before)
        try:
            yield
        finally:
            _plain_kernels.reset(token)


@contextlib.contextmanager
def with_time_steps() -> Iterator[None]:
    """Trace the time steps of recurrent layers inside the block, within one of ``without_time_steps``."""
    before = _plain_kernels.get()
    with contextlib.nullcontext() if before is None else _replaced(before):
        yield


@contextlib.contextmanager
def _replaced(kernels: _Kernels) -> Iterator[_Kernels]:
    before = {op: {key: op.py_kernels[key] for key in _KEYS if key in op.py_kernels} for op in kernels}
    _put(kernels)
    try:
        yield before
    finally:
        _put(before)


def _put(kernels: _Kernels) -> None:
    for op, own in kernels.items():
        for key in _KEYS:
            op.py_kernels.pop(key, None)
        op.py_kernels.update(own)
        op._dispatch_cache.clear()


def _kernel(name: str, *, is_packed: bool) -> Callable[..., Any]:
    def run(*args: Any) -> Any:
        x, *rest = args
        states, parameters, *settings = rest[1:] if is_packed else rest
        states = list(states) if name == "lstm" else [states]
        num_directions = 2 if settings[4] else 1
        made = F.linear(x[..., :1, :], parameters[0])  # in the dtype that autocast gives it
        dtype = torch.promote_types(made.dtype, states[0].dtype) if name == "gru" else made.dtype
        zero = (sum(p.sum() for p in (*parameters, *states)) + made.sum()).to(dtype) * 0  # with a derivative
        output: Tensor = x.new_empty((*x.shape[:-1], states[0].shape[-1] * num_directions), dtype=dtype) + zero
        last = [state.new_empty(state.shape, dtype=dtype) + zero for state in states]
        return output, *last

    return run
