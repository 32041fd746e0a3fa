"""Insertion points: where in a joint graph the sites are."""

from __future__ import annotations

import functools
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor, fx

from gradrewrite._compat import aot_autograd
from gradrewrite.distributed.layouts import Layout
from gradrewrite.instrumentation.naming import name_values
from gradrewrite.ir import editing, markers
from gradrewrite.ir.inputs import GraphInput
from gradrewrite.ir.marked_graph import MarkedJointGraph
from gradrewrite.ir.markers import number_of, read_markers, value_of
from gradrewrite.ir.provenance import Anchor
from gradrewrite.ir.values import ModuleCall, shape_of
from gradrewrite.sites import Site


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
    calls: tuple[ModuleCall, ...] = ()  # of modules around the op that made the value, outermost first
    is_sum: bool = False  # the value is added up to be measured; nothing reads it
    replicas: int = 1  # how many ranks have the same value
    loss: int | None = None  # number of the loss that the value is the gradient of; None of all
    records_of: str = ""  # the name of the loss that its records are of: this one, or the only one here

    def __post_init__(self) -> None:
        """Note the ranks of a DTensor: the global one is measured."""
        if self.layout is not None:
            self.replicas = self.layout.mesh.size()


@dataclass
class FoundPoints:
    """The insertion points of a joint graph, and sites without one.

    Attributes:
        points: Values in execution order, then parameters, then inputs.
        outside: Sites whose error is outside of the graph, if only in part.
        subclasses: Sites of tensor subclasses other than DTensors, by the name of the class; of gradients ``""``.
        refused: Single uses without an error of their own, and why.
    """

    points: list[InsertionPoint] = field(default_factory=list)
    outside: list[Site] = field(default_factory=list)
    subclasses: dict[Site, str] = field(default_factory=dict)
    refused: dict[Site, str] = field(default_factory=dict)


def find_insertion_points(marked: MarkedJointGraph) -> FoundPoints:
    """Find the insertion points."""
    found = FoundPoints()
    if not aot_autograd.has_gradients(marked.graph):
        return found
    _find_values(marked, found)
    order = {node: number for number, node in enumerate(marked.graph.nodes)}
    gradients = _points_of_gradients(marked, order)
    found.points += sorted(gradients, key=lambda point: not point.site.traits.of_parameter)
    for position, node in aot_autograd.subclass_gradients(marked.graph).items():
        given = marked.inputs.get(position)
        if given is not None and given.has_site:
            found.subclasses[_site_of_gradient(node, given, None)] = ""
    return found


def _find_values(marked: MarkedJointGraph, found: FoundPoints) -> None:
    activations, errors = read_markers(marked.graph)
    sums = _add_up_parts(marked, errors)
    order = {node: number for number, node in enumerate(marked.graph.nodes)}
    regenerated = aot_autograd.regenerated_outputs(marked.graph)
    points, outside, used = found.points, found.outside, editing.take_used(marked.graph)
    for number, site_at in name_values(marked.values, marked.call, marked.counts).items():
        value, forward, marker = marked.values[number], activations.get(number), errors.get(number)
        if value.refusal:
            found.refused[site_at("error")] = value.refusal
            continue
        if forward is not None:
            site, node = site_at("activation"), forward.all_input_nodes[0]
            if site.dtype.is_floating_point or site.dtype.is_complex:
                point = InsertionPoint(site, node, forward, order[forward], layout=value.layout, is_part=value.is_part)
                point.calls = value.calls
                points.append(point)
        # Nothing reads the marker of an error that leads to zeros alone (of ``sgn``).
        if value.subclass:
            found.subclasses |= dict.fromkeys((site_at("activation"), site_at("error")), value.subclass)
            continue
        is_lost = value.is_returned and value.fake.requires_grad and not value.has_error
        is_lost |= value.is_bypassed and value.fake.requires_grad
        if is_lost or value.returned_through & regenerated:
            outside.append(site_at("error"))
        elif marker is not None:
            site, node = site_at("error"), marker.all_input_nodes[0]
            point = InsertionPoint(site, node, marker, order[marker], marker=marker, is_part=value.is_part)
            point.value = used.get(number) if forward is None else forward.all_input_nodes[0]
            point.layout, point.value_layout = value.error_layout, value.layout
            point.is_sum, point.calls = number in sums, value.calls
            points.append(point)


def _add_up_parts(marked: MarkedJointGraph, errors: dict[int, fx.Node]) -> set[int]:
    """Add up the errors of values that single uses of another value have taken parts of; return their numbers.

    A value with one part of its error alone has that in the place of its marker.
    """
    numbers = {id(value): number for number, value in enumerate(marked.values)}
    own: dict[int, list[fx.Node]] = {}
    for number, value in enumerate(marked.values):
        if (source := value.source_of_use) is not None and value.destination is None and number in errors:
            own.setdefault(numbers[id(source)], []).append(errors[number])
    added = set()
    for number, parts in own.items():
        nodes = sorted([*parts, *([errors[number]] if number in errors else [])])
        if len(nodes) == 1:
            errors[number] = nodes[0]
            continue
        graph, given = marked.graph, [node.all_input_nodes[0] for node in nodes]
        (total,), _ = editing.compute(graph, _total, given, nodes[-1].next)
        errors[number] = editing.insert_call(graph, markers.mark_error, (total, number), total.next, "is_backward")
        added.add(number)
    return added


def _total(*errors: Tensor) -> tuple[Tensor, ...]:
    return (functools.reduce(torch.add, errors),)


def _points_of_gradients(marked: MarkedJointGraph, order: Mapping[fx.Node, int]) -> Iterator[InsertionPoint]:
    graph, layouts = marked.graph, marked.layouts
    returned = editing.outputs_of(graph.output_node())
    placeholders = {position: node for node, position in aot_autograd.plain_inputs(graph).items()}
    for position, input_position in aot_autograd.gradient_outputs(graph):
        node, given = returned[position], marked.inputs.get(input_position)
        if isinstance(node, fx.Node) and given is not None and given.has_site:
            layout = layouts.gradients.get(input_position)
            site, before = _site_of_gradient(node, given, layout), graph.output_node()
            point = InsertionPoint(site, node, before, order[node], output=position, layout=layout)
            point.value, point.value_layout = placeholders.get(input_position), layouts.values.get(input_position)
            yield point


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


def anchors_of(points: Sequence[InsertionPoint]) -> dict[Site, Anchor]:
    """Return the places of the sites of points in the graph, for pictures."""
    made_by: dict[fx.Node, fx.Node] = {}  # by marker; each chain is followed once
    anchors = {}
    for point in points:
        node, chain = point.node, []
        while node.target is markers.mark_error and node not in made_by:
            chain.append(node)
            node = node.all_input_nodes[0]
        node = made_by.get(node, node)
        made_by.update(dict.fromkeys(chain, node))
        marker = point.marker or (
            point.before if point.before.target in (markers.mark_activation, markers.mark_error) else None
        )
        anchors[point.site] = Anchor(node.name, -1 if marker is None else number_of(marker))
    return anchors
