"""The pipeline: sites -> policy -> traced actions -> edits, on one joint graph."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, fx

from gradrewrite._compat import aot_autograd, fake_tensors, inductor, make_fx, operators
from gradrewrite.errors import PolicyError
from gradrewrite.ir import editing, ops
from gradrewrite.ir.edits import Edit
from gradrewrite.ir.inputs import Given, Leaf
from gradrewrite.ir.joint_graph import JointGraph
from gradrewrite.ir.markers import number_of, value_of
from gradrewrite.ir.ops import measure, measure_all
from gradrewrite.ir.provenance import Anchor, read_origins, with_edits
from gradrewrite.ir.record_layout import Carried, Check
from gradrewrite.ir.replay_graph import Recipe
from gradrewrite.ir.statistics import IN_UNITS
from gradrewrite.ir.values import Value
from gradrewrite.policy.actions import AdaptingAction, GroupAction, MeasuringAction, Policy
from gradrewrite.policy.rules import Answered, ask, ask_in_order
from gradrewrite.rewriting.action_tracing import Mode, Traced, Tracer, action_key, check_dense, trace_function
from gradrewrite.rewriting.insertion_points import Place, find_places
from gradrewrite.rewriting.record_packing import Report, Reports
from gradrewrite.sites import Kind, Site

ScaleOf = Callable[[torch.device], Tensor]

# From this many measured errors and activations on, their statistics are opaque too: see docs/design.md.
MANY = 64


@dataclass(frozen=True, slots=True)
class Rewritten:
    """What a rewrite did to a joint graph.

    Attributes:
        sites: All sites.
        edits: What was inserted.
        carriers: Names of the nodes that carry records out.
        anchors: Where the sites of the graph stand.
        carried: What leaves the graph beside the gradients.
        live: The tensors that the graph reads at every backward, by name.
        out_of_reach: Sites at which the policy answered but which are outside the graph, with the answers.
        recipe: What a replay of a failed step needs; None where nothing is checked.
        assumes: Whether an action assumes something of a size that depends on data. Such an assumption becomes part of
            the code of the forward and the backward, but not of the key under which Inductor stores that code.
    """

    sites: tuple[Site, ...]
    edits: tuple[Edit, ...]
    carriers: tuple[str, ...]
    anchors: Mapping[Site, Anchor]
    carried: Carried
    live: Mapping[str, Tensor]
    out_of_reach: tuple[tuple[Site, tuple[Any, ...]], ...]
    recipe: Recipe | None
    assumes: bool


def rewrite(
    graph: fx.Graph,
    values: Sequence[Value],
    leaves: Mapping[int, Leaf],
    policy: Policy,
    *,
    given: Mapping[int, Given] | None = None,
    scale_of: ScaleOf | None = None,
    is_last: bool = True,
) -> Rewritten:
    """Ask the policy at every site of a joint graph and insert its answers; all markers go.

    Args:
        graph: The joint graph with the markers of the probes; changed in place.
        values: What the probes stand behind, by their number.
        leaves: The differentiable inputs of the Dynamo graph, by position.
        policy: The policy.
        given: What all inputs of the Dynamo graph are, by position.
        scale_of: The loss scale on a device; None if there is none.
        is_last: Whether the gradients of its outputs come from outside of the model, not from behind a graph break.

    Returns:
        The sites, the edits, and what leaves the graph beside the gradients.

    Raises:
        PolicyError: An answer is nonsense or cannot stand where it was given.
        CallbackError: A tensor function breaks its contract.
    """
    rewriter = _Rewriter(graph, scale_of)
    assumed = fake_tensors.assumptions(graph)
    places, out_of_reach = find_places(graph, values, leaves)
    anchors = {place.site: _anchor(place) for place in places}
    answers = [(place, ask_in_order(policy, place.site)) for place in places]
    rewriter.num_measured = sum(place.output is None and _is_measured(found) for place, found in answers)
    for place, found in answers:
        rewriter.insert(place, [a.action for a in found if not isinstance(a.action, GroupAction)])
    rewriter.insert_measured()
    rewriter.insert_groups([(place, answered) for place, found in answers for answered in found])
    recipe = rewriter.note_recipe(places, given or {}, is_last=is_last)
    carriers = rewriter.carry_out()
    editing.erase_markers(graph)
    live = editing.live_tensors(graph)
    if live or recipe is not None:
        inductor.stop_folding()
    lost = [(site, ask(policy, site)) for site in out_of_reach]
    return Rewritten(
        sites=(*(p.site for p in places), *out_of_reach),
        edits=tuple(rewriter.edits),
        carriers=carriers,
        anchors=anchors,
        carried=rewriter.reports.carried(),
        live=live,
        out_of_reach=tuple((site, actions) for site, actions in lost if actions),
        recipe=recipe,
        assumes=fake_tensors.assumptions(graph) != assumed,
    )


class _Rewriter:
    def __init__(self, graph: fx.Graph, scale_of: ScaleOf | None) -> None:
        self.graph = graph
        self.num_measured = 0
        self._scale_of = scale_of
        self.edits: list[Edit] = []
        self.reports = Reports()
        self.counters: list[str] = []  # nodes that count in what comes and goes
        self._tracer = Tracer()
        self._measured: list[tuple[Place, MeasuringAction, int]] = []  # with the numbers of their edits

    def insert(self, place: Place, actions: Sequence[Any]) -> None:
        """Insert the actions of one site, in order."""
        current = place.node
        now, later = self._split(place, actions)
        for action in now:
            traced = self._tracer.trace(action, place.site, value_of(current), self._mode(place.site))
            seen = current
            (current, *extras), new = self._splice(traced, [current], place)
            self.edits.append(Edit(place.site, action, tuple(n.name for n in new)))
            addresses = self.reports.add(str(place.site), place.site, traced, extras)
            if traced.fails is not None:
                self._check(place, traced.fails, addresses[-1], seen)
        if current is not place.node:
            self._replace(place, current)
        for action, measuring in later:
            self._measured.append((place, measuring, len(self.edits)))
            self.edits.append(Edit(place.site, action, ()))

    def _split(self, place: Place, actions: Sequence[Any]) -> tuple[list[Any], list[tuple[Any, MeasuringAction]]]:
        """The actions of a gradient that only measure it at the end: those of all gradients are one operation."""
        now = list(actions)
        later: list[tuple[Any, MeasuringAction]] = []
        while now and (measuring := self._measuring(place, now[-1])) is not None:
            later.insert(0, (now.pop(), measuring))
        return now, later

    def _measuring(self, place: Place, action: Any) -> MeasuringAction | None:
        """What an action measures at a gradient, if that can be put off."""
        value = value_of(place.node)
        if place.output is None or value.layout is not torch.strided or value.is_complex():
            return None
        found = action.at(place.site) if isinstance(action, AdaptingAction) else action
        if not isinstance(found, MeasuringAction):
            return None
        is_scaled = self._mode(place.site).scale is not None and IN_UNITS.intersection(found.measures.values())
        return None if is_scaled else found

    def insert_measured(self) -> None:
        """Measure the gradients that were put off, with one operation for each kind of measurement."""
        groups: dict[Hashable, list[tuple[Place, MeasuringAction, int]]] = defaultdict(list)
        for member in self._measured:
            place, action, _ = member
            if action.measures:
                groups[tuple(action.measures.items()), action.fails, place.site.device].append(member)
        for members in groups.values():
            self._insert_measured(members)

    def _insert_measured(self, members: Sequence[tuple[Place, MeasuringAction, int]]) -> None:
        first, action, number = members[0]
        nodes = [place.node for place, _, _ in members]
        keys = list(action.measures.values())
        graph = make_fx.trace(lambda *xs: [measure_all(xs, keys)], [value_of(n) for n in nodes])
        (figures,), new = editing.splice(graph, self.graph, nodes, self.graph.output_node(), "is_backward")
        self.edits[number] = Edit(first.site, self.edits[number].action, tuple(n.name for n in new))
        addresses: list[str] = []
        for place, _, _ in members:
            own = self.reports.addresses.new(action.measures, str(place.site))
            addresses += own
            if action.fails is not None:
                self._check(place, action.fails, own[-1], place.node)
        self.reports.records.append(Report(tuple(addresses), figures, False, action.fails == "skip"))

    def _check(self, place: Place, fails: Any, address: str, seen: fx.Node) -> None:
        self.reports.checks.append(Check(place.site, fails, address, place.order, seen.name))

    def _mode(self, site: Site) -> Mode:
        is_opaque = site.kind in ("gradient", "input") or self.num_measured > MANY
        has_scale = self._scale_of is not None and site.kind != "activation"
        return Mode(is_opaque, self._scale_of(site.device) if has_scale and self._scale_of is not None else None)

    def insert_groups(self, answers: Sequence[tuple[Place, Answered]]) -> None:
        """Insert the group actions; the sites of a group are treated together.

        Groups come in the order in which the policy list names them; those of one callback in the order of its sites.
        """
        groups: dict[tuple[type, Hashable], dict[int, tuple[Place, GroupAction]]] = defaultdict(dict)
        named_at: dict[tuple[type, Hashable], tuple[int, ...]] = {}
        for place, answered in answers:
            action = answered.action
            if isinstance(action, GroupAction):
                key = (type(action), action.group)
                groups[key].setdefault(id(place), (place, action))
                _check_same(next(iter(groups[key].values())), (place, action))
                named_at[key] = min(named_at.get(key, answered.position), answered.position)
        for key in sorted(groups, key=named_at.__getitem__):  # stable: equal positions stay in the order of sites
            members = groups[key]
            first = next(iter(members.values()))
            self._insert_group([place for place, _ in members.values()], first[1])

    def _insert_group(self, places: list[Place], action: GroupAction) -> None:
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

    def _splice(self, traced: Traced, nodes: list[fx.Node], place: Place) -> tuple[list[fx.Node], list[fx.Node]]:
        if place.site.kind == "activation":
            tag = "is_forward"
        else:
            tag = "must_be_in_backward" if traced.has_live else "is_backward"
        return editing.splice(traced.graph, self.graph, nodes, place.before, tag)

    def _replace(self, place: Place, result: fx.Node) -> None:
        if place.marker is not None:
            editing.reroute(place.marker, result)
        elif place.output is not None:
            editing.replace_output(self.graph, place.output, result)
        place.node = result  # of an activation too, which only the next action reads: the forward is never changed

    def carry_out(self) -> tuple[str, ...]:
        """Pack the records and hold what leaves the graph; returns the names of the new nodes."""
        packs, new = self.reports.pack_into(self.graph)
        held = packs + [node for _, node in self.reports.kept]
        if held:
            new.append(editing.hold(self.graph, held))
        return (*self.counters, *(n.name for n in new))

    def note_recipe(self, places: Sequence[Place], given: Mapping[int, Given], *, is_last: bool) -> Recipe | None:
        """Count what comes into a checked graph, and keep a copy of the graph for a replay."""
        if not self.reports.checks:
            return None
        inputs = {
            node: given[position]
            for node, position in aot_autograd.plain_inputs(self.graph).items()
            if position in given and isinstance(node.meta.get("val"), Tensor)
        }
        tangents = aot_autograd.tangents(self.graph)
        self._count_what_comes_and_goes(inputs, tangents if is_last else [])
        return Recipe(
            graph=editing.copy_of_nodes(self.graph),
            activations=self._sites_by_value(places, "activation"),
            errors=self._sites_by_value(places, "error"),
            gradients={p.output: p.site for p in places if p.output is not None},
            actions={name: e for e in self.edits for name in e.nodes},
            given={node.name: g for node, g in inputs.items()},
            tangents=tuple(node.name for node in tangents),
            backward=frozenset(
                n.name for n in self.graph.nodes if n.op == "call_function" and aot_autograd.is_backward(n)
            ),
            is_random=any(operators.is_random(node) for node in self.graph.nodes),
        )

    def _count_what_comes_and_goes(self, inputs: Mapping[fx.Node, Given], tangents: Sequence[fx.Node]) -> None:
        """Count in inputs, outputs and gradients from outside: what tells a faulty input from a faulty loss."""
        first = next(node for node in self.graph.nodes if node.op != "placeholder")
        for node, known in inputs.items():
            if known.role == "input":
                self._count(node, f"data:{known.name}", first, True, "nan" if known.is_mask else "nonfinite")
        if tangents:
            for number, node in enumerate(aot_autograd.forward_outputs(self.graph)):
                self._count(node, f"output:{number}", self.graph.output_node(), True)
        for number, node in enumerate(tangents):
            self._count(node, f"outside:{number}", first, False)

    def _count(self, node: fx.Node, where: str, before: fx.Node, is_forward: bool, name: str = "nonfinite") -> None:
        value = node.meta.get("val")
        if not isinstance(value, Tensor) or not value.dtype.is_floating_point or value.layout is not torch.strided:
            return
        graph = make_fx.trace(lambda x: [measure(x, [name], is_opaque=True)], [value])
        tag = "is_forward" if is_forward else "is_backward"
        (count,), new = editing.splice(graph, self.graph, [node], before, tag)
        self.counters += [n.name for n in new]
        self.reports.records.append(Report(tuple(self.reports.addresses.new([name], where)), count, is_forward))

    def _sites_by_value(self, places: Sequence[Place], kind: Kind) -> dict[int, Site]:
        numbers = {p.before: p.site for p in places if p.site.kind == kind}
        return {number_of(node): site for node, site in numbers.items()}


def _is_measured(found: Sequence[Answered]) -> bool:
    return any(isinstance(answered.action, AdaptingAction) for answered in found)


def _anchor(place: Place) -> Anchor:
    node, marker = place.node, place.marker or (place.before if place.site.kind == "activation" else None)
    while node.target is ops.mark_error:  # an error that passes through an op unchanged
        node = node.all_input_nodes[0]
    return Anchor(node.name, -1 if marker is None else number_of(marker))


def _check_same(first: tuple[Place, GroupAction], other: tuple[Place, GroupAction]) -> None:
    if action_key(first[1]) != action_key(other[1]):
        raise PolicyError(
            f"{other[0].site}: {other[1]!r} and {first[1]!r} at {first[0].site} are in one group {first[1].group!r}, "
            "which has one bound and one norm type; give one of them another group"
        )


_SHARED = -1


def _shares(new: Sequence[fx.Node], inputs: Sequence[fx.Node], results: Sequence[fx.Node]) -> list[tuple[str, ...]]:
    """Which member of a group each new node belongs to; what several need belongs to the first."""
    reads: dict[fx.Node, int | None] = {node: i for i, node in enumerate(inputs)}
    for node in new:
        reads[node] = _joined(reads.get(a) for a in node.all_input_nodes)
    feeds: dict[fx.Node, int | None] = {node: i for i, node in enumerate(results)}
    for node in reversed(new):
        feeds[node] = _joined([feeds.get(node), *(feeds.get(u) for u in node.users)])
    owner: dict[fx.Node, int | None] = {}
    for node in reversed(new):
        known = [owner_ for owner_ in (feeds[node], reads[node]) if owner_ not in (None, _SHARED)]
        owner[node] = known[0] if known else (reads[node] or _joined(owner.get(u) for u in node.users))
    shares: list[list[str]] = [[] for _ in inputs]
    for node in new:
        shares[max(owner[node] or 0, 0)].append(node.name)
    return [tuple(names) for names in shares]


def _joined(owners: Iterable[int | None]) -> int | None:
    """The one owner among these; None if nobody owns them (a constant)."""
    known = {owner for owner in owners if owner is not None}
    return known.pop() if len(known) == 1 else (_SHARED if known else None)


def show(
    gm: fx.GraphModule,
    values: Sequence[Value],
    leaves: Mapping[int, Leaf],
    policy: Policy,
    *,
    given: Mapping[int, Given] | None = None,
    scale_of: ScaleOf | None = None,
) -> tuple[JointGraph, tuple[tuple[Site, tuple[Any, ...]], ...]]:
    """Rewrite a joint graph and show it beside the graph as it was; and the answers at sites that are out of reach."""
    meaning = read_origins(gm.graph, values, leaves, given or {})
    before = editing.copy_of(gm)
    editing.erase_markers(before.graph)
    before.recompile()  # the copy had the markers
    result = rewrite(gm.graph, values, leaves, policy, given=given, scale_of=scale_of)
    gm.graph.lint()
    after = editing.copy_of(gm)  # as plain as the graph before: AOTAutograd's own has two lists for its inputs
    carriers = [node for node in after.graph.nodes if node.name in result.carriers]
    meaning = with_edits(meaning, result.anchors, result.edits, carriers)
    plain = JointGraph(before, result.sites, meaning=meaning)
    return JointGraph(after, result.sites, result.edits, result.carriers, plain, meaning), result.out_of_reach
