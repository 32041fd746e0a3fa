"""Recurrent layers of torch while Dynamo traces: their results without their time steps."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from gradrewrite._compat.versions import needed_for

with needed_for("an operator's Python kernels, which decompose it while it is traced, can be replaced"):
    from torch._C import DispatchKey

_KEYS = (DispatchKey.CompositeImplicitAutograd, DispatchKey.Autograd)
_OPS = ("lstm", "gru", "rnn_tanh", "rnn_relu")


@contextlib.contextmanager
def without_time_steps() -> Iterator[None]:
    """Give the results of recurrent layers by their shapes while Dynamo traces, on this thread.

    torch's decompositions run each time step, which takes long, and makes a symbolic length a number.
    """
    kernels = {
        getattr(getattr(torch.ops.aten, name), overload): _kernel(name, is_packed=overload == "data")
        for name in _OPS
        for overload in ("input", "data")
    }
    before = {op: {key: op.py_kernels[key] for key in _KEYS if key in op.py_kernels} for op in kernels}
    try:
        for op, kernel in kernels.items():
            op.py_kernels.update(dict.fromkeys(_KEYS, kernel))
            op._dispatch_cache.clear()
        yield
    finally:
        for op, known in before.items():
            for key in _KEYS:
                op.py_kernels.pop(key, None)
            op.py_kernels.update(known)
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
