"""Operators of ``torch.ops``: schemas, tags, running one node."""

from __future__ import annotations

import operator
from collections.abc import Callable, Sequence
from typing import Any, cast

import torch
from torch import Tensor, fx

from gradrewrite._compat.dynamo_cache import compiling
from gradrewrite._compat.versions import needed_for

with needed_for("the operators of a graph are overloads"):
    from torch._ops import HigherOrderOperator
    from torch._ops import OpOverload as OpOverload
with needed_for("a partitioned graph draws random numbers again from a state that its forward has saved"):
    from torch._prims.rng_prims import run_and_save_rng_state
with needed_for("calls of operators can be watched"):
    from torch.utils._python_dispatch import TorchDispatchMode


def is_higher_order(target: object) -> bool:
    """Whether an operator takes functions."""
    return isinstance(target, HigherOrderOperator)


def is_random(node: fx.Node) -> bool:
    """Whether a node draws random numbers."""
    return isinstance(node.target, OpOverload) and torch.Tag.nondeterministic_seeded in node.target.tags


def random_states(nodes: Sequence[fx.Node]) -> list[fx.Node]:
    """Return the states of random number generators among nodes."""
    found = [n for n in nodes if n.target is operator.getitem and isinstance(n.args[0], fx.Node)]
    return [n for n in found if n.args[0].target is run_and_save_rng_state and n.args[1] == 0]  # type: ignore[union-attr]


def takes_random_state(placeholder: fx.Node) -> bool:
    """Whether the partitioner has added the input for such a state; the order is that of the states."""
    return placeholder.name.startswith("rng_state_output_")


class RandomNoted(TorchDispatchMode):
    """Notes whether an operator draws random numbers."""

    is_random: bool = False

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if torch.Tag.nondeterministic_seeded in func.tags:
            given = dict(zip((a.name for a in func._schema.arguments), args, strict=False)) | (kwargs or {})
            # Attention without dropout draws nothing.
            takes_dropout = any(a.name == "dropout_p" for a in func._schema.arguments)
            self.is_random |= not takes_dropout or given.get("dropout_p", 0.0) != 0
        return func(*args, **(kwargs or {}))


def draws_numbers(node: fx.Node) -> bool:
    """Whether a node draws random numbers with these arguments: attention without dropout does not."""
    return is_random(node) and arguments_of(node).get("dropout_p") != 0


def run_node(node: fx.Node, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Run a node of an ATen graph on real values; arguments that it writes to are copied, views have any strides."""
    target = node.target
    if target is torch.ops.prims.inductor_seeds.default:
        limits = torch.iinfo(torch.int64)  # as compiled code draws them
        return torch.randint(limits.min, limits.max, [args[0]], dtype=torch.int64, device=args[1])
    if target is torch.ops.prims.inductor_random.default:
        return _inductor_random(args, kwargs)
    if isinstance(target, OpOverload) and target._schema.is_mutable:
        args = tuple(
            a.clone() if isinstance(a, Tensor) and s.alias_info is not None and s.alias_info.is_write else a
            for a, s in zip(args, target._schema.arguments, strict=False)
        )
    return cast(Callable[..., Any], with_any_strides(target))(*args, **kwargs)


def with_any_strides(target: Any) -> Any:
    """Return ``reshape`` in place of a view, any other operator unchanged.

    A meta function may predict other strides than its kernel gives (``softplus_backward``, as of torch 2.13), and
    code that was traced by it then has views that memory does not allow.
    """
    views = (torch.ops.aten.view.default, torch.ops.aten._unsafe_view.default)
    return torch.ops.aten.reshape.default if target in views else target


def nodes_that_matter(node: fx.Node) -> list[fx.Node]:
    """Return the inputs of a result: batch normalization reads running statistics in evaluation alone."""
    if isinstance(node.target, OpOverload):
        arguments = [a.name for a in node.target._schema.arguments]
        given = dict(zip(arguments, node.args, strict=False)) | node.kwargs
        if given.get("training") is True or given.get("train") is True:
            return [a for name, a in given.items() if isinstance(a, fx.Node) and not name.startswith("running_")]
    return node.all_input_nodes


def _inductor_random(args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Random numbers as compiled code draws them: its generator exists only there."""
    with needed_for("Inductor can be called with a compiler of ours around its own"):
        from torch._inductor.compile_fx import compile_fx

    size, seed, mode = args
    graph, random = fx.Graph(), torch.ops.prims.inductor_random.default
    graph.output((graph.call_function(random, (list(size), graph.placeholder("seed"), mode), kwargs),))
    with compiling(), torch.no_grad():  # a replay runs outside of Dynamo
        run = cast(Callable[..., Any], compile_fx(fx.GraphModule({}, graph), [seed]))
        return run(seed)[0]


def schema_of(target: Any) -> Any:
    """The schema of an operator of ``torch.ops`` with one overload; None for anything else."""
    if isinstance(target, torch._ops.OpOverloadPacket) and len(target.overloads()) == 1:
        target = getattr(target, target.overloads()[0])
    return target._schema if isinstance(target, OpOverload) else None


def name_of(node: fx.Node) -> str:
    """Name of the op that a node calls, without namespace and overload."""
    if isinstance(node.target, OpOverload):
        return str(node.target._schema.name.partition("::")[2])
    return str(getattr(node.target, "__name__", node.target))


def arguments_of(node: fx.Node) -> dict[str, Any]:
    """Return all arguments of a node that calls an operator, defaults included, by the names in its schema."""
    schema = schema_of(node.target)
    if schema is None:
        return {str(n): a for n, a in enumerate(node.args)} | dict(node.kwargs)
    given = dict(zip((a.name for a in schema.arguments), node.args, strict=False)) | dict(node.kwargs)
    return {a.name: given.get(a.name, a.default_value) for a in schema.arguments}


def written_by(node: fx.Node) -> list[fx.Node]:
    """Return the arguments that a node writes to, by the schema of its operator."""
    schema, given = schema_of(node.target), arguments_of(node)
    aliases = [] if schema is None else [(a.name, a.alias_info) for a in schema.arguments]
    written = [given[name] for name, alias in aliases if alias is not None and alias.is_write]
    return [n for value in written for n in (value if isinstance(value, list | tuple) else [value])]


def memory_of(node: fx.Node) -> fx.Node:
    """Return the node that made the memory of a node's result, behind views and operators that write in place."""
    while node.op == "call_function" and (schema := schema_of(node.target)) is not None:
        shared = [a.name for a in schema.arguments if a.alias_info is not None]
        source = arguments_of(node)[shared[0]] if shared else None
        if not isinstance(source, fx.Node) or not any(r.alias_info is not None for r in schema.returns):
            break
        node = source
    return node


def is_pointwise(node: fx.Node) -> bool:
    """Whether an operator computes each element of its result from the elements at the same place."""
    return isinstance(node.target, OpOverload) and torch.Tag.pointwise in node.target.tags


def overloads(names: Sequence[str], namespace: str = "aten") -> list[Any]:
    """Return all overloads of operators by their names; of those that this torch has."""
    operators = getattr(torch.ops, namespace)
    packets = [getattr(operators, name) for name in names if hasattr(operators, name)]
    return [getattr(packet, overload) for packet in packets for overload in packet.overloads()]
