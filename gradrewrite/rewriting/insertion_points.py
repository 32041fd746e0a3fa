"""Insertion points: where in a joint graph the sites are."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

from torch import fx

from gradrewrite._compat import aot_autograd
from gradrewrite.distributed.layouts import Layout
from gradrewrite.instrumentation.naming import name_values
from gradrewrite.ir import editing
from gradrewrite.ir.inputs import GraphInput
from gradrewrite.ir.marked_graph import MarkedJointGraph
from gradrewrite.ir.markers import Markers, read_markers, value_of
from gradrewrite.ir.values import Value, shape_of
from gradrewrite.sites import Kind, Site


@dataclass(eq=False)
class InsertionPoint:
    """The insertion point of one site, and the nodes that read it."""

    site: Site
    node: fx.Node  # its value, as the actions so far have left it
    before: fx.Node  # new nodes are inserted before this one
    order: int  # position in the order of execution
    marker: fx.Node | None = None  # of an error
    output: int | None = None  # position of a gradient among the outputs
    # The activation, parameter or input that the value is the gradient of; None where the graph lacks it.
    value: fx.Node | None = None
    layout: Layout | None = None  # of the value, if the node is what this process holds of a DTensor
    value_layout: Layout | None = None  # that of what it is the gradient of
    is_part: bool = False  # the value is a plain part of a global tensor


def find_insertion_points(marked: MarkedJointGraph) -> tuple[list[InsertionPoint], list[Site]]:
    """Return the insertion points, and the sites with errors that are outside of the graph, if only in part.

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
    for number, site_at in name_values(marked.values, marked.call).items():
        value = marked.values[number]
        points += _points_of_activation(markers, order, number, site_at, value)
        # Nothing reads the marker of an error that leads to zeros alone (of ``sgn``).
        is_lost = value.is_returned and value.fake.requires_grad and not value.has_error
        is_lost |= value.is_bypassed and value.fake.requires_grad
        if is_lost or value.returned_through & regenerated:
            outside.append(site_at("error"))
        else:
            points += _points_of_error(markers, order, number, site_at, value)
    returned = editing.outputs_of(graph.output_node())
    placeholders = {position: node for node, position in aot_autograd.plain_inputs(graph).items()}
    for of_parameters in (True, False):
        for position, input_position in outputs:
            node, given = returned[position], marked.inputs.get(input_position)
            if not isinstance(node, fx.Node) or given is None or not given.has_site:
                continue
            if (given.role == "parameter") == of_parameters:
                layout = marked.layouts.gradients.get(input_position)
                site, before = _site_of_gradient(node, given, layout), graph.output_node()
                point = InsertionPoint(site, node, before, order[node], output=position, layout=layout)
                point.value = placeholders.get(input_position)
                point.value_layout = marked.layouts.values.get(input_position)
                points.append(point)
    return points, outside


def _points_of_activation(
    markers: Markers, order: Mapping[fx.Node, int], number: int, site_at: Callable[[Kind], Site], value: Value
) -> list[InsertionPoint]:
    marker = markers.activations.get(number)
    if marker is None:
        return []
    site = site_at("activation")
    if not (site.dtype.is_floating_point or site.dtype.is_complex):
        return []
    point = InsertionPoint(site, _marked(marker), marker, order[marker], layout=value.layout, is_part=value.is_part)
    return [point]


def _points_of_error(
    markers: Markers, order: Mapping[fx.Node, int], number: int, site_at: Callable[[Kind], Site], value: Value
) -> list[InsertionPoint]:
    marker = markers.errors.get(number)
    if marker is None:
        return []
    forward = markers.activations.get(number)
    point = InsertionPoint(site_at("error"), _marked(marker), marker, order[marker], marker, is_part=value.is_part)
    point.value = None if forward is None else _marked(forward)
    point.layout, point.value_layout = value.error_layout, value.layout
    return [point]


def _site_of_gradient(node: fx.Node, given: GraphInput, layout: Layout | None) -> Site:
    value, is_parameter = value_of(node), given.role == "parameter"
    return Site(
        kind="gradient" if is_parameter else "input",
        name=given.name,
        module=given.name.rpartition(".")[0] if is_parameter else "",
        shape=shape_of(value if layout is None else layout),
        dtype=value.dtype,
        device=value.device,
    )


def _marked(marker: fx.Node) -> fx.Node:
    node = marker.args[0]
    assert isinstance(node, fx.Node)
    return node
