"""The pipeline: sites -> policy -> traced actions -> edits, on one joint graph."""

from __future__ import annotations

import weakref
from collections import defaultdict
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, fx

from gradrewrite import _torch, edit
from gradrewrite.errors import PolicyError
from gradrewrite.joint import Edit, JointGraph, Markers, number_of, read_markers, value_of
from gradrewrite.policy import AdaptingAction, GroupAction, Policy, ask
from gradrewrite.probes import Value, name_values, shape_of
from gradrewrite.recipe import Given, Recipe
from gradrewrite.records import Carried, Check
from gradrewrite.reports import Report, Reports
from gradrewrite.sites import Kind, Site
from gradrewrite.statistics import measure
from gradrewrite.tracing import Mode, Traced, Tracer, action_key, check_dense, trace_function

ScaleOf = Callable[[torch.device], Tensor]

# From this many measured sites on, statistics of errors and activations are opaque too: see docs/design.md.
MANY = 64


@dataclass(frozen=True, slots=True)
class Leaf:
    """A differentiable input of the Dynamo graph: a parameter (with a reference to it), or an argument."""

    is_parameter: bool
    name: str
    ref: weakref.ref[Tensor] | None = None


@dataclass(frozen=True, slots=True)
class Rewritten:
    """What a rewrite did to a joint graph.

    Attributes:
        sites: All sites.
        edits: What was inserted.
        carriers: Names of the nodes that carry records out.
        carried: What leaves the graph beside the gradients.
        live: The tensors that the graph reads at every backward, by name.
        out_of_reach: Sites at which the policy answered but which are outside the graph, with the answers.
        recipe: What a replay of a failed step needs; None where nothing is checked.
    """

    sites: tuple[Site, ...]
    edits: tuple[Edit, ...]
    carriers: tuple[str, ...]
    carried: Carried
    live: Mapping[str, Tensor]
    out_of_reach: tuple[tuple[Site, tuple[Any, ...]], ...]
    recipe: Recipe | None


@dataclass
class _Place:
    """Where a site stands in the graph, and how to let the graph read something else there."""

    site: Site
    node: fx.Node
    before: fx.Node
    order: int
    marker: fx.Node | None = None
    output: int | None = None


def rewrite(
    graph: fx.Graph,
    values: Sequence[Value],
    leaves: Mapping[int, Leaf],
    policy: Policy,
    *,
    given: Mapping[int, Given] | None = None,
    scale_of: ScaleOf | None = None,
) -> Rewritten:
    """Ask the policy at every site of a joint graph and insert its answers; all markers go.

    Args:
        graph: The joint graph with the markers of the probes; changed in place.
        values: What the probes stand behind, by their number.
        leaves: The differentiable inputs of the Dynamo graph, by position.
        policy: The policy.
        given: What all inputs of the Dynamo graph are, by position.
        scale_of: The loss scale on a device; None if there is none.

    Returns:
        The sites, the edits, and what leaves the graph beside the gradients.

    Raises:
        PolicyError: An answer is nonsense or cannot stand where it was given.
        CallbackError: A tensor function breaks its contract.
    """
    rewriter = _Rewriter(graph, scale_of)
    places = rewriter.find_places(values, leaves)
    answers = [ask(policy, place.site) for place in places]
    rewriter.num_measured = sum(any(isinstance(a, AdaptingAction) for a in actions) for actions in answers)
    for place, actions in zip(places, answers, strict=True):
        rewriter.insert(place, [a for a in actions if not isinstance(a, GroupAction)])
    rewriter.insert_groups([(p, a) for p, actions in zip(places, answers, strict=True) for a in actions])
    recipe = rewriter.note_recipe(places, given or {})
    carriers = rewriter.carry_out()
    edit.erase_markers(graph)
    live = edit.live_tensors(graph)
    if live or recipe is not None:
        _torch.stop_folding()
    lost = [(site, ask(policy, site)) for site in rewriter.out_of_reach]
    return Rewritten(
        sites=(*(p.site for p in places), *rewriter.out_of_reach),
        edits=tuple(rewriter.edits),
        carriers=carriers,
        carried=rewriter.reports.carried(),
        live=live,
        out_of_reach=tuple((site, actions) for site, actions in lost if actions),
        recipe=recipe,
    )


def show(
    gm: fx.GraphModule,
    values: Sequence[Value],
    leaves: Mapping[int, Leaf],
    policy: Policy,
    *,
    given: Mapping[int, Given] | None = None,
    scale_of: ScaleOf | None = None,
) -> JointGraph:
    """Rewrite a joint graph and show it beside the graph as it was."""
    before = edit.copy_of(gm)
    edit.erase_markers(before.graph)
    before.recompile()
    result = rewrite(gm.graph, values, leaves, policy, given=given, scale_of=scale_of)
    gm.graph.lint()
    gm.recompile()
    return JointGraph(gm, result.sites, result.edits, result.carriers, JointGraph(before, result.sites))


