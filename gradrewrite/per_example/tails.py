"""Tails of gradients: the nodes that add up what the examples contribute, and the terms before they are added up.

A gradient that is a sum over examples has a tail: the sums before it, back to its frontier, the ops that contract the
batch (matrix products, sums, backwards of convolutions, embeddings and norm layers). The tail is linear in the terms of
the examples, so the same nodes on a batch of one compute the term of that one.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, fx

from gradrewrite._compat import fake_tensors, operators
from gradrewrite.ir import ops
from gradrewrite.per_example.layouts import Batch, Size, Sum, unflatten
from gradrewrite.per_example.op_calls import Layouts, is_selection, size_of

_aten = torch.ops.aten
TensorsFunction = Callable[..., Tensor]
Operand = tuple[fx.Node, Batch | None]  # an input of a tail, and where its examples are


@dataclass(frozen=True, slots=True, eq=False)
class Tail:
    """The tail of one gradient.

    Attributes:
        gradient: The node of the gradient.
        nodes: Its nodes in the order of execution, the gradient last.
        splits: For each node of the frontier, where its arguments have the examples.
        operands: What its nodes read from outside.
    """

    gradient: fx.Node
    nodes: tuple[fx.Node, ...]
    splits: Mapping[fx.Node, Mapping[fx.Node, Batch]]
    operands: tuple[Operand, ...]

    def operand(self, node: fx.Node, argument: fx.Node) -> Operand:
        """Return what an argument of one of its nodes is among the operands."""
        return argument, self.splits.get(node, {}).get(argument)


def find_tail(
    gradient: fx.Node, layouts: Mapping[fx.Node, Layouts], splits: Mapping[fx.Node, Mapping[fx.Node, Batch]]
) -> Tail:
    """Return the tail of a gradient that is a sum over examples."""
    todo, seen = [gradient], set[fx.Node]()
    while todo:
        node = todo.pop()
        if node in seen:
            continue
        seen.add(node)
        todo += [a for a in node.all_input_nodes if layouts[a] == Sum() or (is_selection(node) and a in splits)]
    nodes = tuple(node for node in gradient.graph.nodes if node in seen)
    own = {node: splits[node] for node in nodes if node in splits}
    pairs = [(node, a) for node in nodes for a in node.all_input_nodes if a not in seen and _is_tensor(a)]
    operands = dict.fromkeys((a, own.get(node, {}).get(a)) for node, a in pairs)
    return Tail(gradient, nodes, own, tuple(operands))


def terms_of(tail: Tail, num_examples: Size) -> tuple[list[fx.Node], TensorsFunction]:
    """Return how to compute the terms of all examples.

    Args:
        tail: The tail of a gradient of shape ``[*P]``.
        num_examples: B.

    Returns:
        Nodes, and a function of their tensors that returns the terms, ``[B, *P]``.
    """
    nodes = list(dict.fromkeys(node for node, _ in tail.operands))
    puts = [node for node in tail.nodes if node.target in _BASES]

    def run(*tensors: Tensor) -> Tensor:
        given = dict(zip(nodes, tensors, strict=True))
        split = [
            given[node] if layout is None else unflatten(given[node], layout, num_examples)
            for node, layout in tail.operands
        ]
        # Each example has memory of its own: Inductor accumulates those of an expanded tensor in one (2.13, CPU).
        bases = [split[0].new_zeros((num_examples, *size_of(node)), dtype=node.meta["val"].dtype) for node in puts]
        dims = [None if layout is None else 0 for _, layout in tail.operands] + [0] * len(bases)

        def one(*values: Tensor) -> Tensor:
            own = dict(zip(puts, values[len(split) :], strict=True))
            return _run_on_one(tail, values[: len(split)], own, num_examples)

        terms: Tensor = torch.func.vmap(one, in_dims=tuple(dims))(*split, *bases)
        return terms

    return nodes, run


def _run_on_one(tail: Tail, operands: Sequence[Tensor], bases: Mapping[fx.Node, Tensor], num_examples: Size) -> Tensor:
    """Run the tail on one example."""
    given = dict(zip(tail.operands, operands, strict=True))
    found: dict[fx.Node, Any] = {}
    for node in tail.nodes:

        def value(argument: fx.Node, node: fx.Node = node) -> Any:
            if not _is_tensor(argument):  # a size
                return found.get(argument, fake_tensors.as_number(argument.meta["val"]))
            return found[argument] if argument in found else given[tail.operand(node, argument)]

        rule = _ON_ONE.get(node.target)
        if rule is not None:
            named = dict(fx.map_arg(operators.arguments_of(node), value))
            if "output_mask" in named:  # what other parameters need is in their tails
                read = {user.args[1] for user in node.users if user in tail.nodes}
                named["output_mask"] = [n in read for n in range(len(named["output_mask"]))]
            found[node] = rule(named, bases.get(node), node)
        else:
            args, kwargs = fx.map_arg((node.args, node.kwargs), value)
            assert callable(node.target)
            found[node] = node.target(*args, **kwargs)
        if node.target in _MEANS and node in tail.splits:  # which divided by the number of elements of one example
            found[node] = found[node] / num_examples
    result = found[tail.gradient]
    assert isinstance(result, Tensor)
    return result


def _is_tensor(node: fx.Node) -> bool:
    """Whether the result of a node is a tensor, or several: not a size."""
    return isinstance(node.meta["val"], Tensor | tuple | list)


def _first(named: Mapping[str, Any], _: Any, __: fx.Node) -> Any:
    return next(iter(named.values()))


def _cast(named: Mapping[str, Any], _: Any, node: fx.Node) -> Tensor:
    result: Tensor = _first(named, _, node).to(node.meta["val"].dtype)
    return result


def _convolution(named: Mapping[str, Any], _: Any, __: fx.Node) -> Any:
    return _aten.convolution_backward.default(*named.values())


def _put(named: Mapping[str, Any], base: Tensor | None, _: fx.Node) -> Tensor:
    assert base is not None
    values, indices = named["values"], list(named["indices"])
    if "mask" in named:
        values = torch.where(named["mask"], values, 0)
        indices = [None if i is None else torch.where(i < 0, 0, i) for i in indices]
    result: Tensor = _aten.index_put.default(base, indices, values, True)
    return result


def _embedding(named: Mapping[str, Any], base: Tensor | None, _: fx.Node) -> Tensor:
    assert base is not None
    words, errors = named["indices"], named["grad_output"]
    kept = torch.where((words == named["padding_idx"]).unsqueeze(-1), 0, errors)
    result: Tensor = _aten.index_put.default(base, [words], kept, True)
    return result


def _layer_norm(named: Mapping[str, Any], _: Any, node: fx.Node) -> tuple[Tensor | None, ...]:
    error, mean = named["grad_out"], named.get("mean", 0)
    dims = list(range(error.dim() - len(named["normalized_shape"])))
    return None, (error * (named["input"] - mean) * named["rstd"]).sum(dims), error.sum(dims)


def _group_norm(named: Mapping[str, Any], _: Any, __: fx.Node) -> tuple[Tensor | None, ...]:
    error, values, groups = named["grad_out"], named["input"], int(named["group"])
    size = (values.shape[0], groups, -1)
    normal = (values.reshape(size) - named["mean"].unsqueeze(-1)) * named["rstd"].unsqueeze(-1)
    dims = [d for d in range(error.dim()) if d != 1]
    return None, (error * normal.reshape(values.shape)).sum(dims), error.sum(dims)


def _batch_norm(named: Mapping[str, Any], _: Any, __: fx.Node) -> tuple[Tensor | None, ...]:
    error, values = named["grad_out"], named["input"]
    size = [-1 if d == 1 else 1 for d in range(error.dim())]
    scale = (named["running_var"] + named["eps"]).rsqrt().reshape(size)
    dims = [d for d in range(error.dim()) if d != 1]
    return None, (error * (values - named["running_mean"].reshape(size)) * scale).sum(dims), error.sum(dims)


_MEANS = frozenset(operators.overloads(("mean",)))
_PUTS = frozenset(operators.overloads(("index_put", "_unsafe_index_put", "_unsafe_masked_index_put_accumulate")))
_EMBEDDINGS = frozenset(operators.overloads(("embedding_dense_backward",)))
_BASES = _PUTS | _EMBEDDINGS
# Ops whose arguments say how many examples there are, that give more than is needed, or that vmap does not know.
_ON_ONE: dict[Any, Callable[[Mapping[str, Any], Tensor | None, fx.Node], Any]] = {
    ops.mark_error: _first,
    torch.ops.prims.convert_element_type.default: _cast,
    _aten.convolution_backward.default: _convolution,
    _aten.native_layer_norm_backward.default: _layer_norm,
    _aten._fused_rms_norm_backward.default: _layer_norm,
    _aten.native_group_norm_backward.default: _group_norm,
    _aten.native_batch_norm_backward.default: _batch_norm,
    **dict.fromkeys(_PUTS, _put),
    **dict.fromkeys(_EMBEDDINGS, _embedding),
}
