"""Marked joint graphs: AOTAutograd's trace of a Dynamo graph with probes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from torch import fx

from gradrewrite._compat import aot_autograd
from gradrewrite.distributed.layouts import InputLayouts, Layout
from gradrewrite.ir.called_ops import CalledOp
from gradrewrite.ir.inputs import GraphInput
from gradrewrite.ir.marked_loops import Loop
from gradrewrite.ir.values import Value


@dataclass(frozen=True, slots=True)
class MarkedJointGraph:
    """A joint graph with the markers of probes."""

    graph: fx.Graph  # a rewrite changes it in place
    values: Sequence[Value]  # by the number of their markers
    inputs: Mapping[int, GraphInput]  # the tensor inputs of the Dynamo graph, by position
    is_last: bool = True  # the gradients of its outputs come from outside of the model, not from behind a graph break
    call: int = 0  # how many calls of the same graph came before, in one call of the model
    is_whole: bool = True  # it holds all that one call of the model does
    # The outputs of the Dynamo graph that the call returns: position and path in the value that it returns, as
    # ``terms.energy``. The others are stored. None if all are returned.
    returned: Mapping[int, str] | None = None
    # of these inputs and of their gradients, where they are DTensors
    layouts: InputLayouts = field(default_factory=InputLayouts)
    counts: Mapping[str, int] = field(default_factory=dict)  # calls in other graphs before it, by module and op
    loops: Sequence[Loop] = ()  # in the order of the forward; of a loop that is no operator of the graph just the sites
    engine: str = ""  # that runs the bodies of loops
    ops: Sequence[CalledOp] = ()  # with sites for their backward, by the number of their markers

    def inputs_by_node(self) -> dict[fx.Node, tuple[GraphInput, Layout | None]]:
        """Return the tensor inputs by their placeholders, with their layouts."""
        placed = aot_autograd.plain_inputs(self.graph).items()
        return {n: (self.inputs[at], self.layouts.values.get(at)) for n, at in placed if at in self.inputs}
