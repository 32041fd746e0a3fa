"""Attribution of joint-graph nodes to torch-level ops, for their provenance."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace

import torch
from torch import fx

from gradrewrite._compat import aot_autograd
from gradrewrite.ir import markers
from gradrewrite.ir.edits import Edit
from gradrewrite.ir.marked_graph import MarkedJointGraph
from gradrewrite.ir.markers import number_of
from gradrewrite.ir.provenance import Anchor, Lane, Origin, Provenance
from gradrewrite.ir.values import Value
from gradrewrite.sites import Site

_MARKERS = (*markers.IDENTITIES, *markers.ON_FORWARD)


def attribute_nodes(
    graph: fx.Graph, backward: Collection[str], inserted: Mapping[str, int] | None = None
) -> dict[fx.Node, int]:
    """Return each node's torch-level op, as the number of the op's value.

    AOTAutograd ran the forward op after op, so there the next marker ends the op. A node of the backward belongs to the
    nearest error that it is computed from: to the backward of the op that made that value. A factor that the backward
    computes from forward values alone belongs to its first user. Nodes before any error have none. So it is with the
    nodes of a gradient inside of the forward: they belong to ops whose backward runs there.
    ``inserted`` names nodes that act on an error, with its number: what follows reads them, not the marker.
    """
    nodes = list(graph.nodes)
    numbers = dict(inserted or {})
    numbers |= {n.name: number_of(n) for n in nodes if n.target is markers.mark_error and n.name in backward}
    nearest = _nearest_errors(nodes, backward, numbers)
    found = {node: numbers[nodes[at].name] for node, at in nearest.items()}
    for number, own in _by_marker(nodes, backward):
        found.update(dict.fromkeys(own, number))
    return found | inner_gradient_nodes(graph, backward)


def inner_gradient_nodes(graph: fx.Graph, backward: Collection[str]) -> dict[fx.Node, int]:
    """Return the nodes of gradients inside of the forward, each with the number of the differentiated op."""
    found: dict[fx.Node, int] = {}
    for number, own in _by_marker(list(graph.nodes), backward):
        errors = {node.name: number_of(node) for node in own if node.target is markers.mark_error}
        if errors:
            nearest = _nearest_errors(own, {node.name for node in own}, errors)
            found |= {node: errors[own[nearest[node]].name] if node in nearest else number for node in own}
    return found


def _by_marker(nodes: Sequence[fx.Node], backward: Collection[str]) -> Iterator[tuple[int, list[fx.Node]]]:
    """Yield the numbers of activations, with the nodes of the forward between the marker before and their own."""
    waiting: list[fx.Node] = []
    for node in nodes:
        if node.target is markers.mark_activation:
            yield number_of(node), waiting
            waiting = []
        elif node.op == "call_function" and node.name not in backward:
            waiting.append(node)


def backward_names(graph: fx.Graph) -> frozenset[str]:
    """Return the names of the nodes of the backward."""
    return frozenset(n.name for n in graph.nodes if n.op == "call_function" and aot_autograd.is_backward(n))


def _nearest_errors(nodes: Sequence[fx.Node], backward: Collection[str], errors: Collection[str]) -> dict[fx.Node, int]:
    """Return, by node of the backward, the position of the last of ``errors`` that it is computed from."""
    order = {node: number for number, node in enumerate(nodes)}
    nearest: dict[fx.Node, int] = {}
    for node in nodes:
        if node.name in errors:
            nearest[node] = order[node]
        elif node.name in backward:
            read = [nearest[n] for n in node.all_input_nodes if n in nearest]
            if read:
                nearest[node] = max(read)
    for node in reversed(nodes):
        if node.name in backward and node not in nearest:
            users = [u for u in node.users if u in nearest]
            if users:
                nearest[node] = nearest[min(users, key=order.__getitem__)]
    return nearest


def read_provenance(marked: MarkedJointGraph) -> Provenance:
    """Read origins and outputs of a marked joint graph; anchors come from the rewrite."""
    graph = marked.graph
    backward = backward_names(graph)
    attributed, ops, inner = (
        attribute_nodes(graph, backward),
        _ops(marked.values),
        inner_gradient_nodes(graph, backward),
    )
    last = max(ops, default=0)
    origins = {}
    for node in graph.nodes:
        if node.op == "call_function" and node.target not in _MARKERS:
            written = _written(node)
            number = attributed.get(node if written is None else written, last)
            is_forward = node.name not in backward or written is not None
            lane: Lane = "inner" if node in inner else _lane(is_forward)
            origins[node.name] = replace(ops.get(number, Origin("forward", last)), lane=lane)
    for node in graph.nodes:
        if node.op == "get_attr":  # a constant of the model, or the body of a higher-order op
            users = [origins[u.name] for u in node.users if u.name in origins]
            origins[node.name] = users[0] if users else Origin("forward", last)
    origins |= _of_placeholders(marked, origins, last)
    return Provenance(origins, outputs=_outputs(marked))


def _written(node: fx.Node) -> fx.Node | None:
    into, *rest = node.args or (None,)
    is_update = node.target is torch.ops.aten.copy_.default and isinstance(into, fx.Node) and into.op == "placeholder"
    return rest[0] if is_update and isinstance(rest[0], fx.Node) else None


def _lane(is_forward: bool) -> Lane:
    return "forward" if is_forward else "backward"


def with_edits(
    provenance: Provenance,
    anchors: Mapping[Site, Anchor],
    edits: Sequence[Edit],
    record_nodes: Iterable[fx.Node],
    copies: Mapping[str, tuple[str, int | None]],
    restoring: Collection[str] = (),
) -> Provenance:
    """Add the anchors and the inserted nodes of a rewrite; these have the provenance of their site.

    ``copies`` has nodes in the place of others, ``restoring`` those that restore saved tensors;
    see ``RewriteResult``.
    """
    known_origins = {**provenance.origins}
    for name, (plain, loss) in copies.items():  # in the order in which they were inserted
        known_origins[name] = replace(known_origins[plain], loss=loss)
    provenance = replace(provenance, origins=known_origins)
    # A gradient may be a node that was inserted at the backward of an op.
    of_ops = {name: anchors[edit.site].order for edit in edits for name in edit.nodes if edit.site.kind == "backward"}
    ordered = {origin.order: origin for origin in [*known_origins.values()][::-1]}
    missing = {name: n for name, n in of_ops.items() if name not in known_origins}
    known_origins |= {
        name: replace(ordered.get(n, Origin("backward", n)), lane="backward") for name, n in missing.items()
    }
    known = {  # parameters and inputs, of order -1, belong where their node does
        site: anchor if anchor.order >= 0 else Anchor(anchor.node, provenance.origins[anchor.node].order)
        for site, anchor in anchors.items()
    }
    by_order: dict[int, Origin] = {}
    for origin in provenance.origins.values():  # those of ops come before those of placeholders
        by_order.setdefault(origin.order, origin)
    origins = dict(provenance.origins)
    for edit in edits:
        order = known[edit.site].order
        if order not in by_order:  # a result of an op that makes several: the op belongs to the first
            order = max((n for n in by_order if n < order), default=min(by_order))
        origin = replace(by_order[order], lane=_lane(edit.site.traits.in_forward))
        origins.update(dict.fromkeys(edit.nodes, origin))
        origins.update(dict.fromkeys(filter(restoring.__contains__, edit.nodes), replace(origin, lane="backward")))
    for node in record_nodes:
        origins[node.name] = Origin(_lane(not aot_autograd.is_backward(node)), -1, op="records")
    return Provenance(origins, known, provenance.outputs)


def _ops(values: Sequence[Value]) -> dict[int, Origin]:
    numbers: dict[tuple[str, str, str], int] = {}
    counts: Counter[str] = Counter()
    ops = {}
    for number, value in enumerate(values):
        if value.same_as is not None:
            continue
        calls = []
        for call in value.calls:
            if call not in numbers:
                numbers[call] = counts[call[0]]
                counts[call[0]] += 1
            if call[0]:
                calls.append((call[0], numbers[call]))
        ops[number] = Origin("forward", number, tuple(calls), value.op, source=value.source)
    return ops


def _of_placeholders(marked: MarkedJointGraph, origins: Mapping[str, Origin], last: int) -> dict[str, Origin]:
    graph = marked.graph
    inputs, tangents = aot_autograd.plain_inputs(graph), aot_autograd.tangents(graph)
    found = {}
    for node in graph.find_nodes(op="placeholder"):
        users = [origins[u.name] for u in node.users if u.name in origins]
        first = min(users, key=lambda o: (o.lane == "backward", o.order), default=Origin("forward", last))
        known = marked.inputs.get(inputs.get(node, -1))
        if node in tangents:
            found[node.name] = replace(first, lane="backward", op="outside", source="")
        elif known is None:
            found[node.name] = replace(first, lane="forward", op="input", name=node.name, source="")
        else:
            found[node.name] = replace(first, lane="forward", op=known.role, name=known.name, source="")
    return found


def _outputs(marked: MarkedJointGraph) -> tuple[str, ...]:
    graph = marked.graph
    returned = graph.output_node().args[0]
    assert isinstance(returned, list | tuple)
    names = [""] * len(returned)
    for number, position in enumerate(aot_autograd.output_positions(graph)):
        names[position] = f"output:{number}"
    for position, input_position in aot_autograd.gradient_outputs(graph):
        given = marked.inputs.get(input_position)
        if given is not None and given.has_site:
            names[position] = f"{'gradient' if given.role == 'parameter' else 'input'}:{given.name}"
    return tuple(names)
