"""The copy of a checked graph for a replay, and counts at its boundary."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

from torch import Tensor, fx

from gradrewrite._compat import aot_autograd, collectives, operators
from gradrewrite.ir import editing
from gradrewrite.ir.attribution import backward_names
from gradrewrite.ir.marked_graph import MarkedJointGraph
from gradrewrite.ir.markers import number_of
from gradrewrite.ir.replay_graph import ReplayGraph, ReplayLoop
from gradrewrite.rewriting.boundary_counters import insert_boundary_counters
from gradrewrite.rewriting.canvas import Canvas
from gradrewrite.rewriting.insertion_points import InsertionPoint
from gradrewrite.sites import Kind, Site


def make_replay_graph(
    canvas: Canvas,
    points: Sequence[InsertionPoint],
    marked: MarkedJointGraph,
    plain: Mapping[int, fx.Node],
    loops: Mapping[str, ReplayLoop],
) -> tuple[ReplayGraph | None, list[str]]:
    """Count at the boundary of a checked graph, and copy the graph for a replay.

    Returns the copy, None if there can be none, and the names of the nodes that count.

    ``plain`` are gradients before the actions at their sites, by their position among the outputs.
    """
    inputs = {
        node: marked.inputs[position]
        for node, position in aot_autograd.plain_inputs(canvas.graph).items()
        if position in marked.inputs and isinstance(node.meta.get("val"), Tensor)
    }
    tangents = aot_autograd.tangents(canvas.graph)
    counters: list[str] = []
    if canvas.packing.has_checks:
        outside, numbering = tangents if marked.is_last else [], canvas.packing.numbering
        records, counters = insert_boundary_counters(canvas.graph, inputs, outside, numbering)
        canvas.packing.count(records)
    if any(collectives.is_collective(node) and node.name not in canvas.averaged for node in canvas.graph.nodes):
        return None, counters  # the model computes with other processes, which may not replay this step
    made = ReplayGraph(
        graph=editing.copy_of_nodes(canvas.graph),
        activations=_sites_by_value(points, "activation"),
        errors=_sites_by_value(points, "error"),
        gradients={p.output: p.site for p in points if p.output is not None},
        actions={name: e for e in canvas.edits for name in e.nodes},
        inputs={node.name: given for node, given in inputs.items()},
        tangents=tuple(node.name for node in tangents),
        backward=backward_names(canvas.graph),
        is_random=any(operators.is_random(node) for node in canvas.graph.nodes),
        plain={position: node.name for position, node in plain.items()},
        updated=frozenset(node.name for node in _updated_inputs(canvas.graph, plain.values())),
        loops=loops,
        is_whole=marked.is_whole and marked.is_last,
    )
    return made, counters


def _updated_inputs(graph: fx.Graph, gradients: Iterable[fx.Node]) -> set[fx.Node]:
    """Return the placeholders written by the graph and read by gradients."""
    written = {node for call in graph.nodes if call.op == "call_function" for node in operators.written_by(call)}
    written = {node for node in written if isinstance(node, fx.Node) and node.op == "placeholder"}
    needed, todo = set(gradients), list(gradients) if written else []
    while todo:
        new = [node for node in operators.nodes_that_matter(todo.pop()) if node not in needed]
        needed.update(new)
        todo += new
    return written & needed


def _sites_by_value(points: Sequence[InsertionPoint], kind: Kind) -> dict[int, Site]:
    return {number_of(point.before): point.site for point in points if point.site.kind == kind}
