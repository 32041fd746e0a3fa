"""Return values of module calls and of frames, read from Dynamo's variables."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from torch import Tensor

from gradrewrite._compat import dynamo
from gradrewrite._compat.versions import needed_for

with needed_for("Dynamo represents what the traced program computes by variables"):
    from torch._dynamo.variables import LazyVariableTracker, TensorVariable
    from torch._dynamo.variables.base import VariableTracker
with needed_for("Dynamo traces a call of a module by a method, inside of an entry of the stack of modules"):
    from torch._dynamo.variables import nn_module as traced_modules
    from torch._dynamo.variables.nn_module import UnspecializedNNModuleVariable


@contextlib.contextmanager
def returns_noted(note: Callable[..., None]) -> Iterator[None]:
    """Insert a note of the returned tensors behind each module call; no other thread may trace meanwhile.

    ``note`` takes the key and the path of the call in ``nn_module_stack``, then the tensors that were made in the graph
    of the call. It does nothing, and is allowed in graphs.
    """
    open_calls: list[tuple[str, str] | None] = []
    plain_call = UnspecializedNNModuleVariable.call_function
    plain_record = traced_modules.record_nn_module_stack

    @contextlib.contextmanager
    def record(key: str, source: Any, tx: Any, module: Any) -> Iterator[None]:
        with plain_record(key, source, tx, module):
            if open_calls and open_calls[-1] is None:
                key, (path, _) = list(tx.nn_module_stack.items())[-1]
                open_calls[-1] = key, path
            yield

    def call_function(self: Any, tx: Any, args: Any, kwargs: Any) -> Any:
        open_calls.append(None)
        try:
            returned = plain_call(self, tx, args, kwargs)
            call = open_calls[-1]
        finally:
            open_calls.pop()
        if call is not None:
            tracer = tx.output.current_tracer
            proxies = [p for _, v in _tensors_of([returned], tx) if (p := v.as_proxy()).tracer is tracer]
            tx.output.create_proxy("call_function", note, (*call, *proxies), {})
        return returned

    UnspecializedNNModuleVariable.call_function = call_function  # type: ignore[method-assign]
    traced_modules.record_nn_module_stack = record  # type: ignore[assignment]
    try:
        yield
    finally:
        UnspecializedNNModuleVariable.call_function = plain_call  # type: ignore[method-assign]
        traced_modules.record_nn_module_stack = plain_record


def returned_tensors() -> list[tuple[str, Tensor]] | None:
    """Return the fake tensors of the compiled frame's return value; None where the backend was called by hand.

    Each has its path: keys of mappings, names of attributes and positions, as in ``terms.energy`` or ``1``. At a graph
    break those are the ones on its stack and in its locals. Outputs of the graph that are not among them are side
    effects: values that the program stored.
    """
    tx = dynamo.translator()
    if tx is None:
        return None
    given: list[Any] = list(tx.stack)
    if tx.output.compile_subgraph_reason is None or tx.output.compile_subgraph_reason.graph_break:
        given += tx.symbolic_locals.values()
    nodes = [(path, variable.as_proxy().node) for path, variable in _tensors_of(given, tx)]
    return [(path, value) for path, node in nodes if isinstance(value := node.meta.get("example_value"), Tensor)]


def _tensors_of(values: Sequence[Any], tx: Any) -> list[tuple[str, Any]]:
    """Return the tensor variables in nested containers and objects, with their paths; modules are not entered."""
    found: list[tuple[str, Any]] = []
    seen: dict[int, Any] = {}

    def visit(item: Any, path: tuple[str, ...]) -> None:
        if id(item) in seen:
            return
        seen[id(item)] = item
        if isinstance(item, VariableTracker):
            if isinstance(item, LazyVariableTracker) and not item.is_realized():
                return  # not read yet; to look into it would add an input to a graph that is finished
            item = item.unwrap()
        if isinstance(item, TensorVariable):
            found.append((".".join(path), item))
        else:
            for name, inner in _parts_of(item, tx):
                visit(inner, (*path, *name))

    for value in values:
        visit(value, ())
    return found


def _parts_of(item: Any, tx: Any) -> list[tuple[tuple[str, ...], Any]]:
    """Return the parts of a container or an object, with their names in paths."""
    if isinstance(item, dict):
        return [(_name_of(key), inner) for key, inner in item.items()]
    if isinstance(item, (list, tuple)):
        return [((str(number),), inner) for number, inner in enumerate(item)]
    if not isinstance(item, VariableTracker) or isinstance(item, UnspecializedNNModuleVariable):
        return []
    attributes = tx.output.side_effects.store_attr_mutations.get(item, {})  # before arguments, which have no names
    return [((), attributes), *(((), part) for name, part in vars(item).items() if name not in item._nonvar_fields)]


def _name_of(key: Any) -> tuple[str, ...]:
    """Return the name of an attribute, or the key of a mapping; nothing for another object."""
    variable = getattr(key, "vt", None)  # of a key that Dynamo has wrapped, in a class whose module differs by version
    if isinstance(variable, VariableTracker):
        key = variable.as_python_constant() if variable.is_python_constant() else None
    return (str(key),) if isinstance(key, (str, int)) else ()