class _Rewriter:
    def __init__(self, graph: fx.Graph, scale_of: ScaleOf | None) -> None:
        self.graph = graph
        self.num_measured = 0
        self._scale_of = scale_of
        self._order = {node: number for number, node in enumerate(graph.nodes)}
        self.edits: list[Edit] = []
        self.out_of_reach: list[Site] = []
        self.reports = Reports()
        self._tracer = Tracer()

    def find_places(self, values: Sequence[Value], leaves: Mapping[int, Leaf]) -> list[_Place]:
        """All sites of the graph: values in execution order, then parameters, then inputs."""
        markers = read_markers(self.graph)
        outputs = _torch.gradient_outputs(self.graph)
        if not outputs:
            return []
        places = []
        for number, site in name_values(values).items():
            places += self._places_of_value(markers, number, site)
            value = values[number]
            if value.is_returned and value.fake.requires_grad and number not in markers.errors:
                self.out_of_reach.append(site("error"))
        returned = edit.outputs_of(self.graph.output_node())
        for kind_is_parameter in (True, False):
            for position, leaf_position in outputs:
                node, leaf = returned[position], leaves.get(leaf_position)
                if isinstance(node, fx.Node) and leaf is not None and leaf.is_parameter == kind_is_parameter:
                    places.append(self._place_of_leaf(node, leaf, position))
        return places

    def _places_of_value(self, markers: Markers, number: int, site: Callable[[Kind], Site]) -> list[_Place]:
        places = []
        marker = markers.activations.get(number)
        if marker is not None:
            activation = site("activation")
            if activation.dtype.is_floating_point or activation.dtype.is_complex:
                places.append(_Place(activation, _marked(marker), marker, self._order[marker]))
        marker = markers.errors.get(number)
        if marker is not None:
            places.append(_Place(site("error"), _marked(marker), marker, self._order[marker], marker=marker))
        return places

    def _place_of_leaf(self, node: fx.Node, leaf: Leaf, position: int) -> _Place:
        value = value_of(node)
        site = Site(
            kind="gradient" if leaf.is_parameter else "input",
            name=leaf.name,
            module=leaf.name.rpartition(".")[0] if leaf.is_parameter else "",
            shape=shape_of(value),
            dtype=value.dtype,
            device=value.device,
        )
        return _Place(site, node, self.graph.output_node(), self._order[node], output=position)

    def insert(self, place: _Place, actions: Sequence[Any]) -> None:
        """Insert the actions of one site, in order."""
        current = place.node
        for action in actions:
            traced = self._tracer.trace(action, place.site, value_of(current), self._mode(place.site))
            seen = current
            (current, *extras), new = self._splice(traced, [current], place)
            self.edits.append(Edit(place.site, action, tuple(n.name for n in new)))
            addresses = self.reports.add(str(place.site), place.site, traced, extras)
            if traced.fails is not None:
                check = Check(place.site, traced.fails, addresses[-1], place.order, seen.name)
                self.reports.checks.append(check)
        if current is not place.node:
            self._replace(place, current)

    def _mode(self, site: Site) -> Mode:
        is_opaque = site.kind in ("gradient", "input") or self.num_measured > MANY
        has_scale = self._scale_of is not None and site.kind != "activation"
        return Mode(is_opaque, self._scale_of(site.device) if has_scale and self._scale_of is not None else None)

    def insert_groups(self, answers: Sequence[tuple[_Place, Any]]) -> None:
        """Insert the group actions; the sites of a group are treated together."""
        groups: dict[tuple[type, Hashable], dict[int, tuple[_Place, GroupAction]]] = defaultdict(dict)
        for place, action in answers:
            if isinstance(action, GroupAction):
                members = groups[type(action), action.group]
                members.setdefault(id(place), (place, action))
                _check_same(next(iter(members.values())), (place, action))
        for members in groups.values():
            first = next(iter(members.values()))
            self._insert_group([place for place, _ in members.values()], first[1])

    def _insert_group(self, places: list[_Place], action: GroupAction) -> None:
        sites = [p.site for p in places]
        nodes = [p.node for p in places]
        for place in places:
            check_dense(action, place.site, value_of(place.node))
        mode = self._mode(sites[0])
        traced = trace_function(lambda *g: action.apply_group(g), [value_of(n) for n in nodes], sites, action, mode)
        outputs, new = self._splice(traced, nodes, places[0])
        results, extras = outputs[: len(places)], outputs[len(places) :]
        for place, nodes_of_site in zip(places, _shares(new, nodes, results), strict=True):
            self.edits.append(Edit(place.site, action, nodes_of_site))
        self.reports.add(f"group:{action.group}", sites[0], traced, extras)
        self.reports.groups.append(str(action.group))
        for place, result in zip(places, results, strict=True):
            self._replace(place, result)

    def _splice(self, traced: Traced, nodes: list[fx.Node], place: _Place) -> tuple[list[fx.Node], list[fx.Node]]:
        if place.site.kind == "activation":
            tag = "is_forward"
        else:
            tag = "must_be_in_backward" if traced.has_live else "is_backward"
        return edit.splice(traced.graph, self.graph, nodes, place.before, tag)

    def _replace(self, place: _Place, result: fx.Node) -> None:
        if place.marker is not None:
            edit.reroute(place.marker, result)
        elif place.output is not None:
            edit.replace_output(self.graph, place.output, result)
        place.node = result  # of an activation too, which only the next action reads: the forward is never changed

    def carry_out(self) -> tuple[str, ...]:
        """Pack the records and hold what leaves the graph; returns the names of the new nodes."""
        packs, new = self.reports.pack_into(self.graph)
        held = packs + [node for _, node in self.reports.kept]
        if held:
            new.append(edit.hold(self.graph, held))
        return tuple(n.name for n in new)

    def note_recipe(self, places: Sequence[_Place], given: Mapping[int, Given]) -> Recipe | None:
        """Count what comes into a checked graph, and keep a copy of the graph for a replay."""
        if not self.reports.checks:
            return None
        inputs = {
            node: given[position]
            for node, position in _torch.plain_inputs(self.graph).items()
            if position in given and isinstance(node.meta.get("val"), Tensor)
        }
        tangents = _torch.tangents(self.graph)
        first = next(node for node in self.graph.nodes if node.op != "placeholder")
        for node, name in (
            *((n, f"data:{g.name}") for n, g in inputs.items() if g.role == "input"),
            *((n, f"outside:{number}") for number, n in enumerate(tangents)),
        ):
            if value_of(node).dtype.is_floating_point:
                self._count(node, name, first, is_forward=node not in tangents)
        return Recipe(
            graph=edit.copy_of_nodes(self.graph),
            activations=self._sites_by_value(places, "activation"),
            errors=self._sites_by_value(places, "error"),
            gradients={p.output: p.site for p in places if p.output is not None},
            actions={name: e for e in self.edits for name in e.nodes},
            given={node.name: g for node, g in inputs.items()},
            tangents=tuple(node.name for node in tangents),
            backward=frozenset(n.name for n in self.graph.nodes if n.op == "call_function" and _torch.is_backward(n)),
            is_random=any(_torch.is_random(node) for node in self.graph.nodes),
        )

    def _count(self, node: fx.Node, where: str, before: fx.Node, *, is_forward: bool) -> None:
        graph = _torch.trace(lambda x: [measure(x, ["nonfinite"], is_opaque=True)], [value_of(node)])
        tag = "is_forward" if is_forward else "is_backward"
        (count,), _ = edit.splice(graph, self.graph, [node], before, tag)
        self.reports.records.append(Report((f"nonfinite@{where}",), count, is_forward))

    def _sites_by_value(self, places: Sequence[_Place], kind: Kind) -> dict[int, Site]:
        numbers = {p.before: p.site for p in places if p.site.kind == kind}
        return {number_of(node): site for node, site in numbers.items()}


