"""Errors with the rows or tokens of a batch, in a replay graph."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor, fx

from gradrewrite._compat import fake_tensors
from gradrewrite.ir import editing, markers
from gradrewrite.ir.replay_graph import ReplayGraph
from gradrewrite.sites import Site

# Ops whose value is a matrix product or a convolution: of the logits, mostly.
_PRODUCTS = frozenset(
    ("linear", "matmul", "mm", "addmm", "bmm", "baddbmm", "einsum", "tensordot", "conv1d", "conv2d", "conv3d")
)


def graph_of_value(replay_graph: ReplayGraph, name: str) -> fx.GraphModule:
    """Return a graph with the inputs of a replay graph that returns the value of one node."""
    gm = editing.copy_of_nodes(replay_graph.graph.graph)
    node = next(node for node in gm.graph.nodes if node.name == name)
    while node.target in markers.IDENTITIES:
        node = node.args[0]
    editing.erase_markers(gm.graph)
    editing.return_instead(gm.graph, [node])
    return gm


@dataclass(frozen=True, slots=True)
class BatchError:
    """An error with one part for each row, or token, of a batch."""

    site: Site
    node: str


def find_batch_error(replay_graph: ReplayGraph, values: Sequence[Any], batch: Sequence[int]) -> BatchError | None:
    """Return the error at the logits, of a batch ``[B]`` of rows or ``[B, T]`` of tokens; None if there is none.

    That is the first one in the backward whose value is a matrix product, or else the last of those with the most
    elements.
    """
    gm = editing.copy_of_nodes(replay_graph.graph.graph)
    fake_tensors.describe_nodes(gm, values)
    best, most = None, 0
    for node, site in _errors(gm.graph, replay_graph):
        value = node.meta["val"]
        if not isinstance(value, Tensor) or by_part(value, batch) is None:
            continue
        if site.op in _PRODUCTS:
            return BatchError(site, node.name)
        if value.numel() >= most:
            best, most = BatchError(site, node.name), value.numel()
    return best


def has_batch(replay_graph: ReplayGraph, name: str) -> bool:
    """Return whether a value may have rows of the batch, by its place in the graph.

    In the forward it depends on an input; in the backward an error depends on it: gradients of parameters are sums.
    """
    graph, of_inputs = replay_graph.graph.graph, _of_inputs(replay_graph)
    if name in replay_graph.tangents or name not in replay_graph.backward:
        return name in replay_graph.tangents or name in of_inputs
    reached = {name}
    for node in graph.nodes:
        if any(read.name in reached for read in node.all_input_nodes):
            reached.add(node.name)
    return any(node.name in reached for node, _ in _errors(graph, replay_graph))


def _of_inputs(replay_graph: ReplayGraph) -> frozenset[str]:
    """Return the names of the nodes that depend on an input of the model."""
    found = {name for name, known in replay_graph.inputs.items() if known.role in ("input", "value")}
    for node in replay_graph.graph.graph.nodes:
        if any(read.name in found for read in node.all_input_nodes):
            found.add(node.name)
    return frozenset(found)


def _errors(graph: fx.Graph, replay_graph: ReplayGraph) -> Iterator[tuple[fx.Node, Site]]:
    """Yield the markers of errors of values that depend on an input, in the order of execution."""
    of_inputs = _of_inputs(replay_graph)
    values = graph.find_nodes(op="call_function", target=markers.mark_activation)
    known = {markers.number_of(node) for node in values if node.all_input_nodes[0].name in of_inputs}
    for node in graph.find_nodes(op="call_function", target=markers.mark_error):
        number = markers.number_of(node)
        if number in known and number in replay_graph.errors and node.name in replay_graph.backward:
            yield node, replay_graph.errors[number]


def by_part(value: Tensor, batch: Sequence[int]) -> Tensor | None:
    """Return a value by the rows, or tokens, of a batch, ``[N, ...]``; None if it has none.

    It is ``[*batch, ...]``, ``[T, B, ...]``, ``[B * T, ...]``, or ``[1, N, ...]``.
    """
    shape, rank, number = tuple(value.shape), len(batch), math.prod(batch)
    if shape[:rank] == tuple(batch):
        return value.flatten(0, rank - 1)
    if rank == 2 and shape[:2] == tuple(batch[::-1]):
        return value.transpose(0, 1).flatten(0, 1)
    if shape[:1] == (number,):
        return value
    return value[0] if shape[:2] == (1, number) else None
