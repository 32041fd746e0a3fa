"""Tracing functions into ATen graphs with make_fx."""

from __future__ import annotations

import contextlib
import operator
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, fx

from gradrewrite._compat import factors, operators
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
        traced = make_fx(functional, decomposition_table=table)(*different.values())
        return _without_writes(traced, list(different.values()), table) if _writes(traced.graph) else traced


def _writes(graph: fx.Graph) -> bool:
    """Whether a graph writes in place, and has nothing that is refused: reads on the host, writes to attributes."""
    if any(node.target is torch.ops.aten._local_scalar_dense.default for node in graph.nodes):
        return False
    written = [n for node in graph.nodes if node.op == "call_function" for n in operators.written_by(node)]
    return bool(written) and all(operators.memory_of(node).op != "get_attr" for node in written)


def _without_writes(traced: fx.GraphModule, inputs: Sequence[Tensor], table: Any) -> fx.GraphModule:
    """Make a traced graph functional that still writes in place.

    Operators that are composed of others are decomposed below functionalization, and many of these work in place
    (``quantile``: ``ceil_``, ``lerp_``). Attributes are inputs meanwhile: writes to what is computed from them are
    made functional too.
    """
    nodes = [node for node in traced.graph.find_nodes(op="get_attr") if isinstance(_attribute(traced, node), Tensor)]
    attributes = {str(node.target): _attribute(traced, node) for node in nodes}

    def run(*values: Any) -> Any:
        return _WithAttributes(traced, dict(zip(attributes, values[len(inputs) :], strict=True))).run(
            *values[: len(inputs)]
        )

    functional = torch.func.functionalize(run, remove="mutations")
    given = [*inputs, *map(_another, attributes.values())]
    again = make_fx(functional, decomposition_table=table)(*given)
    placeholders = again.graph.find_nodes(op="placeholder")[len(inputs) :]
    for (name, value), placeholder in zip(attributes.items(), placeholders, strict=True):
        own = name if not hasattr(again, name) else f"{name}_"
        again.register_buffer(own, value, persistent=False)
        with again.graph.inserting_before(placeholder):
            node = again.graph.get_attr(own)
        node.meta = dict(placeholder.meta)
        placeholder.replace_all_uses_with(node)
        again.graph.erase_node(placeholder)
    again.recompile()
    return again


def _attribute(owner: fx.GraphModule, node: fx.Node) -> Any:
    return operator.attrgetter(str(node.target))(owner)


class _WithAttributes(fx.Interpreter):
    """Runs a graph with other values for some of its attributes."""

    def __init__(self, module: fx.GraphModule, values: dict[str, Any]) -> None:
        super().__init__(module)
        self._values = values

    def get_attr(self, target: Any, args: Any, kwargs: Any) -> Any:
        return self._values[target] if target in self._values else super().get_attr(target, args, kwargs)


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
