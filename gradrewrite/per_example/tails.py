"""Tails of gradients: the summing nodes, and the examples' terms before them.

A gradient that is a sum over examples has a tail: the sums before it, back to its frontier, the ops that contract the
batch (matrix products, sums, backwards of convolutions, embeddings and norm layers). The tail is linear in the terms of
the examples, so the same nodes on a batch of one compute the term of that one. They run node by node on all examples at
once: under ``vmap``, but for the ops whose rule there reads sizes as numbers (2.13), which would fix a symbolic batch.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, fx

from gradrewrite._compat import fake_tensors, operators
from gradrewrite.ir import markers
from gradrewrite.per_example.layouts import Batch, MixesExamplesError, Size, Sum, unflatten
from gradrewrite.per_example.op_calls import PUTS, Layouts, is_selection, kept_dims, size_of

_aten = torch.ops.aten
_prims = torch.ops.prims
FunctionOfNodes = tuple[list[fx.Node], Callable[..., Tensor]]  # nodes, and a function of their tensors
Operand = tuple[fx.Node, Batch | None]  # an input of a tail, and where its examples are


@dataclass(frozen=True, slots=True, eq=False)
class Tail:
    """The tail of one gradient."""

    gradient: fx.Node
    nodes: tuple[fx.Node, ...]  # in the order of execution, the gradient last
    # for each node of the frontier, where its arguments have the examples
    splits: Mapping[fx.Node, Mapping[fx.Node, Batch]]
    operands: tuple[Operand, ...]  # what its nodes read from outside

    def operand(self, node: fx.Node, argument: fx.Node) -> Operand:
        """Return the operand of an argument of one of its nodes."""
        return argument, self.splits.get(node, {}).get(argument)


def find_tail(
    gradient: fx.Node, layouts: Mapping[fx.Node, Layouts], splits: Mapping[fx.Node, Mapping[fx.Node, Batch]]
) -> Tail:
    """Return the tail of a gradient that is a sum over examples.

    MixesExamplesError if a node of it adds up over examples, and its terms are not known: the value of a loss.
    """
    todo, seen = [gradient], set[fx.Node]()
    while todo:
        node = todo.pop()
        if node in seen:
            continue
        seen.add(node)
        todo += [a for a in node.all_input_nodes if layouts[a] == Sum() or is_selection(node)]
    nodes = tuple(node for node in gradient.graph.nodes if node in seen)
    for node in nodes:
        if node not in splits and not any(a in seen for a in node.all_input_nodes):
            raise MixesExamplesError(
                f"its terms go through {operators.name_of(node)}, whose value is known as a sum only"
            )
    own = {node: splits[node] for node in nodes if node in splits}
    pairs = [(node, a) for node in nodes for a in node.all_input_nodes if a not in seen and _is_tensor(a)]
    operands = dict.fromkeys((a, own.get(node, {}).get(a)) for node, a in pairs)
    return Tail(gradient, nodes, own, tuple(operands))


def terms_of(tail: Tail, num_examples: Size) -> FunctionOfNodes:
    """Return how to compute the terms ``[B, *P]`` of all examples from the operands of a tail."""
    nodes = list(dict.fromkeys(node for node, _ in tail.operands))

    def run(*tensors: Tensor) -> Tensor:
        given = dict(zip(nodes, tensors, strict=True))
        terms = _Terms(tail, num_examples)
        for node, layout in tail.operands:
            value = given[node]
            terms.operands[node, layout] = value if layout is None else unflatten(value, layout, num_examples)
        for node in tail.nodes:
            terms.found[node] = terms.at(node)
        result = terms.found[tail.gradient]
        assert isinstance(result, Tensor)
        return result

    return nodes, run


class _Terms:
    def __init__(self, tail: Tail, num_examples: Size) -> None:
        self.tail, self.num_examples = tail, num_examples
        self.operands: dict[Operand, Any] = {}  # ``[B, ...]``, or the same for all examples
        self.found: dict[fx.Node, Any] = {}  # ``[B, ...]``

    def at(self, node: fx.Node) -> Any:
        """Return the terms at one node, those before it being known."""
        if node.target in _ON_ALL:
            found = _ON_ALL[node.target](self._named(node, self._value), node)
        elif node.target in _ALONG:
            found = self._along(node)
        else:
            found = self._one_by_one(node)
        if node.target in _MEANS and node in self.tail.splits:  # which divided by the number of elements of one example
            found = found / self.num_examples
        return found

    def _value(self, node: fx.Node, argument: fx.Node) -> Any:
        if not _is_tensor(argument):  # a size
            return fake_tensors.as_number(argument.meta["val"])
        if argument in self.found:
            return self.found[argument]
        return self.operands[self.tail.operand(node, argument)]

    def _is_split(self, node: fx.Node, argument: fx.Node) -> bool:
        """Whether the value of an argument has the examples in dimension 0."""
        return argument in self.found or self.tail.operand(node, argument)[1] is not None

    def _named(self, node: fx.Node, value: Callable[[fx.Node, fx.Node], Any]) -> dict[str, Any]:
        return dict(fx.map_arg(operators.arguments_of(node), lambda argument: value(node, argument)))

    def _along(self, node: fx.Node) -> Any:
        """Run an op along dimensions on all examples, one more dimension in front."""
        given = operators.arguments_of(node)
        list_of_rows = given.get("index") if node.target in _ALONG_LISTS else None

        def in_front(node: fx.Node, argument: fx.Node) -> Any:
            value = self._value(node, argument)
            if not _is_tensor(argument) or argument is list_of_rows or self._is_split(node, argument):
                return value
            return value.expand(self.num_examples, *value.shape)

        named, rank = self._named(node, in_front), node.meta["val"].dim()
        for name in ("dim", "dims"):
            if name in named:
                dims = named[name]
                named[name] = dims % rank + 1 if isinstance(dims, int) else [d % rank + 1 for d in dims]
        if "input_sizes" in named:
            named["input_sizes"] = [self.num_examples, *named["input_sizes"]]
        assert callable(node.target)
        return node.target(**named)

    def _one_by_one(self, node: fx.Node) -> Any:
        inputs = [argument for argument in node.all_input_nodes if _is_tensor(argument)]
        values = [self._value(node, argument) for argument in inputs]
        dims = [0 if self._is_split(node, argument) else None for argument in inputs]
        if node.target in PUTS | _EMBEDDINGS | _BAGS:
            # Each example has memory of its own: Inductor accumulates those of an expanded tensor in one (2.13, CPU).
            like = node.meta["val"]
            values.append(values[0].new_zeros((self.num_examples, *size_of(node)), dtype=like.dtype))
            dims.append(0)

        def one(*own: Tensor) -> Any:
            given = dict(zip(inputs, own[: len(inputs)], strict=True))

            def value(node: fx.Node, argument: fx.Node) -> Any:
                return given[argument] if argument in given else self._value(node, argument)

            if node.target in _ON_ONE:
                return _ON_ONE[node.target](self._named(node, value), *own[len(inputs) :])
            args, kwargs = fx.map_arg((node.args, node.kwargs), lambda argument: value(node, argument))
            assert callable(node.target)
            return node.target(*args, **kwargs)

        return torch.func.vmap(one, in_dims=tuple(dims))(*values)


def _is_tensor(node: fx.Node) -> bool:
    """Whether the result of a node is a tensor, or several: not a size."""
    return isinstance(node.meta["val"], Tensor | tuple | list)


def _first(named: Mapping[str, Any], _: fx.Node) -> Any:
    return next(iter(named.values()))


def _select(named: Mapping[str, Any], _: fx.Node) -> Any:
    whole, index = named.values()
    return whole[index]


def _cast(named: Mapping[str, Any], node: fx.Node) -> Tensor:
    result: Tensor = _first(named, node).to(node.meta["val"].dtype)
    return result


def _convolution(named: Mapping[str, Any], node: fx.Node) -> tuple[Tensor | None, ...]:
    """Return the terms of a convolution's weight and bias; unread ones are removed later."""
    errors, values, size = named["grad_output"], named["input"], size_of(operators.arguments_of(node)["weight"])
    # Inductor (2.13) fixes the number of groups.
    is_symbolic = isinstance(fake_tensors.as_number(errors.shape[0]), torch.SymInt) and len(size) <= 4
    terms = (_product_of_columns if is_symbolic else _grouped_convolution)(errors, values, size, named)
    return None, terms, errors.sum([1, *range(3, errors.dim())])


