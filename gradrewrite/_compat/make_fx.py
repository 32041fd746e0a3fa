"""Tracing functions into ATen graphs with make_fx."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, fx

from gradrewrite._compat import factors
from gradrewrite._compat.fake_tensors import FakeTensor, fake_mode_of
from gradrewrite._compat.versions import needed_for

with needed_for("make_fx traces a function into ATen nodes, under a mode that can be asked for"):
    from torch.fx.experimental.proxy_tensor import get_proxy_mode, make_fx
with needed_for("a tensor of a transform of torch.func can be told from others"):
    from torch._C._functorch import is_functorch_wrapped_tensor
with needed_for("the code of a graph module may be generated when it is called"):
    from torch.fx._lazy_graph_module import _LazyGraphModule
with needed_for("calls of torch functions and operators can be watched"):
    from torch.overrides import TorchFunctionMode
    from torch.utils._python_dispatch import TorchDispatchMode


without_code = _LazyGraphModule  # a module for an interpreter: its code is generated if it is called


def is_tracing() -> bool:
    """Whether a proxy mode records operations on this thread."""
    return get_proxy_mode() is not None


def is_traced(tensor: Tensor) -> bool:
    """Whether a tensor was made while a function was traced."""
    return isinstance(tensor, FakeTensor) or is_functorch_wrapped_tensor(tensor)


def trace_parts(fn: Callable[..., Any], inputs: Sequence[Tensor]) -> fx.GraphModule:
    """Trace a function of DTensors into nodes on this process's plain tensors.

    These are neither decomposed nor functional; ``trace`` of the result is.
    """
    with _faking(inputs):
        return make_fx(fn)(*(_another(t) for t in inputs))


def trace(fn: Callable[..., Any], inputs: Sequence[Tensor]) -> fx.GraphModule:
    """Trace ``fn`` on fake tensors into decomposed, functional ATen nodes; real tensors become ``get_attr``.

    Factors (``alpha``, ``beta``, ``value``) become products.
    """
    with needed_for("Inductor's decompositions can be asked for"):
        from torch._inductor.decomposition import select_decomp_table

    with _faking(inputs):
        functional = torch.func.functionalize(fn, remove="mutations")
        different: dict[int, Tensor] = {}  # make_fx tells its inputs apart by identity
        for t in inputs:
            known = _another(t) if id(t) in different else t
            different[id(known)] = known
        table = {**select_decomp_table(), **factors.DECOMPOSITIONS}
        return make_fx(functional, decomposition_table=table)(*different.values())


@contextlib.contextmanager
def _faking(inputs: Sequence[Tensor]) -> Iterator[None]:
    mode = fake_mode_of(inputs)
    allowed, mode.allow_non_fake_inputs = mode.allow_non_fake_inputs, True
    try:
        with torch.no_grad(), mode:
            yield
    finally:
        mode.allow_non_fake_inputs = allowed


def _another(t: Tensor) -> Tensor:
    return torch.empty_strided(t.size(), t.stride(), dtype=t.dtype, device=t.device)


class RefuseToLeave(TorchFunctionMode):
    """Stops a function that would take a fake tensor's memory out of torch, or read a value on the host."""

    _LEAVING = frozenset(("numpy", "__array__", "__dlpack__", "data_ptr", "to_dlpack", "tolist"))
    _READING = frozenset(("item", "__bool__", "__float__", "__int__", "__index__", "__complex__"))

    def __init__(self, leaves: Exception, reads: Exception) -> None:
        super().__init__()
        self._errors = {**dict.fromkeys(self._LEAVING, leaves), **dict.fromkeys(self._READING, reads)}

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        error = self._errors.get(getattr(func, "__name__", ""))
        if error is not None and is_tracing():  # a schedule reads its tensors outside of the trace
            raise error
        return func(*args, **(kwargs or {}))


class RefuseToChangeReal(TorchDispatchMode):
    """Stops an operation that would change a real tensor while a function is traced on fake ones."""

    def __init__(self, error: Exception) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._error = error

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        named = dict(zip((a.name for a in func._schema.arguments), args, strict=False)) | (kwargs or {})
        for argument in func._schema.arguments:
            written = argument.alias_info is not None and argument.alias_info.is_write
            value = named.get(argument.name)
            if written and isinstance(value, Tensor) and not isinstance(value, FakeTensor):
                raise self._error
        return func(*args, **(kwargs or {}))
