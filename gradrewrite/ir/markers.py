"""Reading the markers of probes in a joint graph."""

from __future__ import annotations

from torch import Tensor, fx

from gradrewrite._compat import aot_autograd
from gradrewrite.ir import ops
from gradrewrite.ir.ops import number_of


def read_markers(graph: fx.Graph) -> tuple[dict[int, fx.Node], dict[int, fx.Node]]:
    """Return the markers of activations and those of errors, by the number of the value."""
    activations = graph.find_nodes(op="call_function", target=ops.mark_activation)
    errors = graph.find_nodes(op="call_function", target=ops.mark_error)
    errors = [node for node in errors if aot_autograd.is_backward(node)]  # not of a gradient inside the forward
    return {number_of(node): node for node in activations}, {number_of(node): node for node in errors}


def value_of(node: fx.Node) -> Tensor:
    """Return the fake tensor of a node."""
    value = node.meta["val"]
    assert isinstance(value, Tensor)
    return value