def _grouped_convolution(errors: Tensor, values: Tensor, size: Sequence[Any], named: Mapping[str, Any]) -> Tensor:
    """One convolution with the examples as further groups."""
    number = errors.shape[0]
    wide = [tensor.transpose(0, 1).flatten(1, 2) for tensor in (errors, values)]
    weight = values.new_empty(()).expand(number * size[0], *size[1:])  # only its sizes are read
    names = ("stride", "padding", "dilation", "transposed", "output_padding")
    settings = [*(named[name] for name in names), named["groups"] * number, [False, True, False]]
    _, found, _ = _aten.convolution_backward.default(*wide, weight, None, *settings)
    terms: Tensor = found.unflatten(0, (number, size[0]))
    return terms


def _product_of_columns(errors: Tensor, values: Tensor, size: Sequence[Any], named: Mapping[str, Any]) -> Tensor:
    """Multiply with windows of the kernel as columns, larger than the images by the number of its elements."""
    rows, moved = (values, errors) if named["transposed"] else (errors, values)
    kernel = list(size[2:])
    settings = [kernel, *(list(named[name]) for name in ("dilation", "padding", "stride"))]
    images = moved.flatten(0, 1)
    if len(kernel) == 1:
        images = images.unsqueeze(2)
        settings = [[least, *setting] for least, setting in zip((1, 1, 0, 1), settings, strict=True)]
    columns = _aten.im2col.default(images, *settings)
    left, right = (t.unflatten(1, (named["groups"], -1)) for t in (rows.flatten(0, 1).flatten(2), columns))
    products = left @ right.transpose(-1, -2)  # [B * n, groups, ...]
    terms: Tensor = products.unflatten(0, rows.shape[:2]).sum(1).reshape(rows.shape[0], *size)
    return terms


