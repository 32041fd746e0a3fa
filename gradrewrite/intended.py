"""Infinities that a program asks for (a mask before a softmax), which are no faults."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

from torch import fx

# Ops that hand infinities on; any other is taken to use them up, as softmax does.
_HANDS_ON = frozenset(
    (
        "add", "add_", "iadd", "radd", "sub", "sub_", "isub", "mul", "mul_", "imul", "rmul", "truediv", "div", "div_",
        "itruediv", "masked_fill", "masked_fill_", "where", "full", "full_like", "new_full", "fill_", "triu", "triu_",
        "tril", "tril_", "view", "view_as", "reshape", "transpose", "permute", "expand", "expand_as", "unsqueeze",
        "squeeze", "flatten", "unflatten", "getitem", "setitem", "chunk", "split", "cat", "stack", "clone",
        "contiguous", "to", "type_as", "float", "half", "bfloat16", "double", "repeat", "maximum", "minimum",
        "tensor", "detach",
    )
)  # fmt: skip


def hands_on_infinity(name: str, node: fx.Node, tainted: set[fx.Node]) -> bool:
    """Whether an op's result may hold infinities that the program itself wrote.

    Args:
        name: Name of the op.
        node: Its node in a Dynamo graph.
        tainted: Nodes whose values may hold such infinities.
    """
    return name in _HANDS_ON and (has_infinite_literal(node) or any(n in tainted for n in node.all_input_nodes))


def has_infinite_literal(node: fx.Node) -> bool:
    """Whether an infinite number stands among the arguments of a node."""
    return any(isinstance(a, float) and math.isinf(a) for a in _leaves((node.args, node.kwargs)))


def _leaves(value: Any) -> Iterator[Any]:
    if isinstance(value, dict):
        value = list(value.values())
    if isinstance(value, list | tuple):
        for item in value:
            yield from _leaves(item)
    else:
        yield value
