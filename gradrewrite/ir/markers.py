"""Markers of probes in a joint graph, and operators that the compiler keeps in it."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, fx

from gradrewrite._compat import aot_autograd
from gradrewrite.numerics.library import LIBRARY

LIBRARY.define("mark_activation(Tensor x, int value) -> ()")
LIBRARY.define("mark_error(Tensor g, int value) -> Tensor")
LIBRARY.define("hold(Tensor[] tensors, int[] of_forward=[]) -> ()")
LIBRARY.define("copy(Tensor x) -> Tensor")
LIBRARY.define("use(Tensor x) -> Tensor")
LIBRARY.define("mark_use(Tensor x, int value) -> ()")
LIBRARY.define("mark_operands(Tensor[] tensors, int op, bool are_results) -> ()")
LIBRARY.define("mark_op_error(Tensor g, int op, int result) -> Tensor")
LIBRARY.define("mark_op_gradient(Tensor g, Tensor[] errors, int op, int operand) -> Tensor")


def _no_result(*_: Any) -> None:
    return None


def _like(g: Tensor, *_: Any) -> Tensor:
    # Same strides, so that what is traced behind a marker is what is traced without it.
    return torch.empty_strided(g.size(), g.stride(), dtype=g.dtype, device=g.device)


for _name, _implementation in (
    ("mark_activation", _no_result),
    ("mark_error", _like),
    ("mark_use", _no_result),
    ("hold", _no_result),
    ("mark_operands", _no_result),
    ("mark_op_error", _like),
    ("mark_op_gradient", _like),
):
    LIBRARY.impl(_name, _implementation, "CompositeExplicitAutograd")
    torch.library.register_fake(f"gradrewrite::{_name}", _implementation, lib=LIBRARY)

# A forward may differentiate inside itself, and then once more through that: the marker is an identity.
torch.library.register_autograd("gradrewrite::mark_error", lambda _, g: (g, None), lib=LIBRARY)
torch.library.register_autograd("gradrewrite::mark_op_error", lambda _, g: (g, None, None), lib=LIBRARY)


def _note_errors(ctx: Any, inputs: Any, output: Any) -> None:
    ctx.num_errors = len(inputs[1])


torch.library.register_autograd(
    "gradrewrite::mark_op_gradient",
    lambda ctx, g: (g, [None] * ctx.num_errors, None, None),
    setup_context=_note_errors,
    lib=LIBRARY,
)

# The compiler drops a clone of an output of its graph, but not an operation that it does not know.
LIBRARY.impl("copy", torch.clone, "CompositeExplicitAutograd")
torch.library.register_fake("gradrewrite::copy", torch.empty_like, lib=LIBRARY)
torch.library.register_autograd("gradrewrite::copy", lambda _, g: g, lib=LIBRARY)

# One use of a value, in the forward: it goes before the rewrite begins.
LIBRARY.impl("use", torch.clone, "CompositeExplicitAutograd")
torch.library.register_fake("gradrewrite::use", _like, lib=LIBRARY)
torch.library.register_autograd("gradrewrite::use", lambda _, g: g, lib=LIBRARY)

mark_activation = torch.ops.gradrewrite.mark_activation.default
mark_error = torch.ops.gradrewrite.mark_error.default
hold = torch.ops.gradrewrite.hold.default
copy = torch.ops.gradrewrite.copy.default
use = torch.ops.gradrewrite.use.default
mark_use = torch.ops.gradrewrite.mark_use.default
mark_operands = torch.ops.gradrewrite.mark_operands.default
mark_op_error = torch.ops.gradrewrite.mark_op_error.default
mark_op_gradient = torch.ops.gradrewrite.mark_op_gradient.default
IDENTITIES = (mark_error, mark_op_error, mark_op_gradient)  # in the backward
ON_FORWARD = (mark_activation, mark_operands, mark_use)
fx.node.has_side_effect(mark_activation)
fx.node.has_side_effect(mark_use)
fx.node.has_side_effect(mark_operands)
fx.node.has_side_effect(hold)


def number_of(marker: fx.Node) -> int:
    """Return the number of the value of a marker."""
    number = marker.args[1]
    assert isinstance(number, int)
    return number


def read_markers(graph: fx.Graph) -> tuple[dict[int, fx.Node], dict[int, fx.Node]]:
    """Return the markers of activations and those of errors, by the number of the value."""
    activations = graph.find_nodes(op="call_function", target=mark_activation)
    errors = graph.find_nodes(op="call_function", target=mark_error)
    errors = [node for node in errors if aot_autograd.is_backward(node)]  # not of a gradient inside the forward
    return {number_of(node): node for node in activations}, {number_of(node): node for node in errors}


def value_of(node: fx.Node) -> Tensor:
    """Return the fake tensor of a node."""
    value = node.meta["val"]
    assert isinstance(value, Tensor)
    return value