def _marked(marker: fx.Node) -> fx.Node:
    node = marker.args[0]
    assert isinstance(node, fx.Node)
    return node


def _check_same(first: tuple[_Place, GroupAction], other: tuple[_Place, GroupAction]) -> None:
    if action_key(first[1]) != action_key(other[1]):
        raise PolicyError(
            f"{other[0].site}: {other[1]!r} and {first[1]!r} at {first[0].site} are in one group {first[1].group!r}, "
            "which has one bound and one norm type; give one of them another group"
        )


_SHARED = -1


def _shares(new: Sequence[fx.Node], inputs: Sequence[fx.Node], results: Sequence[fx.Node]) -> list[tuple[str, ...]]:
    """Which member of a group each new node belongs to; what several need belongs to the first."""
    reads = {node: i for i, node in enumerate(inputs)}
    for node in new:
        reads[node] = _joined(reads.get(a) for a in node.all_input_nodes)
    feeds = {node: i for i, node in enumerate(results)}
    for node in reversed(new):
        feeds[node] = _joined([feeds.get(node), *(feeds.get(u) for u in node.users)])
    shares: list[list[str]] = [[] for _ in inputs]
    for node in new:
        owner = feeds[node] if feeds[node] != _SHARED else reads[node]
        shares[max(owner, 0)].append(node.name)
    return [tuple(names) for names in shares]


def _joined(owners: Iterable[int | None]) -> int:
    """The one owner among these, if there is just one."""
    known = {owner for owner in owners if owner is not None}
    return known.pop() if len(known) == 1 else _SHARED
