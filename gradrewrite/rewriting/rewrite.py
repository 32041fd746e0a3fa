"""The rewrite of a joint graph: sites, the policy's answers, traced actions, edits."""

from __future__ import annotations

import functools
import inspect
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from types import MappingProxyType
from typing import Any, TypeAlias

import torch
from torch import Tensor, fx
from typing_extensions import assert_never

from gradrewrite._compat import aot_autograd, collectives, fake_tensors, inductor, make_fx, operators
from gradrewrite._utils.formatting import listed
from gradrewrite._utils.progress import current_progress
from gradrewrite.distributed.buckets import bucket_order
from gradrewrite.distributed.layouts import Layout
from gradrewrite.errors import CallbackError, UnsupportedGradientError
from gradrewrite.ir import editing, ops
from gradrewrite.ir.attribution import backward_names, read_provenance, with_edits
from gradrewrite.ir.bases import base_of
from gradrewrite.ir.edits import Edit
from gradrewrite.ir.joint_graph import JointGraph
from gradrewrite.ir.marked_graph import MarkedJointGraph
from gradrewrite.ir.markers import value_of
from gradrewrite.ir.ops import number_of
from gradrewrite.ir.provenance import Anchor
from gradrewrite.ir.record_key import RecordKey
from gradrewrite.ir.record_layout import BackwardOutputs, FiniteCheck, MeasuredTensor
from gradrewrite.ir.replay_graph import ReplayGraph
from gradrewrite.ir.reports import Check, Kept
from gradrewrite.ir.scaling import scale_where
from gradrewrite.ir.statistics import IN_UNITS, norm_of
from gradrewrite.ir.values import num_bytes, shape_of
from gradrewrite.policy.actions import describe
from gradrewrite.policy.insertions import (
    AverageOverRanks,
    Insertion,
    JudgeUpdate,
    KeepTensor,
    MeasureTensor,
    Omitted,
    PerExample,
    RecomputeSaved,
    ReplaceGroup,
    ReplaceTensor,
    ScaleGroup,
    ScaleParameter,
    StoreSaved,
    WeighExampleGradients,
    WeighLossGradients,
)
from gradrewrite.policy.recording import Recording, current_recording, recording
from gradrewrite.policy.rules import Answered, ask_in_order
from gradrewrite.policy.sampling import Measured, sampled
from gradrewrite.policy.scope import Context, refuse
from gradrewrite.policy.state_store import StateScope, StateStore
from gradrewrite.rewriting.action_tracing import ActionTracer, TracedAction, TraceMode, check_dense, trace_function
from gradrewrite.rewriting.boundary_counters import insert_boundary_counters
from gradrewrite.rewriting.config import RewriteConfig
from gradrewrite.rewriting.example_gradients import Asked, ExampleGradients, drop_replaced
from gradrewrite.rewriting.forward_values import ForwardValues
from gradrewrite.rewriting.insertion_points import InsertionPoint, find_insertion_points
from gradrewrite.rewriting.loss_gradients import AsksForLosses, LossGradients, Rows, unbound_as, weighted_sum
from gradrewrite.rewriting.loss_scale import LossScale
from gradrewrite.rewriting.loss_weighing import SeparatedPlan, Weighing, check_weighing, separate, tensor_type_of
from gradrewrite.rewriting.lowering import Group, InsertionPlan, lower, reads_losses
from gradrewrite.rewriting.record_nodes import RecordNode, RecordNumbering
from gradrewrite.rewriting.record_packing import RecordPacking
from gradrewrite.rewriting.saved_forms import SavedInsertion, SavedRewrite, find_saved
from gradrewrite.rewriting.saved_tensors import SavedTensors
from gradrewrite.sites import IN_FORWARD, Kind, Site

# From this many measured errors and activations on, their statistics are opaque, except on CUDA: see docs/design.md.
MANY = 64
# Where errors and activations are always measured by an operation of our own, which reads memory at full speed.
MEASURED_APART = frozenset(("cpu",))


@dataclass(frozen=True, slots=True)
class RewriteResult:
    """The result of the rewrite of a joint graph."""

    sites: tuple[Site, ...]
    answers: tuple[tuple[Answered, ...], ...]  # of the policy, site by site
    edits: tuple[Edit, ...]
    record_nodes: tuple[str, ...]  # names of the nodes that carry records out of the graph
    anchors: Mapping[Site, Anchor]
    outputs: BackwardOutputs
    live: Mapping[str, Tensor]  # what the graph reads at every backward, by name
    out_of_reach: tuple[tuple[Site, tuple[Insertion, ...]], ...]  # answered, but outside of the graph
    replay_graph: ReplayGraph | None  # None where nothing is checked
    # Whether an action assumes something of a size that depends on data. Such an assumption becomes part of the code of
    # the forward and the backward, but not of the key under which Inductor stores that code.
    assumes: bool
    # Edits that reduce the plain part of a global tensor, of which each process knows its own alone.
    of_parts: tuple[Edit, ...] = ()
    # Nodes of the backward of single losses, by name; see ``LossGradients.copies``.
    copies_of_losses: Mapping[str, tuple[str, int | None]] = field(default_factory=dict)
    refused_outputs: frozenset[int] = frozenset()  # of the Dynamo graph: those may receive no gradient
    notes: tuple[str, ...] = ()  # for warnings
    saved: SavedRewrite = field(default_factory=SavedRewrite)
    candidates: tuple[Site, ...] = ()  # saved sites at which callbacks were asked, before it was known what is saved


