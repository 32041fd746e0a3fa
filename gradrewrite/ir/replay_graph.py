"""Replay graphs: rewritten joint graphs with markers, for replays of steps."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from torch import fx

from gradrewrite.ir import editing
from gradrewrite.ir.edits import Edit
from gradrewrite.ir.inputs import GraphInput
from gradrewrite.ir.marked_loops import Loop
from gradrewrite.sites import Kind, Site


@dataclass(frozen=True, slots=True)
class ReplayLoop:
    """A loop in a replay graph, by the nodes of its body."""

    loop: Loop
    values: Mapping[str, Sequence[tuple[str, Kind]]]  # values with sites: their names in the loop
    ops: Mapping[str, str]  # the value of the op that a node belongs to
    positions: Mapping[str, int]  # of all nodes, in the order of execution
    of_forward: frozenset[str]  # nodes of the forward; the backward may compute them again
    actions: dict[str, Mapping[int, Edit]] = field(default_factory=dict)  # edits that made a node, by iteration

    def name_in_body(self, node: str) -> str:
        """Return the name of a node of the code in the joint body."""
        return node.partition(editing.AGAIN)[0]

    def site_of_op(self, node: str, iteration: int) -> Site | None:
        """Return the site of the op of a node."""
        name = self.ops.get(node)
        is_known = name is not None and self.loop.has_site(name, "activation")
        return self.loop.site(name, "activation", iteration) if is_known else None  # type: ignore[arg-type]


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
    loops: Mapping[str, ReplayLoop] = field(default_factory=dict)  # by the node that runs one
    is_whole: bool = True  # it holds all that one call of the model does
