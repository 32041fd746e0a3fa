"""Nodes of a Dynamo graph: what they call, what they make, what they change."""

from __future__ import annotations

import inspect
import operator

from torch import Tensor, fx


def is_checkpoint(node: fx.Node) -> bool:
    """Whether a node runs an activation checkpoint."""
    return node.op == "call_function" and getattr(node.target, "__name__", "") == "tag_activation_checkpoint"


def fake_of(node: fx.Node) -> Tensor | None:
    """The fake tensor that a node makes; None if it makes something else."""
    value = node.meta.get("example_value")
    return value if isinstance(value, Tensor) else None


def op_name(node: fx.Node) -> str:
    """The ``__name__`` of what the user called; an element of a tuple is named by the op that made it."""
    while node.target is operator.getitem and isinstance(node.args[0], fx.Node) and fake_of(node.args[0]) is None:
        node = node.args[0]
    if isinstance(node.target, str):
        return node.target
    name = str(getattr(node.target, "__name__", node.target))
    return "apply" if name == "autograd_function_apply" else name


def changed_in_place(node: fx.Node) -> fx.Node | None:
    """The input that an in-place op changes; None for any other op."""
    if not node.args or not isinstance(node.args[0], fx.Node):
        return None
    first = node.args[0]
    if node.target is operator.setitem:
        return first
    name = node.target if isinstance(node.target, str) else getattr(node.target, "__name__", "")
    if (name.endswith("_") and not name.endswith("__")) or name in _IN_PLACE or _asks_for_in_place(node):
        return first if fake_of(first) is not None or first.op == "placeholder" else None
    return None


_IN_PLACE = frozenset(
    f.__name__
    for f in (
        operator.iadd, operator.isub, operator.imul, operator.itruediv, operator.ifloordiv, operator.imod,
        operator.ipow, operator.imatmul, operator.iand, operator.ior, operator.ixor,
    )
)  # fmt: skip


def _asks_for_in_place(node: fx.Node) -> bool:
    if "inplace" in node.kwargs:
        return bool(node.kwargs["inplace"])
    if not inspect.isfunction(node.target):
        return False
    parameters = list(inspect.signature(node.target).parameters)
    position = parameters.index("inplace") if "inplace" in parameters else len(node.args)
    return position < len(node.args) and bool(node.args[position])
