"""Rules of linear ops: of sums over examples they make sums of results."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import Tensor, fx

from gradrewrite._compat.operators import overloads
from gradrewrite.ir import markers
from gradrewrite.per_example.op_calls import OpCall, is_zero

Sums = list[fx.Node]


def _only(name: str) -> Callable[[OpCall, Sums], bool]:
    """Linear in one argument, if no other is a sum."""
    return lambda call, sums: sums == [call[name]]


def _has_others(call: OpCall, sums: Sums) -> bool:
    tensors = [node for node in call.node.all_input_nodes if isinstance(node.meta["val"], Tensor)]
    return any(node not in sums and not is_zero(node) for node in tensors)


def _adds(call: OpCall, sums: Sums) -> bool:
    return not _has_others(call, sums) and all(isinstance(call[name], fx.Node) for name in ("self", "other"))


def _multiplies(call: OpCall, sums: Sums) -> bool:
    return len(sums) == 1 and list(call.node.args).count(sums[0]) == 1


def _divides(call: OpCall, sums: Sums) -> bool:
    return sums == [call["self"]] and call["other"] is not sums[0] and call.arguments.get("rounding_mode") is None


def _puts(call: OpCall, sums: Sums) -> bool:
    return sums == [call["values"]] and is_zero(call["self"]) and call.arguments.get("accumulate", True) is True


def _chooses(call: OpCall, sums: Sums) -> bool:
    return call["condition"] not in sums and all(n in sums or is_zero(n) for n in (call["self"], call["other"]))


def _multiplies_and_adds(call: OpCall, sums: Sums) -> bool:
    """Return whether ``a * b + c`` is linear in its sums: one factor and ``c``; either term may be 0 instead."""
    factors = [call[name] for name in ("a", "b")]
    is_linear_product = sum(factor in sums for factor in factors) == 1 or any(map(is_zero, factors))
    return is_linear_product and (call["c"] in sums or is_zero(call["c"]))


# What moves elements, or adds them up; all other arguments are sizes.
_MOVES = (
    *("view", "reshape", "_unsafe_view", "_reshape_alias", "squeeze", "unsqueeze", "permute", "transpose", "t"),
    *("expand", "clone", "alias", "detach", "select", "slice", "as_strided", "flip", "roll", "repeat", "split"),
    *("split_with_sizes", "unsafe_split", "unbind", "chunk", "unfold", "diagonal", "select_backward"),
    *("slice_backward", "diagonal_backward", "unfold_backward", "_to_copy", "lift_fresh_copy", "sum", "mean", "neg"),
    *("tril", "triu", "cumsum"),
)
_RULES: list[tuple[tuple[str, ...], Callable[[OpCall, Sums], bool]]] = [
    (_MOVES, lambda call, sums: True),
    (("cat", "stack", "select_scatter", "slice_scatter"), lambda call, sums: not _has_others(call, sums)),
    (("constant_pad_nd",), lambda call, sums: is_zero(call["value"] or 0)),
    (("add", "sub"), _adds),
    (("mul", "mm", "bmm", "mv", "dot"), _multiplies),
    (("div",), _divides),
    (("index_put", "_unsafe_index_put", "_unsafe_masked_index_put_accumulate"), _puts),
    (("index", "index_select", "gather", "_unsafe_index"), _only("self")),
    (("embedding_dense_backward", "_softmax_backward_data", "_log_softmax_backward_data"), _only("grad_output")),
    (("tanh_backward", "sigmoid_backward"), _only("grad_output")),
    (("_weight_norm_interface_backward",), _only("grad_w")),
    (("scatter_add",), lambda call, sums: sums == [call["src"]] and is_zero(call["self"])),
    (("index_add",), lambda call, sums: sums == [call["source"]] and is_zero(call["self"])),
    (("where",), _chooses),
    (("masked_fill",), lambda call, sums: sums == [call["self"]] and is_zero(call["value"])),
]
_LINEAR: dict[Any, Callable[[OpCall, Sums], bool]] = {op: rule for names, rule in _RULES for op in overloads(names)}
_LINEAR |= dict.fromkeys(overloads(("convert_element_type", "device_put", "rev"), "prims"), lambda call, sums: True)
_LINEAR |= dict.fromkeys(overloads(("fma",), "prims"), _multiplies_and_adds)
_LINEAR[markers.mark_error] = lambda call, sums: True


def is_linear(call: OpCall, sums: Sums) -> bool:
    """Return whether an op is linear in these sums; no other input may have the batch."""
    rule = _LINEAR.get(call.node.target)
    return rule is not None and not call.batched and rule(call, sums)