def _layer_norm(named: Mapping[str, Any], _: fx.Node) -> tuple[Tensor | None, ...]:
    error, mean = named["grad_out"], named.get("mean", 0)
    dims = list(range(1, error.dim() - len(named["normalized_shape"])))
    return None, (error * (named["input"] - mean) * named["rstd"]).sum(dims), error.sum(dims)


def _group_norm(named: Mapping[str, Any], _: fx.Node) -> tuple[Tensor | None, ...]:
    error, values, groups = named["grad_out"], named["input"], int(named["group"])
    size = (*values.shape[:2], groups, -1)
    normal = (values.reshape(size) - named["mean"].unsqueeze(-1)) * named["rstd"].unsqueeze(-1)
    dims = [d for d in range(1, error.dim()) if d != 2]
    return None, (error * normal.reshape(values.shape)).sum(dims), error.sum(dims)


def _batch_norm(named: Mapping[str, Any], _: fx.Node) -> tuple[Tensor | None, ...]:
    error, values = named["grad_out"], named["input"]
    size = [-1 if d == 2 else 1 for d in range(error.dim())]
    scale = (named["running_var"] + named["eps"]).rsqrt().reshape(size)
    dims = [d for d in range(1, error.dim()) if d != 2]
    return None, (error * (values - named["running_mean"].reshape(size)) * scale).sum(dims), error.sum(dims)


def _weight_norm(named: Mapping[str, Any], _: fx.Node) -> tuple[Tensor, Tensor]:
    """Of ``w = v * g / |v|`` the terms of ``v`` and ``g``; norms are over all dimensions but ``dim``."""
    error, direction, norms = named["grad_w"], named["saved_v"], named["saved_norms"]
    kept = named["dim"] % direction.dim() + 1
    along = (error * direction).sum([d for d in range(1, error.dim()) if d != kept], keepdim=True)
    of_direction = named["saved_g"] / norms * (error - direction * along / norms.square())
    return of_direction, along / norms


