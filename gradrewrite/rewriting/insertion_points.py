"""Insertion points: where the sites of a joint graph are."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from torch import fx

from gradrewrite._compat import aot_autograd
from gradrewrite.ir import editing
from gradrewrite.ir.inputs import Leaf
from gradrewrite.ir.markers import Markers, read_markers, value_of
from gradrewrite.ir.values import Value, shape_of
from gradrewrite.rewriting.naming import name_values
from gradrewrite.sites import Kind, Site


@dataclass
class Place:
    """Where a site stands in the graph, and how to let the graph read something else there.

    Attributes:
        site: The site.
        node: Its value, as the actions so far have left it.
        before: New nodes stand before this one.
        order: Place in the order of execution.
        marker: The marker of an error.
        output: Place of a gradient among the outputs.
    """

    site: Site
    node: fx.Node
    before: fx.Node
    order: int
    marker: fx.Node | None = None
    output: int | None = None


def find_places(graph: fx.Graph, values: Sequence[Value], leaves: Mapping[int, Leaf]) -> tuple[list[Place], list[Site]]:
    """All sites of a marked graph, and those whose error, or a part of it, is outside of it.

    Values come in execution order, then parameters, then inputs.
    """
    outputs = aot_autograd.gradient_outputs(graph)
    if not outputs:
        return [], []
    markers, order = read_markers(graph), {node: number for number, node in enumerate(graph.nodes)}
    regenerated = aot_autograd.regenerated_outputs(graph)
    places: list[Place] = []
    outside: list[Site] = []
    for number, site in name_values(values).items():
        value = values[number]
        places += _places_of_activation(markers, order, number, site)
        is_lost = value.is_returned and value.fake.requires_grad and number not in markers.errors
        is_lost |= value.is_bypassed and value.fake.requires_grad
        if is_lost or value.returned_through & regenerated:
            outside.append(site("error"))
        else:
            places += _places_of_error(markers, order, number, site)
    returned = editing.outputs_of(graph.output_node())
    for kind_is_parameter in (True, False):
        for position, leaf_position in outputs:
            node, leaf = returned[position], leaves.get(leaf_position)
            if isinstance(node, fx.Node) and leaf is not None and leaf.is_parameter == kind_is_parameter:
                place = Place(_site_of_leaf(node, leaf), node, graph.output_node(), order[node], output=position)
                places.append(place)
    return places, outside


def _places_of_activation(
    markers: Markers, order: Mapping[fx.Node, int], number: int, site: Callable[[Kind], Site]
) -> list[Place]:
    marker = markers.activations.get(number)
    if marker is None:
        return []
    activation = site("activation")
    if not (activation.dtype.is_floating_point or activation.dtype.is_complex):
        return []
    return [Place(activation, _marked(marker), marker, order[marker])]


def _places_of_error(
    markers: Markers, order: Mapping[fx.Node, int], number: int, site: Callable[[Kind], Site]
) -> list[Place]:
    marker = markers.errors.get(number)
    if marker is None:
        return []
    return [Place(site("error"), _marked(marker), marker, order[marker], marker=marker)]


def _site_of_leaf(node: fx.Node, leaf: Leaf) -> Site:
    value = value_of(node)
    return Site(
        kind="gradient" if leaf.is_parameter else "input",
        name=leaf.name,
        module=leaf.name.rpartition(".")[0] if leaf.is_parameter else "",
        shape=shape_of(value),
        dtype=value.dtype,
        device=value.device,
    )


def _marked(marker: fx.Node) -> fx.Node:
    node = marker.args[0]
    assert isinstance(node, fx.Node)
    return node
