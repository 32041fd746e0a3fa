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
    """The insertion point of one site, and the nodes that read it.

    Attributes:
        site: The site.
        node: Its value, as the actions so far have left it.
        before: New nodes are inserted before this one.
        order: Position in the order of execution.
        marker: The marker of an error.
        output: Position of a gradient among the outputs.
        value: What the value is the gradient of: the activation, parameter or input; None where the graph lacks it.
        layout: The layout of the value, if the node is what this process holds of a DTensor.
        value_layout: That of what it is the gradient of.
        is_part: Whether the value is a plain part of a global tensor.
    """

    site: Site
    node: fx.Node
    before: fx.Node
    order: int
    marker: fx.Node | None = None
    output: int | None = None
    value: fx.Node | None = None
    layout: Layout | None = None
    value_layout: Layout | None = None
    is_part: bool = False


def find_insertion_points(marked: MarkedJointGraph) -> tuple[list[InsertionPoint], list[Site]]:
    """Return the insertion points, and the sites with errors outside of the graph.

    An error is outside if a part of it is. Values come in execution order, then parameters, then inputs.
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
                layout, before = marked.layouts.gradients.get(input_position), graph.output_node()
                points.append(
                    InsertionPoint(
                        _site_of_gradient(node, given, layout),
                        node,
                        before,
                        order[node],
                        output=position,
                        value=placeholders.get(input_position),
                        layout=layout,
                        value_layout=marked.layouts.values.get(input_position),
                    )
                )
    return points, outside


def _points_of_activation(
    markers: Markers, order: Mapping[fx.Node, int], number: int, site: Callable[[Kind], Site], named: Value
) -> list[InsertionPoint]:
    marker = markers.activations.get(number)
    if marker is None:
        return []
    activation = site("activation")
    if not (activation.dtype.is_floating_point or activation.dtype.is_complex):
        return []
    node = _marked(marker)
    return [InsertionPoint(activation, node, marker, order[marker], layout=named.layout, is_part=named.is_part)]


def _points_of_error(
    markers: Markers, order: Mapping[fx.Node, int], number: int, site: Callable[[Kind], Site], named: Value
) -> list[InsertionPoint]:
    marker = markers.errors.get(number)
    if marker is None:
        return []
    forward = markers.activations.get(number)
    return [
        InsertionPoint(
            site("error"),
            _marked(marker),
            marker,
            order[marker],
            marker=marker,
            value=None if forward is None else _marked(forward),
            layout=named.error_layout,
            value_layout=named.layout,
            is_part=named.is_part,
        )
    ]


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
