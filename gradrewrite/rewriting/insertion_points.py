"""Insertion points: where in a joint graph the sites are."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

from torch import fx

from gradrewrite._compat import aot_autograd
from gradrewrite.ir import editing
from gradrewrite.ir.inputs import GraphInput
from gradrewrite.ir.marked_graph import MarkedJointGraph
from gradrewrite.ir.markers import Markers, read_markers, value_of
from gradrewrite.ir.values import shape_of
from gradrewrite.rewriting.naming import name_values
from gradrewrite.sites import Kind, Site


@dataclass
class InsertionPoint:
    """The position at which nodes for one site are inserted, and how the graph reads them.

    Attributes:
        site: The site.
        node: Its value, as the actions so far have left it.
        before: New nodes are inserted before this one.
        order: Position in the order of execution.
        marker: The marker of an error.
        output: Position of a gradient among the outputs.
    """

    site: Site
    node: fx.Node
    before: fx.Node
    order: int
    marker: fx.Node | None = None
    output: int | None = None


def find_insertion_points(marked: MarkedJointGraph) -> tuple[list[InsertionPoint], list[Site]]:
    """Return all sites of a marked graph, and those whose error, or a part of it, is outside of it.

    Values come in execution order, then parameters, then inputs.
    """
    graph = marked.graph
    outputs = aot_autograd.gradient_outputs(graph)
    if not outputs:
        return [], []
    markers, order = read_markers(graph), {node: number for number, node in enumerate(graph.nodes)}
    regenerated = aot_autograd.regenerated_outputs(graph)
    points: list[InsertionPoint] = []
    outside: list[Site] = []
    for number, site in name_values(marked.values).items():
        value = marked.values[number]
        points += _points_of_activation(markers, order, number, site)
        is_lost = value.is_returned and value.fake.requires_grad and number not in markers.errors
        is_lost |= value.is_bypassed and value.fake.requires_grad
        if is_lost or value.returned_through & regenerated:
            outside.append(site("error"))
        else:
            points += _points_of_error(markers, order, number, site)
    returned = editing.outputs_of(graph.output_node())
    for of_parameters in (True, False):
        for position, input_position in outputs:
            node, given = returned[position], marked.inputs.get(input_position)
            if not isinstance(node, fx.Node) or given is None or not given.has_site:
                continue
            if (given.role == "parameter") == of_parameters:
                site_of_input = _site_of_input(node, given)
                points.append(InsertionPoint(site_of_input, node, graph.output_node(), order[node], output=position))
    return points, outside


def _points_of_activation(
    markers: Markers, order: Mapping[fx.Node, int], number: int, site: Callable[[Kind], Site]
) -> list[InsertionPoint]:
    marker = markers.activations.get(number)
    if marker is None:
        return []
    activation = site("activation")
    if not (activation.dtype.is_floating_point or activation.dtype.is_complex):
        return []
    return [InsertionPoint(activation, _marked(marker), marker, order[marker])]


def _points_of_error(
    markers: Markers, order: Mapping[fx.Node, int], number: int, site: Callable[[Kind], Site]
) -> list[InsertionPoint]:
    marker = markers.errors.get(number)
    if marker is None:
        return []
    return [InsertionPoint(site("error"), _marked(marker), marker, order[marker], marker=marker)]


def _site_of_input(node: fx.Node, given: GraphInput) -> Site:
    value, is_parameter = value_of(node), given.role == "parameter"
    return Site(
        kind="gradient" if is_parameter else "input",
        name=given.name,
        module=given.name.rpartition(".")[0] if is_parameter else "",
        shape=shape_of(value),
        dtype=value.dtype,
        device=value.device,
    )


def _marked(marker: fx.Node) -> fx.Node:
    node = marker.args[0]
    assert isinstance(node, fx.Node)
    return node
