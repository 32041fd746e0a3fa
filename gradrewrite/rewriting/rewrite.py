"""The rewrite of a joint graph: sites, the policy's answers, traced actions, edits."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor, fx

from gradrewrite._compat import aot_autograd, fake_tensors, inductor, operators
from gradrewrite.ir import editing, ops
from gradrewrite.ir.attribution import read_provenance, with_edits
from gradrewrite.ir.bases import base_of
from gradrewrite.ir.edits import Edit
from gradrewrite.ir.inputs import GraphInput
from gradrewrite.ir.joint_graph import JointGraph
from gradrewrite.ir.marked_graph import MarkedJointGraph
from gradrewrite.ir.markers import value_of
from gradrewrite.ir.ops import number_of
from gradrewrite.ir.provenance import Anchor
from gradrewrite.ir.record_layout import BackwardOutputs, Check, RecordKey
from gradrewrite.ir.replay_graph import ReplayGraph
from gradrewrite.ir.statistics import IN_UNITS
from gradrewrite.policy.actions import GroupAction, Measurement, SpecializingAction
from gradrewrite.policy.rules import Answered, ask_in_order
from gradrewrite.rewriting.action_tracing import ActionTracer, TracedAction, TraceMode, check_dense, trace_function
from gradrewrite.rewriting.boundary_counters import insert_boundary_counters
from gradrewrite.rewriting.config import RewriteConfig
from gradrewrite.rewriting.group_actions import groups_of, share_nodes
from gradrewrite.rewriting.insertion_points import InsertionPoint, find_insertion_points
from gradrewrite.rewriting.record_nodes import RecordNode
from gradrewrite.rewriting.record_packing import RecordPacking
from gradrewrite.sites import Kind, Site

# From this many measured errors and activations on, their statistics are opaque, except on CUDA: see docs/design.md.
MANY = 64
# Where errors and activations are always measured by an operation of our own, which reads memory at full speed.
MEASURED_APART = frozenset(("cpu",))


@dataclass(frozen=True, slots=True)
class RewriteResult:
    """The result of the rewrite of a joint graph.

    Attributes:
        sites: All sites.
        answers: The answers of the policy, site by site.
        edits: What was inserted.
        record_nodes: Names of the nodes that carry records out of the graph.
        anchors: The nodes of the sites.
        outputs: The auxiliary outputs of the backward.
        live: The tensors that the graph reads at every backward, by name.
        out_of_reach: Sites at which the policy answered but which are outside the graph, with the answers.
        replay_graph: What a replay of a failed step needs; None where nothing is checked.
        assumes: Whether an action assumes something of a size that depends on data. Such an assumption becomes part of
            the code of the forward and the backward, but not of the key under which Inductor stores that code.
    """

    sites: tuple[Site, ...]
    answers: tuple[tuple[Answered, ...], ...]
    edits: tuple[Edit, ...]
    record_nodes: tuple[str, ...]
    anchors: Mapping[Site, Anchor]
    outputs: BackwardOutputs
    live: Mapping[str, Tensor]
    out_of_reach: tuple[tuple[Site, tuple[Any, ...]], ...]
    replay_graph: ReplayGraph | None
    assumes: bool


def rewrite_joint_graph(
    marked: MarkedJointGraph, config: RewriteConfig, asked: Mapping[Site, tuple[Answered, ...]] = MappingProxyType({})
) -> RewriteResult:
    """Ask the policy at every site of a joint graph and insert its answers; all markers go.

    Args:
        marked: The joint graph; changed in place.
        config: The policy, and the loss scale.
        asked: Sites at which the policy was asked already, with its answers.

    Returns:
        The sites, the edits, and the auxiliary outputs of the backward.

    Raises:
        PolicyError: An answer is nonsense or not allowed where it was given.
        CallbackError: A tensor function breaks its contract.
    """
    graph = marked.graph
    rewriter = _Rewriter(marked, config)
    assumed = fake_tensors.assumptions(graph)
    points, out_of_reach = find_insertion_points(marked)
    anchors = {point.site: _anchor(point) for point in points}

    def ask(site: Site) -> tuple[Answered, ...]:
        return asked[site] if site in asked else ask_in_order(config.policy, site)

    answers = [(point, ask(point.site)) for point in points]
    rewriter.num_measured = sum(point.output is None and _is_measured(found) for point, found in answers)
    rewriter.changed = {
        point.marker
        for point, found in answers
        if point.marker is not None and not all(_only_measures(a.action, point.site) for a in found)
    }
    for point, found in answers:
        rewriter.insert(point, [a.action for a in found if not isinstance(a.action, GroupAction)])
    for action, members in groups_of(answers):
        rewriter.insert_group(action, members)
    rewriter.packing.follow(rewriter.current, graph)
    replay_graph = rewriter.make_replay_graph(points)
    outputs, record_nodes = rewriter.packing.pack_into(graph)
    editing.erase_markers(graph)
    live = editing.live_tensors(graph)
    if live or replay_graph is not None:
        inductor.stop_folding()
    lost = [(site, ask(site)) for site in out_of_reach]
    return RewriteResult(
        sites=(*(point.site for point in points), *out_of_reach),
        answers=(*(found for _, found in answers), *(found for _, found in lost)),
        edits=tuple(rewriter.edits),
        record_nodes=(*rewriter.counters, *(node.name for node in record_nodes)),
        anchors=anchors,
        outputs=outputs,
        live=live,
        out_of_reach=tuple((site, tuple(a.action for a in found)) for site, found in lost if found),
        replay_graph=replay_graph,
        assumes=fake_tensors.assumptions(graph) != assumed,
    )


def rewrite_and_compare(marked: MarkedJointGraph, config: RewriteConfig) -> tuple[JointGraph, RewriteResult]:
    """Rewrite a joint graph, and return it beside a copy of the graph as it was; see ``rewrite_joint_graph``."""
    gm = marked.graph.owning_module
    assert gm is not None
    provenance = read_provenance(marked)
    before = editing.copy_of(gm)
    editing.erase_markers(before.graph)
    before.recompile()  # the copy had the markers
    result = rewrite_joint_graph(marked, config)
    gm.graph.lint()
    after = editing.copy_of(gm)  # as plain as the graph before: AOTAutograd's own has two lists for its inputs
    record_nodes = [node for node in after.graph.nodes if node.name in result.record_nodes]
    provenance = with_edits(provenance, result.anchors, result.edits, record_nodes)
    plain = JointGraph(before, result.sites, provenance=provenance)
    return JointGraph(after, result.sites, result.edits, result.record_nodes, plain, provenance), result


class _Rewriter:
    """The edits of one rewrite, as they are made."""

    def __init__(self, marked: MarkedJointGraph, config: RewriteConfig) -> None:
        self.graph = marked.graph
        self.num_measured = 0
        self._marked = marked
        self._scale = config.loss_scale
        self.edits: list[Edit] = []
        self.packing = RecordPacking()
        self.counters: list[str] = []  # nodes of boundary counters
        self.changed: set[fx.Node] = set()  # markers of errors that actions change
        self._replaced: dict[fx.Node, fx.Node] = {}  # what is read instead of a marker since
        self._tracer = ActionTracer()

    def insert(self, point: InsertionPoint, actions: Sequence[Any]) -> None:
        """Insert the actions of one site, in order."""
        current = point.node = self.current(point.node)
        now, later = self._split(point, actions)
        for action in now:
            seen = current
            if _is_on_cuda(current) and _only_measures(action, point.site):
                base = base_of(current, self.changed)  # equal measurements are one in the compiled graph
                traced = self._tracer.trace(action, point.site, value_of(base), self._mode(point.site))
                (_, *extras), new = self._splice(traced, [base], point)
            else:
                traced = self._tracer.trace(action, point.site, value_of(current), self._mode(point.site))
                (current, *extras), new = self._splice(traced, [current], point)
            self.edits.append(Edit(point.site, action, tuple(n.name for n in new)))
            keys = self.packing.add(str(point.site), point.site, traced, extras)
            if traced.fails is not None:
                self._check(point, traced.fails, keys[-1], seen)
        if current is not point.node:
            self._replace(point, current)
        for action, measurement in later:
            self.edits.append(Edit(point.site, action, ()))
            self._measure(point, measurement)

    def _split(self, point: InsertionPoint, actions: Sequence[Any]) -> tuple[list[Any], list[tuple[Any, Measurement]]]:
        """The actions before, and the last ones that only measure: several values are measured by one operation."""
        now = list(actions)
        later: list[tuple[Any, Measurement]] = []
        while now and (measurement := self._measurement(point, now[-1])) is not None:
            later.insert(0, (now.pop(), measurement))
        return now, later

    def _measurement(self, point: InsertionPoint, action: Any) -> Measurement | None:
        """Return the measurement of an action, if it can be put off: at gradients, and where all is measured apart."""
        value = value_of(point.node)
        is_put_off = point.output is not None or value.device.type in MEASURED_APART
        is_traced = _is_on_cuda(point.node)
        if not is_put_off or is_traced or value.layout is not torch.strided or value.is_complex():
            return None
        found = action.specialize(point.site) if isinstance(action, SpecializingAction) else action
        if not isinstance(found, Measurement):
            return None
        is_scaled = self._mode(point.site).scale is not None and IN_UNITS.intersection(found.statistics.values())
        return None if is_scaled else found

    def _measure(self, point: InsertionPoint, measurement: Measurement) -> None:
        """Let a value be measured beside others."""
        if not measurement.statistics:
            return
        keys = tuple(self.packing.numbering.new(measurement.statistics, str(point.site)))
        statistics, is_forward = tuple(measurement.statistics.values()), point.site.kind == "activation"
        skips = measurement.fails == "skip"
        self.packing.records.append(RecordNode(keys, point.node, is_forward, skips, statistics))
        if measurement.fails is not None:
            self._check(point, measurement.fails, keys[-1], point.node)

    def _check(self, point: InsertionPoint, fails: Any, key: RecordKey, seen: fx.Node) -> None:
        self.packing.checks.append(Check(point.site, fails, key, point.order, seen.name))

    def _mode(self, site: Site) -> TraceMode:
        # On CUDA first stages fuse with what makes the tensor, and the others are launched together.
        is_apart = site.device.type in MEASURED_APART or site.kind in ("gradient", "input")
        is_opaque = site.device.type != "cuda" and (is_apart or self.num_measured > MANY)
        has_scale = self._scale is not None and site.kind != "activation"
        return TraceMode(is_opaque, self._scale.on(site.device) if has_scale and self._scale is not None else None)

    def insert_group(self, action: GroupAction, points: Sequence[InsertionPoint]) -> None:
        """Insert one group action; its sites are treated together."""
        sites = [p.site for p in points]
        nodes = [self.current(p.node) for p in points]
        for point in points:
            check_dense(action, point.site, value_of(point.node))
        mode = self._mode(sites[0])
        traced = trace_function(lambda *g: action.apply_group(g), [value_of(n) for n in nodes], sites, action, mode)
        outputs, new = self._splice(traced, nodes, points[0])
        results, extras = outputs[: len(points)], outputs[len(points) :]
        for point, names in zip(points, share_nodes(new, nodes, results), strict=True):
            self.edits.append(Edit(point.site, action, names))
        self.packing.add(f"group:{action.group}", sites[0], traced, extras)
        self.packing.groups.append(str(action.group))
        for point, result in zip(points, results, strict=True):
            self._replace(point, result)

    def _splice(
        self, traced: TracedAction, nodes: list[fx.Node], point: InsertionPoint
    ) -> tuple[list[fx.Node], list[fx.Node]]:
        if point.site.kind == "activation":
            tag = "is_forward"
        else:
            tag = "must_be_in_backward" if traced.has_live else "is_backward"
        return editing.splice(traced.graph, self.graph, nodes, point.before, tag)

    def current(self, node: fx.Node) -> fx.Node:
        """Return the node that is read instead of a node now.

        An error that passes an op unchanged (the sum of a residual) is the marker of another site, whose actions may
        replace it later.
        """
        while node in self._replaced:
            node = self._replaced[node]
        return node

    def _replace(self, point: InsertionPoint, result: fx.Node) -> None:
        if point.marker is not None:
            editing.reroute(point.marker, result)
            self._replaced[point.marker] = result
        elif point.output is not None:
            editing.replace_output(self.graph, point.output, result)
        point.node = result  # of an activation too, which only the next action reads: the forward is never changed

    def make_replay_graph(self, points: Sequence[InsertionPoint]) -> ReplayGraph | None:
        """Count at the boundary of a checked graph, and copy the graph for a replay; None if nothing is checked."""
        if not self.packing.checks:
            return None
        inputs = {
            node: self._marked.inputs[position]
            for node, position in aot_autograd.plain_inputs(self.graph).items()
            if position in self._marked.inputs and isinstance(node.meta.get("val"), Tensor)
        }
        tangents = aot_autograd.tangents(self.graph)
        self._count_at_boundary(inputs, tangents if self._marked.is_last else [])
        return ReplayGraph(
            graph=editing.copy_of_nodes(self.graph),
            activations=_sites_by_value(points, "activation"),
            errors=_sites_by_value(points, "error"),
            gradients={p.output: p.site for p in points if p.output is not None},
            actions={name: e for e in self.edits for name in e.nodes},
            inputs={node.name: given for node, given in inputs.items()},
            tangents=tuple(node.name for node in tangents),
            backward=frozenset(
                n.name for n in self.graph.nodes if n.op == "call_function" and aot_autograd.is_backward(n)
            ),
            is_random=any(operators.is_random(node) for node in self.graph.nodes),
        )

    def _count_at_boundary(self, inputs: Mapping[fx.Node, GraphInput], tangents: Sequence[fx.Node]) -> None:
        records, names = insert_boundary_counters(self.graph, inputs, tangents, self.packing.numbering)
        self.packing.records += records
        self.counters += names


def _sites_by_value(points: Sequence[InsertionPoint], kind: Kind) -> dict[int, Site]:
    numbers = {p.before: p.site for p in points if p.site.kind == kind}
    return {number_of(node): site for node, site in numbers.items()}


def _is_on_cuda(node: fx.Node) -> bool:
    return value_of(node).device.type == "cuda"


def _only_measures(action: Any, site: Site) -> bool:
    found = action.specialize(site) if isinstance(action, SpecializingAction) else action
    return isinstance(found, Measurement)


def _is_measured(found: Sequence[Answered]) -> bool:
    return any(isinstance(answered.action, SpecializingAction) for answered in found)


def _anchor(point: InsertionPoint) -> Anchor:
    node, marker = point.node, point.marker or (point.before if point.site.kind == "activation" else None)
    while node.target is ops.mark_error:  # an error that passes through an op unchanged
        node = node.all_input_nodes[0]
    return Anchor(node.name, -1 if marker is None else number_of(marker))
