"""Expected infinities, written by the program itself (a mask before a softmax)."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, fx

from gradrewrite._compat import operators

# Ops that propagate infinities; any other is taken to use them up, as softmax does.
_PROPAGATING = frozenset(
    (
        "add", "add_", "iadd", "radd", "sub", "sub_", "isub", "mul", "mul_", "imul", "rmul", "truediv", "div", "div_",
        "itruediv", "masked_fill", "masked_fill_", "where", "full", "full_like", "new_full", "fill_", "triu", "triu_",
        "tril", "tril_", "view", "view_as", "reshape", "transpose", "permute", "expand", "expand_as", "unsqueeze",
        "squeeze", "flatten", "unflatten", "getitem", "setitem", "chunk", "split", "cat", "stack", "clone",
        "contiguous", "to", "type_as", "float", "half", "bfloat16", "double", "repeat", "maximum", "minimum",
        "tensor", "detach",
    )
)  # fmt: skip


def propagates_infinity(name: str, node: fx.Node, tainted: set[fx.Node]) -> bool:
    """Return whether the result of a Dynamo node may hold expected infinities, as the values of ``tainted`` may."""
    return name in _PROPAGATING and (has_infinite_literal(node) or any(n in tainted for n in node.all_input_nodes))


# The same for the nodes of an ATen graph, where softmax may be taken apart.
_ATEN_PROPAGATING = frozenset(
    (
        "add", "sub", "rsub", "mul", "div", "where", "masked_fill", "full", "full_like", "scalar_tensor", "triu",
        "tril", "amax", "max", "maximum", "minimum", "cat", "stack", "index", "gather", "repeat", "constant_pad_nd",
        "neg",
    )
)  # fmt: skip
_RESHAPES = frozenset(
    (
        "view", "_unsafe_view", "reshape", "transpose", "permute", "t", "expand", "unsqueeze", "squeeze", "slice",
        "select", "split", "unbind", "clone", "copy", "_to_copy", "convert_element_type", "alias", "detach",
        "lift_fresh_copy", "getitem",
    )
)  # fmt: skip
_ELEMENTWISE = frozenset(("add", "sub", "rsub", "mul", "div"))
_ADDED_PRODUCTS = frozenset(("baddbmm", "addmm"))  # the mask is the term


def propagates(node: fx.Node, result: Any, masks: Mapping[fx.Node, Tensor]) -> bool:
    """Whether an ATen node propagates the infinities of masks, and has no others.

    ``masks`` are those of its inputs that hold infinities that the program wrote.
    """
    name = operators.name_of(node)
    if not masks or name not in _ATEN_PROPAGATING | _RESHAPES | _ADDED_PRODUCTS:
        return False
    if name in _ADDED_PRODUCTS and [*masks] != [node.args[0]]:  # of factors
        return False
    if name not in _ELEMENTWISE | _ADDED_PRODUCTS:
        return True
    written = torch.zeros_like(result, dtype=torch.bool)
    for mask in masks.values():
        written |= torch.isinf(mask)
    return not bool((torch.isinf(result) & ~written).any())


def is_added(node: fx.Node) -> bool:
    """Whether a value is used as a mask is: added, selected, or given to attention, whatever its shape is made."""
    todo, seen = list(node.users), set()
    while todo:
        user = todo.pop()
        if user in seen or user.op == "output":
            continue
        seen.add(user)
        name = operators.name_of(user)
        if name in _RESHAPES:
            todo += user.users
        elif name not in ("add", "where", "measure") and "scaled_dot_product" not in name:
            return False
    return bool(seen)


def has_infinite_literal(node: fx.Node) -> bool:
    """Return whether an infinite number is among the arguments of a node."""
    return any(isinstance(a, float) and math.isinf(a) for a in _leaves((node.args, node.kwargs)))


def _leaves(value: Any) -> Iterator[Any]:
    if isinstance(value, dict):
        value = list(value.values())
    if isinstance(value, list | tuple):
        for item in value:
            yield from _leaves(item)
    else:
        yield value
