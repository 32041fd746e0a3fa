"""Reading the markers of probes in a joint graph."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor, fx

from gradrewrite._compat import aot_autograd
from gradrewrite.ir import ops
from gradrewrite.ir.ops import number_of


@dataclass(frozen=True, slots=True)
class Markers:
    """The markers of a joint graph, by the number of the value."""

    activations: dict[int, fx.Node]
    errors: dict[int, fx.Node]


def read_markers(graph: fx.Graph) -> Markers:
    """Find the markers of probes."""
    found = Markers({}, {})
    for node in graph.nodes:
        if node.target is ops.mark_activation:
            found.activations[number_of(node)] = node
        elif node.target is ops.mark_error and aot_autograd.is_backward(node):  # not of a gradient inside the forward
            found.errors[number_of(node)] = node
    return found


def value_of(node: fx.Node) -> Tensor:
    """Return the fake tensor of a node."""
    value = node.meta["val"]
    assert isinstance(value, Tensor)
    return value