def rewrite_joint_graph(
    marked: MarkedJointGraph,
    config: RewriteConfig,
    asked: Mapping[Site, tuple[Answered, ...]] = MappingProxyType({}),
    measured: Measured = "all",
    *,
    is_replayed: bool = False,
) -> RewriteResult:
    """Ask the policy at every site of a joint graph and insert its answers; all markers go.

    The graph is changed in place. Where the policy was asked already, its answers are in ``asked``. Of actions that
    only measure, those of ``measured`` are inserted. ``is_replayed``: a replay graph is made where nothing is checked
    too.
    """
    graph = marked.graph
    rewriter = Rewriter(graph, config.loss_scale, config.states, marked, config.label())
    assumed = fake_tensors.assumptions(graph)
    found_points = find_insertion_points(marked)
    points, out_of_reach = found_points.points, found_points.outside

    def ask(site: Site) -> tuple[Answered, ...]:
        return asked[site] if site in asked else ask_in_order(config.policy, site)

    answers = [(point, _possible(ask(point.site), value_of(point.node).layout)) for point in points]
    of_subclasses = {site: _possible(ask(site)) for site in found_points.subclasses}
    notes_of_subclasses = list(_check_subclasses(of_subclasses, found_points.subclasses))
    saved, candidates = find_saved(marked, config.policy, ask)
    plan = lower((point, sampled(found, measured)) for point, found in answers)
    separated = rewriter.follow(plan)
    plain = {point.output: point.node for point in points if point.output is not None}
    anchors = _anchors(separated.first_points(points))
    plain |= rewriter.insert_plan(separated)
    rewriter.packing.follow(rewriter.current, graph)
    kept = SavedRewrite() if saved is None else rewriter.insert_at_saved(saved, ask, measured)
    is_checked = bool(rewriter.packing.checks)
    all_points = separated.points_of(points)
    replay_graph = rewriter.make_replay_graph(all_points, marked, plain) if is_checked or is_replayed else None
    of_parts = rewriter.edits_of_parts([point for point in points if point.is_part])
    outputs, record_nodes = rewriter.packing.pack_into(graph, rewriter.forward)
    editing.erase_markers(graph)
    rewriter.erase_replaced()
    losses = rewriter.losses
    live = editing.live_tensors(graph)
    if live or (is_checked and replay_graph is not None):
        inductor.stop_folding()
    lost = [(site, ask(site)) for site in out_of_reach]
    anchors |= kept.anchors
    return RewriteResult(
        sites=(*(point.site for point in points), *out_of_reach, *of_subclasses, *kept.answers),
        answers=(
            *(found for _, found in answers),
            *(found for _, found in lost),
            *of_subclasses.values(),
            *kept.answers.values(),
        ),
        edits=tuple(rewriter.edits),
        record_nodes=(*rewriter.counters, *(node.name for node in record_nodes)),
        anchors=anchors,
        outputs=outputs,
        live=live,
        out_of_reach=tuple((site, tuple(a.insertion for a in found)) for site, found in lost if found),
        replay_graph=replay_graph,
        assumes=fake_tensors.assumptions(graph) != assumed,
        of_parts=of_parts,
        copies_of_losses={} if losses is None else losses.copies,
        refused_outputs=losses.losses.others if losses is not None and separated.weighings else frozenset(),
        notes=(*separated.notes, *kept.notes, *notes_of_subclasses),
        saved=kept,
        candidates=candidates,
    )


def _possible(answers: tuple[Answered, ...], layout: torch.layout | None = None) -> tuple[Answered, ...]:
    """Leave out lenient answers at sparse tensors and subclasses."""
    return answers if layout is torch.strided else tuple(found for found in answers if not found.is_lenient)


def _check_subclasses(answers: Mapping[Site, Sequence[Answered]], classes: Mapping[Site, str]) -> Iterator[str]:
    """Yield warnings for actions at values of tensor subclasses; UnsupportedGradientError for those at gradients."""
    by_class: dict[str, list[Site]] = {}
    for site, found in answers.items():
        if not found:
            continue
        if site.kind in ("gradient", "input"):
            raise UnsupportedGradientError(
                f"{site}: the gradient is a tensor subclass other than DTensor, and {describe(found[0].action)} takes "
                f"plain tensors and DTensors only. Let the policy leave this site alone: one that returns None at "
                f"{str(site)!r}, or patterns that do not match it"
            )
        by_class.setdefault(classes[site], []).append(site)
    for name, sites in by_class.items():
        yield (
            f"{listed(list(map(str, sites)))}: the policy answers at values that are a {name}, a tensor subclass other "
            "than DTensor. No action can act there, and nothing was inserted"
        )


def rewrite_and_compare(
    marked: MarkedJointGraph,
    config: RewriteConfig,
    asked: Mapping[Site, tuple[Answered, ...]] = MappingProxyType({}),
    measured: Measured = "all",
    *,
    is_replayed: bool = False,
) -> tuple[JointGraph, RewriteResult]:
    """Rewrite a joint graph, and return it beside a copy of the graph as it was; see ``rewrite_joint_graph``."""
    gm = marked.graph.owning_module
    assert gm is not None
    provenance = read_provenance(marked)
    before = editing.copy_of(gm)
    editing.erase_markers(before.graph)
    before.recompile()  # the copy had the markers
    result = rewrite_joint_graph(marked, config, asked, measured, is_replayed=is_replayed)
    gm.graph.lint()
    after = editing.copy_of(gm)  # as plain as the graph before: AOTAutograd's own has two lists for its inputs
    record_nodes = [node for node in after.graph.nodes if node.name in result.record_nodes]
    provenance = with_edits(
        provenance, result.anchors, result.edits, record_nodes, result.copies_of_losses, result.saved.restoring
    )
    plain = JointGraph(before, result.sites, provenance=provenance)
    return JointGraph(after, result.sites, result.edits, result.record_nodes, plain, provenance), result


