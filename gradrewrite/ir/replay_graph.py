"""Replay graphs: rewritten joint graphs with markers, for replays of steps."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from torch import fx

from gradrewrite.ir.edits import Edit
from gradrewrite.ir.inputs import GraphInput
from gradrewrite.sites import Site


@dataclass(frozen=True, slots=True)
class ReplayGraph:
    """A rewritten joint graph with its markers, and the sites of its nodes."""

    graph: fx.GraphModule  # edits made, markers still there, nothing packed
    activations: Mapping[int, Site]  # by the number of their marker
    errors: Mapping[int, Site]  # by the number of their marker
    gradients: Mapping[int, Site]  # of parameters and inputs, by their position among the outputs
    actions: Mapping[str, Edit]  # the edit that made a node, by the node's name
    inputs: Mapping[str, GraphInput]  # by the name of their placeholder
    tangents: tuple[str, ...]  # placeholders of gradients that come from outside
    backward: frozenset[str]  # names of its nodes
    is_random: bool  # random numbers are drawn
    plain: Mapping[int, str] = field(default_factory=dict)  # nodes of gradients before the actions there, by position
    updated: frozenset[str] = frozenset()  # inputs that gradients depend on, and that the forward writes to
    is_whole: bool = True  # it holds all that one call of the model does
