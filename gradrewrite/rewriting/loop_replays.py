"""Descriptions of loops for replays."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import fx

from gradrewrite._utils.grouping import grouped
from gradrewrite.ir import editing, markers
from gradrewrite.ir.attribution import attribute_nodes
from gradrewrite.ir.markers import number_of
from gradrewrite.ir.replay_graph import ReplayLoop
from gradrewrite.rewriting.loop_bodies import JointBody, needed_for
from gradrewrite.sites import Kind

_KINDS: dict[Any, Kind] = {markers.mark_activation: "activation", markers.mark_error: "error"}


def describe(body: JointBody, acting: Mapping[str, int]) -> ReplayLoop:
    """Describe a joint body with its markers; ``acting`` has the numbers of errors, by the nodes that act on them."""
    graph, loop = body.graph, body.loop
    names = {number: name for name, number in loop.numbers.items()}
    found = [node for node in graph.nodes if node.target in _KINDS and number_of(node) in names]
    marked = [(node, names[number_of(node)], _KINDS[node.target]) for node in found]
    results = editing.outputs_of(graph.output_node())[: body.num_results]
    forward = needed_for([*results, *(node for node, _, kind in marked if kind == "activation")])
    backward = {node.name for node in graph.nodes if node.op == "call_function" and node not in forward}
    ops = attribute_nodes(graph, backward, acting)
    return ReplayLoop(
        loop,
        values=grouped((_unmarked(n).name, (name, kind)) for n, name, kind in marked if loop.has_site(name, kind)),
        ops={node.name: names[n] for node, n in ops.items() if n in names},
        positions={node.name: n for n, node in enumerate(graph.nodes)},
        of_forward=frozenset(node.name for node in forward),
    )


def _unmarked(node: fx.Node) -> fx.Node:
    while node.target in _KINDS:
        node = node.all_input_nodes[0]
    return node