class Rewriter:
    """The edits of one rewrite, as they are made."""

    def __init__(
        self,
        graph: fx.Graph,
        scale: LossScale | None = None,
        states: StateStore | None = None,
        marked: MarkedJointGraph | None = None,
        label: str = "",
    ) -> None:
        self.graph = graph
        self.examples = None if marked is None else ExampleGradients(marked)  # None where the inputs are not known
        self.num_measured = 0  # errors and activations
        self._is_whole = marked is None or marked.is_whole
        self._scale = scale
        self.edits: list[Edit] = []
        self.packing = RecordPacking(numbering=RecordNumbering(label))
        self.forward = ForwardValues(graph)
        self.counters: list[str] = []  # names of the nodes of boundary counters
        self.changed: set[fx.Node] = set()  # markers of errors that actions change
        self._averaged: set[str] = set()  # names of nodes
        self._replaced: dict[fx.Node, fx.Node] = {}  # what is read instead of a marker since
        self._tracer = ActionTracer()
        self._states = states
        self._scopes: dict[str, StateScope] = {}
        self.losses: LossGradients | None = None  # None where no action asks for those of single losses
        self._marked = marked
        self._loss_rows: dict[Site, Rows] = {}  # gradients of each loss, before any action

    def follow(self, plan: InsertionPlan) -> SeparatedPlan:
        """Take note of the measurements and changes to come, and take the backward of weighed losses apart."""
        separated = self._separate(plan)
        plan = separated.plan
        measured = [p for p, own in plan.single.items() if any(isinstance(i.effect, MeasureTensor) for i in own)]
        self.num_measured = sum(point.output is None for point in measured)
        changed = plan.changed().union(*(weighing.members for weighing in separated.weighings))
        self.changed = {point.marker for point in changed if point.marker is not None}
        return separated

    def _separate(self, plan: InsertionPlan) -> SeparatedPlan:
        reading = {p: i for p, own in plan.single.items() for i in own if reads_losses(i)}
        weighed = [group for group in plan.groups if isinstance(group.effect, WeighLossGradients)]
        if self._marked is None or not (reading or weighed):
            return SeparatedPlan(plan)
        is_part = not (self._marked.is_whole and self._marked.is_last)
        for point, insertion in reading.items():
            refuse(insertion, Context(point.site, tensor_type_of(point), is_part))
        groups = check_weighing(plan, is_part=is_part)
        asking = [AsksForLosses(insertion, point.site) for point, insertion in reading.items()]
        asking += [AsksForLosses(group.insertion, group.points[0].site) for group in groups]
        acting = {point.marker for point in plan.changed() if point.marker is not None}
        self.losses = LossGradients(self._marked, asking[0], acting)
        rows = self.losses.measured([point.node for point in reading])
        self._loss_rows = {point.site: own for point, own in zip(reading, rows, strict=True)}
        return separate(plan, groups, self.losses)

    def insert_plan(self, separated: SeparatedPlan) -> dict[int, fx.Node]:
        """Insert a whole plan; return the weighted sums of losses' gradients, by output."""
        plan = separated.plan
        sums: dict[int, fx.Node] = {}
        progress = current_progress()
        progress.begin("rewriting", len(plan.single))
        averaged: dict[InsertionPoint, Sequence[Insertion]] = {}
        for point, own in plan.single.items():
            if any(isinstance(insertion.effect, AverageOverRanks) for insertion in own):
                averaged[point] = own
            else:
                self.insert(point, own)
            progress.advance()
        of_examples = [group for group in plan.groups if isinstance(group.effect, WeighExampleGradients)]
        early = [group for group in of_examples if not averaged.keys().isdisjoint(group.points)]
        self.insert_bucketed(averaged, early)
        for weighing in separated.weighings:
            sums |= self.weigh_losses(weighing)
        for point, late in separated.late.items():
            point.records_of = None  # no longer the gradient of one loss
            self.insert(point, late)
        for group in plan.groups:
            if group not in early:
                self.insert_group(group)
        if self.examples is not None:
            self.examples.add_up_terms()
        return sums

    def insert_at_saved(
        self, saved: SavedTensors, ask: Callable[[Site], tuple[Answered, ...]], measured: Measured
    ) -> SavedRewrite:
        """Ask the policy at the saved tensors, and insert their forms."""
        insertion = SavedInsertion(self.graph, saved, self._tracer, self.packing, self.edits)
        further = [record.node for record in self.packing.records if not record.is_forward]
        insertion.ask(ask, measured, further)
        insertion.insert(self._mode)
        return insertion.result()

    def erase_replaced(self) -> None:
        """Take out nodes that nothing reads any more."""
        if self.examples is not None:
            drop_replaced(self.graph, self.examples.replaced)
        if self.losses is not None:
            editing.erase_unused(self.graph, self.losses.sums)

    def insert(self, point: InsertionPoint, insertions: Sequence[Insertion]) -> None:
        """Insert at one site, in order; averages come in buckets."""
        current = point.node = self.current(point.node)
        now, later = self._split(point, insertions)
        for insertion in now:
            seen = current
            match insertion.effect:
                case MeasureTensor() as effect if _is_on_cuda(current) and point.layout is None:
                    base = base_of(current, self.changed)  # equal measurements are one in the compiled graph
                    value, mode = value_of(base), self._mode_at(point)
                    traced = self._tracer.trace(insertion, effect.run, point.site, value, mode)
                    (_, *extras), new = self._splice(traced, [base], point)
                case MeasureTensor() | ReplaceTensor() | KeepTensor() as effect:
                    further = self._further_arguments(point, insertion, current)
                    value, *values = map(value_of, (current, *further))
                    mode, layouts = self._mode_at(point), _layouts_of(point, further)
                    traced = self._tracer.trace(insertion, effect.run, point.site, value, mode, values, layouts)
                    (current, *extras), new = self._splice(traced, [current, *further], point)
                case ScaleParameter():
                    check_dense(insertion.action, point.site, value_of(current))
                    self.note(point.site, insertion)
                    continue
                case Omitted(names):
                    self.packing.numbering.new(names, str(point.site), loss=point.records_of)
                    continue
                case (
                    AverageOverRanks()
                    | StoreSaved()
                    | RecomputeSaved()
                    | ReplaceGroup()
                    | ScaleGroup()
                    | WeighExampleGradients()
                    | WeighLossGradients()
                    | JudgeUpdate()
                ):
                    raise AssertionError(f"{insertion.action!r} is at no single point of a gradient")
                case _:
                    assert_never(insertion.effect)
            _check_kept(point, insertion, traced)
            given = insertion, str(point.site), point.site, traced.reports, extras
            keys, checks = self.packing.add(*given, replicas=point.replicas, loss=point.records_of)
            made = [node for source in (self.examples, self.losses) if source is not None for node in source.take_new()]
            self.note(point.site, insertion, tuple(n.name for n in (*made, *new)), tuple(keys))
            for check in checks:
                self.check(point, check, seen)
        if current is not point.node:
            self._replace(point, current)
        for insertion, measure in later:
            self.note(point.site, insertion)
            self._measure(point, insertion, measure)

    def note(
        self, site: Site, insertion: Insertion, nodes: tuple[str, ...] = (), keys: tuple[RecordKey, ...] = ()
    ) -> None:
        """List an edit."""
        self.edits.append(Edit(site, insertion.action, nodes, keys, insertion))

    def _further_arguments(self, point: InsertionPoint, insertion: Insertion, current: fx.Node) -> list[fx.Node]:
        reads = insertion.effect.reads if isinstance(insertion.effect, ReplaceTensor) else ""
        if isinstance(reads, PerExample):
            assert self.examples is not None
            return self.examples.quantities(point, current, Asked(insertion, reads), self._scale_on(point.site.device))
        if reads == "losses":
            assert self.losses is not None
            rows, scale = [self._loss_rows[point.site]], self._scale_on(point.site.device)
            is_opaque = point.site.device.type != "cuda"
            return [self.losses.gramian(rows, scale, point.before, is_opaque=is_opaque)]
        if reads != "value":
            return []
        if point.value is None:
            raise CallbackError(
                f"{point.site}: {describe(insertion.action)} has two required parameters, the gradient and what it is "
                "the gradient of, which this graph does not have; give the second one a default"
            )
        return [self.forward.for_backward(point.value)]

    def _split(
        self, point: InsertionPoint, insertions: Sequence[Insertion]
    ) -> tuple[list[Insertion], list[tuple[Insertion, MeasureTensor]]]:
        """Split off the last measurements: several values are measured by one operation."""
        now = list(insertions)
        later: list[tuple[Insertion, MeasureTensor]] = []
        while now and isinstance(measure := now[-1].effect, MeasureTensor) and self._is_put_off(point, measure):
            later.insert(0, (now.pop(), measure))
        return now, later

    def _is_put_off(self, point: InsertionPoint, measure: MeasureTensor) -> bool:
        """Return whether a measurement can be put off: at gradients, and where all is measured apart."""
        value = value_of(point.node)
        is_put_off = point.output is not None or value.device.type in MEASURED_APART
        is_traced = _is_on_cuda(point.node) or point.layout is not None
        if not is_put_off or is_traced or value.layout is not torch.strided or value.is_complex():
            return False
        return self._mode(point.site).scale is None or IN_UNITS.isdisjoint(measure.statistics.values())

    def _measure(self, point: InsertionPoint, insertion: Insertion, measure: MeasureTensor) -> None:
        if not measure.statistics:
            return
        keys = tuple(self.packing.numbering.new(measure.statistics, str(point.site), loss=point.records_of))
        self.packing.note_measured(insertion, keys, point.site, point.replicas)
        statistics, is_forward = tuple(measure.statistics.values()), point.site.kind in IN_FORWARD
        skips = measure.fails == "skip"
        self.packing.records.append(RecordNode(keys, point.node, is_forward, skips, statistics))
        self.packing.note_op(point.site)
        if measure.fails is not None:
            self.check(point, Check(keys[-1].record, keys[-1], measure.fails), point.node)

    def check(self, point: InsertionPoint, check: Check[RecordKey], seen: fx.Node) -> None:
        """Let the count of a check decide whether the value of a node is finite at a site."""
        self.packing.checks.append(FiniteCheck(point.site, check.on_failure, check.count, point.order, seen.name))

    def states_at(self, where: str) -> StateScope | None:
        """Return the states of the actions at a site, or of a group."""
        if self._states is None:
            return None
        return self._scopes.setdefault(where, self._states.scope(where))

    def _mode(self, site: Site, where: str = "") -> TraceMode:
        # On CUDA first stages fuse with what makes the tensor, and the others are launched together.
        is_apart = site.device.type in MEASURED_APART or site.kind in ("gradient", "input", "step")
        is_opaque = site.device.type != "cuda" and (is_apart or self.num_measured > MANY)
        scale = None if site.kind in IN_FORWARD else self._scale_on(site.device)
        return TraceMode(is_opaque, scale, self.states_at(where or str(site)))

    def _mode_at(self, point: InsertionPoint) -> TraceMode:
        # What acts on the gradient of each loss has states for each.
        return self._mode(point.site, f"{point.site}/loss{point.loss}" if point.loss is not None else "")

    def _scale_on(self, device: torch.device) -> Tensor | None:
        return None if self._scale is None else self._scale.on(device)

    def insert_bucketed(self, members: Mapping[InsertionPoint, Sequence[Insertion]], early: Sequence[Group]) -> None:
        """Insert at single sites that have averages among their insertions.

        What comes before the last of these is inserted right behind the gradient, so that their operations begin as
        soon as their gradients are there; what comes after it, at the end. Before the first bucket come ``early``
        groups, which act on the gradients of this process.
        """
        at_end = {point: point.before for point in members}
        rounds = {point: _rounds_of(insertions) for point, insertions in members.items()}
        while rounds:
            begun: list[_Averaged] = []
            for point, left in list(rounds.items()):
                single, average = left.pop(0)
                read = [self.current(point.node), *self._loss_rows.get(point.site, {}).values()]
                point.before = at_end[point] if average is None else self._behind(read)
                self.insert(point, single)
                if average is None:
                    del rounds[point]
                elif average[1].processes().size() == 1:
                    self.note(point.site, average[0])
                else:
                    begun.append((point, *average))
            for group in early:
                for point in group.points:
                    point.before = at_end.get(point, point.before)
                self.insert_group(group)
            early = ()
            nodes = {point: self.current(point.node) for point, *_ in begun}
            for bucket in _buckets_of(begun, nodes) if begun else ():
                self._insert_bucket(*bucket)

    def _insert_bucket(self, insertion: Insertion, average: AverageOverRanks, points: Sequence[InsertionPoint]) -> None:
        points = points[::-1]  # nodes of all of them are listed at the first: the gradient behind which they are
        nodes = [self.current(point.node) for point in points]
        values = [value_of(node) for node in nodes]
        for point, value in zip(points, values, strict=True):
            check_dense(insertion.action, point.site, value)
        begin = make_fx.trace(lambda *tensors: [average.begin(tensors)], values)
        (begun,), new = editing.splice(begin, self.graph, nodes, self._behind(nodes), "must_be_in_backward")
        end = make_fx.trace(lambda begun, *tensors: list(average.end(begun, tensors)), [value_of(begun), *values])
        end.graph.eliminate_dead_code()
        results, added = editing.splice(end, self.graph, [begun, *nodes], self.graph.output_node(), "is_backward")
        for point, names in zip(points, _share_nodes([*new, *added], nodes, results), strict=True):
            self.note(point.site, insertion, names)
            self._averaged.update(names)
        for point, result in zip(points, results, strict=True):
            point.replicas *= average.processes().size()
            self._replace(point, result)

    def _behind(self, nodes: Sequence[fx.Node]) -> fx.Node:
        """Return the node right behind these nodes and all inputs."""
        last_input = self.graph.find_nodes(op="placeholder")[-1]
        last: fx.Node = max([last_input, *nodes])  # nodes compare by their position
        return last.next

    def insert_group(self, group: Group, where: str = "") -> None:
        """Insert one group action, its sites together. Its records are at ``where``, or at ``group:<name>``."""
        points = group.points
        nodes = [self.current(point.node) for point in points]
        for point in points:
            check_dense(group.action, point.site, value_of(point.node))
        where = where or f"group:{group.effect.group}"
        mode = self._mode(points[0].site, where)
        match group.effect:
            case WeighExampleGradients() as effect:
                self._insert_example_clip(group, effect, where, nodes, mode)
            case ScaleGroup() as effect if all(point.layout is None for point in points):
                self._finish_group(group, where, nodes, *self._scale_group(group, effect, nodes, mode))
            case ScaleGroup() | ReplaceGroup() as effect:
                self._finish_group(group, where, nodes, *self._replace_group(group, effect, nodes, mode))
            case WeighLossGradients():
                raise AssertionError("losses are weighed before other groups")
            case JudgeUpdate():
                raise AssertionError("judges are at step sites")
            case _:
                assert_never(group.effect)

    def _replace_group(
        self, group: Group, effect: ScaleGroup | ReplaceGroup, nodes: list[fx.Node], mode: TraceMode
    ) -> tuple[TracedAction, list[fx.Node], list[fx.Node], list[fx.Node]]:
        points = group.points
        values, sites = [value_of(n) for n in nodes], [point.site for point in points]
        layouts = [point.layout for point in points]
        traced = trace_function(lambda *g: effect.run(g), values, sites, group.insertion, mode, layouts=layouts)
        outputs, new = self._splice(traced, nodes, points[0])
        return traced, outputs[: len(points)], outputs[len(points) :], new

    def _finish_group(
        self,
        group: Group,
        where: str,
        nodes: Sequence[fx.Node],
        traced: TracedAction,
        results: Sequence[fx.Node],
        extras: Sequence[fx.Node],
        new: Sequence[fx.Node],
    ) -> None:
        insertion, points, sites = group.insertion, group.points, [point.site for point in group.points]
        refuse(insertion, Context(sites[0], is_part=not self._is_whole, has_states=traced.has_states))
        keys, _ = self.packing.add(insertion, where, sites[0], traced.reports, extras, sites)
        for point, names in zip(points, _share_nodes(new, nodes, results), strict=True):
            own = tuple(key for key in keys if key.site in (where, str(point.site)))
            self.note(point.site, insertion, names, own)
        self.packing.groups.append(str(group.effect.group))
        for point, result in zip(points, results, strict=True):
            self._replace(point, result)

    def _scale_group(
        self, group: Group, effect: ScaleGroup, nodes: Sequence[fx.Node], mode: TraceMode
    ) -> tuple[TracedAction, list[fx.Node], list[fx.Node], list[fx.Node]]:
        """Insert the action as the norm of each gradient, one factor, and its product with each gradient.

        Gradients of one shape are traced once. Returns the trace of the factor, the scaled gradients, the outputs of
        the reports, and all new nodes.
        """
        insertion, points = group.insertion, group.points
        first, alone = points[0], replace(mode, states=None)
        norms: list[fx.Node] = []
        results: list[fx.Node] = []
        made: list[fx.Node] = []
        at: list[int] = []

        def norm(gradient: Tensor) -> Tensor:
            _recording().output(norm_of(gradient, effect.norm_type))
            return gradient

        for point, node in zip(points, nodes, strict=True):
            name = ("norm", effect.norm_type)
            traced = self._tracer.trace_part(name, norm, insertion, point.site, value_of(node), alone)
            (_, found), new = self._splice(traced, [node], first)
            norms.append(found)
            made += new

        def factor(*found: Tensor) -> Sequence[Tensor]:
            bound, total = effect.bound_and_total(found)
            at[:] = [_recording().output(bound / total), _recording().output(bound < total)]
            return found[:1]

        value, *values = map(value_of, norms)
        middle = trace_function(factor, [value], [first.site], insertion, replace(mode, scale=None), values)
        (_, *extras), new = self._splice(middle, norms, first)
        made += new
        scales = [extras[number] for number in at]
        further = [value_of(scale) for scale in scales]
        for point, node in zip(points, nodes, strict=True):
            value = value_of(node)
            traced = self._tracer.trace_part("scale", scale_where, insertion, point.site, value, alone, further)
            (result,), new = self._splice(traced, [node, *scales], first)
            results.append(result)
            made += new
        return middle, results, extras, made

    def _insert_example_clip(
        self, group: Group, effect: WeighExampleGradients, where: str, nodes: Sequence[fx.Node], mode: TraceMode
    ) -> None:
        assert self.examples is not None
        insertion, points, site = group.insertion, group.points, group.points[0].site
        asked = Asked(insertion, effect.examples)
        scale, mode = mode.scale, replace(mode, scale=None)
        squares = self.examples.total_square_norms(points, nodes, asked, scale)
        traced = trace_function(lambda s: effect.run([s]), [value_of(squares)], [site], insertion, mode)
        (weights, *extras), new = self._splice(traced, [squares], points[0])
        keys, _ = self.packing.add(insertion, where, site, traced.reports, extras)
        shared = (*self.examples.take_new(), *new)
        for point, node in zip(points, nodes, strict=True):
            with recording(point.site.device, states=mode.states):
                result = self.examples.weighted_gradient(point, node, weights, asked, effect.noise, scale)
            made = tuple(n.name for n in (*shared, *self.examples.take_new()))
            self.note(point.site, insertion, made, tuple(keys))
            self._replace(point, result)
            shared = ()
        if effect.noise is not None:  # without it, clips of several backwards add up to that of all their examples
            name = f"{effect.group} (noise)"  # a global clip may have a group of the same name
            self.packing.groups.append(name)
            self.packing.noisy.add(name)

    def weigh_losses(self, weighing: Weighing) -> dict[int, fx.Node]:
        """Insert the weighted sums of the gradients of each loss; return those of gradients, by output."""
        assert self.losses is not None
        group, members = weighing.group, weighing.members
        insertion, effect, first = group.insertion, weighing.effect, next(iter(members))
        where = f"group:{effect.group}"
        rows = [{k: self.current(own.node) for k, own in points.items()} for points in members.values()]
        for point, own in zip(members, rows, strict=True):
            for node in own.values():
                check_dense(insertion.action, point.site, value_of(node))
            _check_same_device(insertion, first.site, point.site)
        mode = self._mode(first.site, where)
        gramian = self.losses.gramian(rows, mode.scale, first.before, is_opaque=mode.is_opaque)
        weights, traced, extras, new = self._weights(weighing, first, gramian, replace(mode, scale=None))
        keys, _ = self.packing.add(insertion, where, first.site, traced.reports, extras)
        self.packing.groups.append(str(effect.group))
        made, sums = [*self.losses.take_new(), *new], {}
        single: dict[torch.dtype, list[fx.Node]] = {}  # each weight
        for point, own in zip(members, rows, strict=True):
            point.replicas = next(iter(members[point].values())).replicas
            wide = torch.promote_types(value_of(point.node).dtype.to_real(), torch.float32)
            if wide not in single:
                each = make_fx.trace(functools.partial(unbound_as, wide), [value_of(weights)])
                single[wide], new = editing.splice(each, self.graph, [weights], first.before, "is_backward")
                made += new
            value, *others = [*own.values(), *(single[wide][k] for k in own)]
            name, further = ("weighted sum", len(own)), list(map(value_of, others))
            part = self._tracer.trace_part(name, weighted_sum, insertion, point.site, value_of(value), further=further)
            (result,), new = self._splice(part, [value, *others], point)
            self.note(point.site, insertion, tuple(node.name for node in (*made, *new)), tuple(keys))
            made = []
            if point.marker is not None:
                point.marker.update_arg(0, result)
            elif point.output is not None:
                editing.replace_output(self.graph, point.output, result)
                sums[point.output] = result
            point.node = result
        return sums

    def _weights(
        self, weighing: Weighing, point: InsertionPoint, gramian: fx.Node, mode: TraceMode
    ) -> tuple[fx.Node, TracedAction, list[fx.Node], list[fx.Node]]:
        """Insert the weights of the losses; return them, the trace, the outputs of its reports, and all new nodes."""
        assert self.losses is not None
        insertion, effect = weighing.group.insertion, weighing.effect
        inputs = [gramian]
        if effect.reads_losses:
            inputs.append(self.losses.values(self.forward, point.before))
        if not inspect.ismethod(effect.function):  # messages name the user's function
            insertion = replace(insertion, action=effect.function)
        sized = value_of(gramian)[0].clone()  # of the shape of the weights

        def run(_: Tensor, *tensors: Tensor) -> Sequence[Tensor]:
            return effect.run(tensors)

        traced = trace_function(run, [sized], [point.site], insertion, mode, list(map(value_of, inputs)))
        (weights, *extras), new = self._splice(traced, [gramian, *inputs], point)
        return weights, traced, extras, new

    def _splice(
        self, traced: TracedAction, nodes: list[fx.Node], point: InsertionPoint
    ) -> tuple[list[fx.Node], list[fx.Node]]:
        tag = "must_be_in_backward" if traced.reads_live else "is_backward"
        tag = "is_forward" if point.site.kind == "activation" else tag
        return editing.splice(traced.graph, self.graph, nodes, point.before, tag)

    def current(self, node: fx.Node) -> fx.Node:
        """Return the current successor of a node.

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

    def edits_of_parts(self, points: Sequence[InsertionPoint]) -> tuple[Edit, ...]:
        """Return the edits at these parts that are not elementwise."""
        if not points:
            return ()
        shapes = {node.name: shape_of(v) for node in self.graph.nodes if isinstance(v := node.meta.get("val"), Tensor)}
        sites = {point.site for point in points}

        def reduces(edit: Edit) -> bool:
            changes_shape = any(shapes.get(name, edit.site.shape) != edit.site.shape for name in edit.nodes)
            return changes_shape or isinstance(edit.insertion.effect, MeasureTensor)

        return tuple(edit for edit in self.edits if edit.site in sites and reduces(edit))

    def make_replay_graph(
        self, points: Sequence[InsertionPoint], marked: MarkedJointGraph, plain: Mapping[int, fx.Node]
    ) -> ReplayGraph | None:
        """Count at the boundary of a checked graph, and copy the graph for a replay; None if there can be none.

        ``plain`` are gradients before the actions at their sites, by their position among the outputs.
        """
        inputs = {
            node: marked.inputs[position]
            for node, position in aot_autograd.plain_inputs(self.graph).items()
            if position in marked.inputs and isinstance(node.meta.get("val"), Tensor)
        }
        tangents = aot_autograd.tangents(self.graph)
        if self.packing.checks:
            outside, numbering = tangents if marked.is_last else [], self.packing.numbering
            records, self.counters = insert_boundary_counters(self.graph, inputs, outside, numbering)
            self.packing.records += records
            self.packing.measured |= {
                key: MeasuredTensor("nonfinite", None, 1) for record in records for key in record.keys
            }
        if any(collectives.is_collective(node) and node.name not in self._averaged for node in self.graph.nodes):
            return None  # the model computes with other processes, which may not replay this step
        return ReplayGraph(
            graph=editing.copy_of_nodes(self.graph),
            activations=_sites_by_value(points, "activation"),
            errors=_sites_by_value(points, "error"),
            gradients={p.output: p.site for p in points if p.output is not None},
            actions={name: e for e in self.edits for name in e.nodes},
            inputs={node.name: given for node, given in inputs.items()},
            tangents=tuple(node.name for node in tangents),
            backward=backward_names(self.graph),
            is_random=any(operators.is_random(node) for node in self.graph.nodes),
            plain={position: node.name for position, node in plain.items()},
            updated=frozenset(node.name for node in _updated_inputs(self.graph, plain.values())),
            is_whole=marked.is_whole and marked.is_last,
        )


def _check_kept(point: InsertionPoint, insertion: Insertion, traced: TracedAction) -> None:
    """Raise PolicyError for tensors that are to be kept of each of several losses: one site has one."""
    keeps_each = point.loss is not None and any(isinstance(report, Kept) for report in traced.reports)
    refuse(insertion, Context(point.site, keeps_each=keeps_each))


def _updated_inputs(graph: fx.Graph, gradients: Iterable[fx.Node]) -> set[fx.Node]:
    """Return the placeholders written by the graph and read by gradients."""
    written = {node for call in graph.nodes if call.op == "call_function" for node in operators.written_by(call)}
    written = {node for node in written if isinstance(node, fx.Node) and node.op == "placeholder"}
    needed, todo = set(gradients), list(gradients) if written else []
    while todo:
        new = [node for node in operators.nodes_that_matter(todo.pop()) if node not in needed]
        needed.update(new)
        todo += new
    return written & needed


def _sites_by_value(points: Sequence[InsertionPoint], kind: Kind) -> dict[int, Site]:
    return {number_of(point.before): point.site for point in points if point.site.kind == kind}


def _recording() -> Recording:
    found = current_recording()
    assert found is not None  # while a function is traced
    return found


def _check_same_device(insertion: Insertion, first: Site, site: Site) -> None:
    other = "" if site.device == first.device else f"{first.device} ({first})"
    refuse(insertion, Context(site, first_device=other))


def _is_on_cuda(node: fx.Node) -> bool:
    return value_of(node).device.type == "cuda"


def _layouts_of(point: InsertionPoint, further: Sequence[fx.Node]) -> Sequence[Layout | None]:
    layouts = (point.layout, point.value_layout)[: 1 + len(further)]
    return layouts if any(layout is not None for layout in layouts) else ()


def _anchors(points: Sequence[InsertionPoint]) -> dict[Site, Anchor]:
    made_by: dict[fx.Node, fx.Node] = {}  # by marker; each chain is followed once
    anchors = {}
    for point in points:
        node, chain = point.node, []
        while node.target is ops.mark_error and node not in made_by:
            chain.append(node)
            node = node.all_input_nodes[0]
        node = made_by.get(node, node)
        made_by.update(dict.fromkeys(chain, node))
        marker = point.marker or (point.before if point.before.target in _MARKERS else None)
        anchors[point.site] = Anchor(node.name, -1 if marker is None else number_of(marker))
    return anchors


_Averaged: TypeAlias = tuple[InsertionPoint, Insertion, AverageOverRanks]
_Round: TypeAlias = "tuple[list[Insertion], tuple[Insertion, AverageOverRanks] | None]"


def _rounds_of(insertions: Sequence[Insertion]) -> list[_Round]:
    """Split the insertions of a site: those before each average, with it; then the others, with None."""
    rounds: list[_Round] = []
    before: list[Insertion] = []
    for insertion in insertions:
        if isinstance(insertion.effect, AverageOverRanks):
            rounds.append((before, (insertion, insertion.effect)))
            before = []
        else:
            before.append(insertion)
    return [*rounds, (before, None)]


def _buckets_of(
    members: Sequence[_Averaged], nodes: Mapping[InsertionPoint, fx.Node]
) -> list[tuple[Insertion, AverageOverRanks, list[InsertionPoint]]]:
    """Sort gradients into buckets; these come in the order of completion by the graph, members likewise."""
    alike: dict[Any, list[_Averaged]] = defaultdict(list)
    for member in sorted(members, key=lambda member: nodes[member[0]]):  # nodes compare by their position
        alike[member[1].key].append(member)
    buckets = []
    for found in alike.values():
        points, (_, insertion, average) = [point for point, *_ in found], found[0]
        values = [value_of(nodes[point]) for point in points]
        kinds = [(value.dtype, value.device) for value in values]
        for positions in bucket_order(kinds, list(map(num_bytes, values)), average.bucket_bytes):
            buckets.append((insertion, average, [points[n] for n in positions]))
    return sorted(buckets, key=lambda bucket: nodes[bucket[2][-1]])


_MARKERS = (ops.mark_activation, ops.mark_error)
_SHARED = -1


def _share_nodes(
    new: Sequence[fx.Node], inputs: Sequence[fx.Node], results: Sequence[fx.Node]
) -> list[tuple[str, ...]]:
    """Return new nodes' names by member of a group; shared ones belong to the first."""
    reads: dict[fx.Node, int | None] = {node: i for i, node in enumerate(inputs)}
    for node in new:
        reads[node] = _common(reads.get(a) for a in node.all_input_nodes)
    feeds: dict[fx.Node, int | None] = {node: i for i, node in enumerate(results)}
    for node in reversed(new):
        feeds[node] = _common([feeds.get(node), *(feeds.get(u) for u in node.users)])
    member: dict[fx.Node, int | None] = {}
    for node in reversed(new):
        known = [number for number in (feeds[node], reads[node]) if number not in (None, _SHARED)]
        member[node] = known[0] if known else (reads[node] or _common(member.get(u) for u in node.users))
    shares: list[list[str]] = [[] for _ in inputs]
    for node in new:
        shares[max(member[node] or 0, 0)].append(node.name)
    return [tuple(names) for names in shares]


def _common(members: Iterable[int | None]) -> int | None:
    """The one member among these; None if there is none (a constant)."""
    known = {member for member in members if member is not None}
    return known.pop() if len(known) == 1 else (_SHARED if known else None)
