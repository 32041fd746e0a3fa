"""Example norms of a replay graph: squared norms of the gradients of single examples, by parameter."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor, fx

from gradrewrite._compat import aot_autograd, fake_tensors
from gradrewrite.errors import PolicyError
from gradrewrite.ir import editing
from gradrewrite.ir.marked_graph import MarkedJointGraph
from gradrewrite.ir.replay_graph import ReplayGraph
from gradrewrite.policy.insertions import Insertion, PerExample, ReplaceTensor
from gradrewrite.rewriting.example_gradients import WAY_OUT, Asked, ExampleGradients
from gradrewrite.rewriting.insertion_points import InsertionPoint


@dataclass(frozen=True, slots=True)
class ExampleNorms:
    """A graph with the inputs of a replay graph.

    Its outputs are the gradients of parameters and, if there are norms, the squared norms ``[B]`` of the terms of these
    gradients that single examples contribute.
    """

    graph: fx.GraphModule
    parameters: tuple[str, ...]
    missing: str  # why there are no norms; ``""`` if there are


class _Contributions:
    """The action of these norms, in errors."""

    def __repr__(self) -> str:
        return "monitor.culprits()"


# The terms of a gradient, as they are added up: the sum is that of the loss, whatever it is.
_READS = PerExample(("square_norms",), "sum", 0)


def _unchanged(tensor: Tensor, squares: Tensor) -> Tensor:
    return tensor


def example_norms_of(replay_graph: ReplayGraph, values: Sequence[Any]) -> ExampleNorms:
    """Return the graph of the norms for these values of placeholders; a replay graph stays as it is.

    Gradients are those before the actions at their sites.
    """
    gm = editing.copy_of_nodes(replay_graph.graph.graph)
    graph, named = gm.graph, {node.name: node for node in gm.graph.nodes}
    sites = {at: site for at, site in replay_graph.gradients.items() if site.kind == "gradient"}
    gradients = {at: named[replay_graph.plain[at]] for at in sites}
    fake_tensors.describe_nodes(gm, values)
    squares: list[fx.Node] = []
    missing = ""
    try:
        squares = _insert_norms(graph, replay_graph, [(sites[at], node) for at, node in gradients.items()])
    except PolicyError as err:
        missing = err.text.removesuffix(f". {WAY_OUT}")  # a way out of a policy
    editing.erase_markers(graph)
    editing.return_instead(graph, [*gradients.values(), *squares])
    return ExampleNorms(gm, tuple(site.name for site in sites.values()), missing)


def _insert_norms(
    graph: fx.Graph, replay_graph: ReplayGraph, gradients: Sequence[tuple[Any, fx.Node]]
) -> list[fx.Node]:
    positions = aot_autograd.plain_inputs(graph)
    inputs = {at: replay_graph.inputs[node.name] for node, at in positions.items() if node.name in replay_graph.inputs}
    examples = ExampleGradients(MarkedJointGraph(graph, (), inputs, is_whole=replay_graph.is_whole))
    asked = Asked(Insertion(_Contributions(), ReplaceTensor(_unchanged, _READS), frozenset(("gradient",))), _READS)
    before = graph.output_node()
    points = [InsertionPoint(site, node, before, 0) for site, node in gradients]
    return [examples.quantities(point, point.node, asked, None)[0] for point in points]