def _trilinear(named: Mapping[str, Any], node: fx.Node) -> Tensor:
    """Add up the products of three tensors along ``sumdim``; those with examples are ``[B, ...]``."""
    rank = node.meta["val"].dim() + len(named["sumdim"])
    terms: list[Any] = []
    for n in "123":
        value, own = named[f"i{n}"], kept_dims(rank, named[f"expand{n}"])
        terms += [value, [rank, *own] if value.dim() > len(own) else own]
    result: Tensor = torch.einsum(*terms, [rank, *kept_dims(rank, named["sumdim"])])
    return result


def _embedding_bag(named: Mapping[str, Any], base: Tensor) -> Tensor:
    errors, words, mode = named["grad"], named["indices"], named["mode"]
    if mode == _MAX:
        largest = named["maximum_indices"]
        columns = torch.arange(errors.shape[1], device=errors.device).expand_as(largest)
        indices = [largest.clamp(min=0), columns]
        found: Tensor = _aten.index_put.default(base, indices, torch.where(largest < 0, 0, errors), True)
        return found
    if mode == _MEAN:
        errors = errors / named["bag_size"].clamp(min=1).unsqueeze(-1)
    rows = errors.unsqueeze(1).expand(-1, words.shape[0] // errors.shape[0], -1).flatten(0, 1)
    if named["per_sample_weights"] is not None:
        rows = rows * named["per_sample_weights"].unsqueeze(-1)
    return _embedding({"indices": words, "grad_output": rows, "padding_idx": named["padding_idx"]}, base)


def _put(named: Mapping[str, Any], base: Tensor) -> Tensor:
    values, indices = named["values"], list(named["indices"])
    if "mask" in named:
        values = torch.where(named["mask"], values, 0)
        indices = [None if i is None else torch.where(i < 0, 0, i) for i in indices]
    result: Tensor = _aten.index_put.default(base, indices, values, True)
    return result


def _embedding(named: Mapping[str, Any], base: Tensor) -> Tensor:
    words, errors = named["indices"], named["grad_output"]
    kept = torch.where((words == named["padding_idx"]).unsqueeze(-1), 0, errors)
    result: Tensor = _aten.index_put.default(base, [words], kept, True)
    return result


def _multiply_and_add(named: Mapping[str, Any]) -> Tensor:
    """``vmap`` has no rule of ``prims.fma``, and would run it example by example."""
    result: Tensor = named["a"] * named["b"] + named["c"]
    return result


_MEANS = frozenset(operators.overloads(("mean",)))
_MEAN, _MAX = 1, 2  # modes of bags
_BAGS = frozenset(operators.overloads(("_embedding_bag_backward", "_embedding_bag_dense_backward")))
_EMBEDDINGS = frozenset(operators.overloads(("embedding_dense_backward",)))
# Ops on values with the examples in dimension 0: their arguments say how many examples there are, they give more than
# is needed, or vmap does not know them.
_ON_ALL: dict[Any, Callable[[Mapping[str, Any], fx.Node], Any]] = {
    operator.getitem: _select,
    markers.mark_error: _first,
    _prims.convert_element_type.default: _cast,
    _aten.convolution_backward.default: _convolution,
    _aten.native_layer_norm_backward.default: _layer_norm,
    _aten._fused_rms_norm_backward.default: _layer_norm,
    _aten.native_group_norm_backward.default: _group_norm,
    _aten.native_batch_norm_backward.default: _batch_norm,
    _aten._trilinear.default: _trilinear,
    _aten._weight_norm_interface_backward.default: _weight_norm,
}
# Ops along dimensions that are given by number; some take a list of rows, which is the same for all examples.
_ALONG_LISTS = frozenset(operators.overloads(("index_select", "index_add")))
_ALONG = _ALONG_LISTS.union(
    operators.overloads(("cat", "slice_backward", "slice_scatter", "select_scatter", "gather", "scatter_add")),
    operators.overloads(("rev",), "prims"),
)
# Ops on one example; what they write into is given.
_ON_ONE: dict[Any, Callable[..., Any]] = {
    **dict.fromkeys(operators.overloads(("fma",), "prims"), _multiply_and_add),
    **dict.fromkeys(PUTS, _put),
    **dict.fromkeys(_EMBEDDINGS, _embedding),
    **dict.fromkeys(_BAGS, _embedding_bag),
}
