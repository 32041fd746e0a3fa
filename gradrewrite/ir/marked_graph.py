"""Marked joint graphs: AOTAutograd's trace of a Dynamo graph with probes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from torch import fx

from gradrewrite.distributed.layouts import InputLayouts
from gradrewrite.ir.inputs import GraphInput
from gradrewrite.ir.values import Value


@dataclass(frozen=True, slots=True)
class MarkedJointGraph:
    """A joint graph with the markers of probes.

    Attributes:
        graph: The joint graph; a rewrite changes it in place.
        values: The values, by the number of their markers.
        inputs: The tensor inputs of the Dynamo graph, by position.
        is_last: Whether the gradients of its outputs come from outside of the model, not from behind a graph break.
        call: How many calls of the same graph came before, in one call of the model.
        is_whole: Whether it holds all that one call of the model does.
        layouts: The layouts of these inputs and of their gradients, where they are DTensors.
    """

    graph: fx.Graph
    values: Sequence[Value]
    inputs: Mapping[int, GraphInput]
    is_last: bool = True
    call: int = 0
    is_whole: bool = True
    layouts: InputLayouts = field(default_factory=InputLayouts)
