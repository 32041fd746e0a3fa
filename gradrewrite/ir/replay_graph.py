"""Replay graphs: rewritten joint graphs with markers, for replays of steps."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from torch import fx

from gradrewrite.ir.edits import Edit
from gradrewrite.ir.inputs import GraphInput
from gradrewrite.sites import Site


@dataclass(frozen=True, slots=True)
class ReplayGraph:
    """A rewritten joint graph with its markers, and the sites of its nodes.

    Attributes:
        graph: The graph: edits made, markers still there, nothing packed.
        activations: Sites of forward values, by the number of their marker.
        errors: Sites of errors, by the number of their marker.
        gradients: Sites of gradients of parameters and inputs, by their position among the outputs.
        actions: The edit that made a node, by the node's name.
        inputs: The inputs, by the name of their placeholder.
        tangents: Names of the placeholders of gradients that come from outside.
        backward: Names of the nodes of the backward.
        is_random: Whether random numbers are drawn.
    """

    graph: fx.GraphModule
    activations: Mapping[int, Site]
    errors: Mapping[int, Site]
    gradients: Mapping[int, Site]
    actions: Mapping[str, Edit]
    inputs: Mapping[str, GraphInput]
    tangents: tuple[str, ...]
    backward: frozenset[str]
    is_random: bool
