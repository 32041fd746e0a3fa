"""The rewrite of a joint graph: stages, one behind the other."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from types import MappingProxyType

from torch import Tensor, fx

from gradrewrite._compat import fake_tensors, inductor
from gradrewrite._utils.progress import current_progress
from gradrewrite.ir import editing, ops
from gradrewrite.ir.attribution import read_provenance, with_edits
from gradrewrite.ir.edits import Edit
from gradrewrite.ir.joint_graph import JointGraph
from gradrewrite.ir.marked_graph import MarkedJointGraph
from gradrewrite.ir.markers import value_of
from gradrewrite.ir.ops import number_of
from gradrewrite.ir.provenance import Anchor
from gradrewrite.ir.record_layout import BackwardOutputs
from gradrewrite.ir.replay_graph import ReplayGraph
from gradrewrite.ir.values import shape_of
from gradrewrite.policy.insertions import (
    AverageOverRanks,
    Insertion,
    MeasureTensor,
    WeighExampleGradients,
)
from gradrewrite.policy.rules import Answered, ask_in_order
from gradrewrite.policy.sampling import Measured, sampled
from gradrewrite.rewriting.asking import check_subclasses, possible
from gradrewrite.rewriting.canvas import Canvas
from gradrewrite.rewriting.config import RewriteConfig
from gradrewrite.rewriting.example_gradients import drop_replaced
from gradrewrite.rewriting.inserters.averages import insert_averages
from gradrewrite.rewriting.inserters.group import insert_group
from gradrewrite.rewriting.inserters.losses import weigh_losses
from gradrewrite.rewriting.inserters.saved import SavedInsertion, SavedRewrite, find_saved
from gradrewrite.rewriting.inserters.single import insert
from gradrewrite.rewriting.insertion_points import FoundPoints, InsertionPoint, find_insertion_points
from gradrewrite.rewriting.loss_weighing import (
    SeparatedPlan,
    take_apart,
)
from gradrewrite.rewriting.lowering import Group, InsertionPlan, lower
from gradrewrite.rewriting.replay_capture import make_replay_graph
from gradrewrite.rewriting.saved_tensors import SavedTensors
from gradrewrite.sites import Site

logger = logging.getLogger(__name__)
_MARKERS = (ops.mark_activation, ops.mark_error)


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


@dataclass(eq=False)
class _Rewrite:
    """A rewrite, stage by stage: each stage sets the fields behind those of the stages before it."""

    marked: MarkedJointGraph
    config: RewriteConfig
    asked: Mapping[Site, tuple[Answered, ...]]
    measured: Measured
    is_replayed: bool
    canvas: Canvas

    # find
    found: FoundPoints = field(init=False)
    # ask
    answers: list[tuple[InsertionPoint, tuple[Answered, ...]]] = field(init=False)
    of_subclasses: dict[Site, tuple[Answered, ...]] = field(init=False)
    notes: list[str] = field(init=False)
    saved: SavedTensors | None = field(init=False)  # None where nothing asks for them
    candidates: tuple[Site, ...] = field(init=False)
    # separate
    separated: SeparatedPlan = field(init=False)
    anchors: dict[Site, Anchor] = field(init=False)
    plain: dict[int, fx.Node] = field(init=False)  # gradients before the actions at their sites, by output
    # insert
    averaged: dict[InsertionPoint, Sequence[Insertion]] = field(init=False)
    early: list[Group] = field(init=False)  # groups that act before gradients are averaged
    # saved, replay, pack
    kept: SavedRewrite = field(default_factory=SavedRewrite)
    replay_graph: ReplayGraph | None = None
    counters: list[str] = field(default_factory=list)  # names of the nodes of boundary counters
    of_parts: tuple[Edit, ...] = ()
    outputs: BackwardOutputs = field(default_factory=BackwardOutputs)
    record_nodes: list[fx.Node] = field(default_factory=list)

    @property
    def points(self) -> Sequence[InsertionPoint]:
        """The points of the graph."""
        return self.found.points

    @property
    def plan(self) -> InsertionPlan:
        """The plan, with the weighing of losses set apart."""
        return self.separated.plan

    def ask(self, site: Site) -> tuple[Answered, ...]:
        """Return the policy's answers at a site."""
        return self.asked[site] if site in self.asked else ask_in_order(self.config.policy, site)


def _find(rewrite: _Rewrite) -> None:
    rewrite.found = find_insertion_points(rewrite.marked)


def _ask(rewrite: _Rewrite) -> None:
    found, ask = rewrite.found, rewrite.ask
    rewrite.answers = [(point, possible(ask(point.site), value_of(point.node).layout)) for point in found.points]
    rewrite.of_subclasses = {site: possible(ask(site)) for site in found.subclasses}
    rewrite.notes = list(check_subclasses(rewrite.of_subclasses, found.subclasses))
    rewrite.saved, rewrite.candidates = find_saved(rewrite.marked, rewrite.config.policy, ask)


def _separate(rewrite: _Rewrite) -> None:
    """Plan the insertions, and take the backward of several losses apart where an action asks for it."""
    canvas = rewrite.canvas
    plan = lower((point, sampled(found, rewrite.measured)) for point, found in rewrite.answers)
    separated = rewrite.separated = take_apart(canvas, rewrite.marked, plan)
    single = separated.plan.single.items()
    measured = [point for point, own in single if any(isinstance(i.effect, MeasureTensor) for i in own)]
    canvas.num_measured = sum(point.output is None for point in measured)
    changed = separated.plan.changed().union(*(weighing.members for weighing in separated.weighings))
    canvas.changed = {point.marker for point in changed if point.marker is not None}
    rewrite.plain = {point.output: point.node for point in rewrite.points if point.output is not None}
    rewrite.anchors = _anchors(separated.first_points(rewrite.points))


def _insert_singles(rewrite: _Rewrite) -> None:
    progress = current_progress()
    progress.begin("rewriting", len(rewrite.plan.single))
    rewrite.averaged = {}
    for point, own in rewrite.plan.single.items():
        if any(isinstance(insertion.effect, AverageOverRanks) for insertion in own):
            rewrite.averaged[point] = own
        else:
            insert(rewrite.canvas, point, own)
        progress.advance()


def _insert_averages(rewrite: _Rewrite) -> None:
    of_examples = [group for group in rewrite.plan.groups if isinstance(group.effect, WeighExampleGradients)]
    rewrite.early = [group for group in of_examples if not rewrite.averaged.keys().isdisjoint(group.points)]
    insert_averages(rewrite.canvas, rewrite.averaged, rewrite.early)


def _weigh_losses(rewrite: _Rewrite) -> None:
    for weighing in rewrite.separated.weighings:
        rewrite.plain |= weigh_losses(rewrite.canvas, weighing)
    for point, late in rewrite.separated.late.items():
        point.records_of = None  # no longer the gradient of one loss
        insert(rewrite.canvas, point, late)


def _insert_groups(rewrite: _Rewrite) -> None:
    canvas = rewrite.canvas
    for group in rewrite.plan.groups:
        if group not in rewrite.early:
            insert_group(canvas, group)
    if canvas.examples is not None:
        canvas.examples.add_up_terms()
    canvas.packing.follow(canvas.current, canvas.graph)


def _insert_at_saved(rewrite: _Rewrite) -> None:
    """Ask the policy at the saved tensors, and insert their forms."""
    if rewrite.saved is None:
        return
    insertion = SavedInsertion(rewrite.canvas, rewrite.saved)
    insertion.ask(rewrite.ask, rewrite.measured)
    insertion.insert()
    rewrite.kept = insertion.result()


def _copy_for_replay(rewrite: _Rewrite) -> None:
    canvas = rewrite.canvas
    if canvas.packing.checks or rewrite.is_replayed:
        points = rewrite.separated.points_of(rewrite.points)
        found = make_replay_graph(canvas, points, rewrite.marked, rewrite.plain)
        rewrite.replay_graph, rewrite.counters = found
    rewrite.of_parts = _edits_of_parts(canvas, [point for point in rewrite.points if point.is_part])


def _pack(rewrite: _Rewrite) -> None:
    """Pack the records, and erase markers and unused nodes."""
    canvas = rewrite.canvas
    rewrite.outputs, rewrite.record_nodes = canvas.packing.pack_into(canvas.graph, canvas.forward)
    editing.erase_markers(canvas.graph)
    if canvas.examples is not None:
        drop_replaced(canvas.graph, canvas.examples.replaced)
    if canvas.losses is not None:
        editing.erase_unused(canvas.graph, canvas.losses.sums)


STAGES: tuple[tuple[str, Callable[[_Rewrite], None]], ...] = (
    ("find", _find),
    ("ask", _ask),
    ("separate", _separate),
    ("singles", _insert_singles),
    ("averages", _insert_averages),
    ("losses", _weigh_losses),
    ("groups", _insert_groups),
    ("saved", _insert_at_saved),
    ("replay", _copy_for_replay),
    ("pack", _pack),
)


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
    too. The logger of this module has the text of the graph after each stage, at level DEBUG.
    """
    graph = marked.graph
    canvas = Canvas(graph, config.loss_scale, config.states, marked, config.label())
    assumed = fake_tensors.assumptions(graph)
    rewrite = _Rewrite(marked, config, asked, measured, is_replayed, canvas)
    for name, stage in STAGES:
        stage(rewrite)
        if logger.isEnabledFor(logging.DEBUG):
            logger.debug("after %s:\n%s", name, graph)
    return _result(rewrite, assumes=fake_tensors.assumptions(graph) != assumed)


def _result(rewrite: _Rewrite, *, assumes: bool) -> RewriteResult:
    canvas, kept, losses = rewrite.canvas, rewrite.kept, rewrite.canvas.losses
    live = editing.live_tensors(canvas.graph)
    if live or (canvas.packing.checks and rewrite.replay_graph is not None):
        inductor.stop_folding()
    lost = [(site, rewrite.ask(site)) for site in rewrite.found.outside]
    subclasses = rewrite.of_subclasses
    return RewriteResult(
        sites=(*(point.site for point in rewrite.points), *rewrite.found.outside, *subclasses, *kept.answers),
        answers=(
            *(found for _, found in rewrite.answers),
            *(found for _, found in lost),
            *subclasses.values(),
            *kept.answers.values(),
        ),
        edits=tuple(canvas.edits),
        record_nodes=(*rewrite.counters, *(node.name for node in rewrite.record_nodes)),
        anchors={**rewrite.anchors, **kept.anchors},
        outputs=rewrite.outputs,
        live=live,
        out_of_reach=tuple((site, tuple(a.insertion for a in found)) for site, found in lost if found),
        replay_graph=rewrite.replay_graph,
        assumes=assumes,
        of_parts=rewrite.of_parts,
        copies_of_losses={} if losses is None else losses.copies,
        refused_outputs=losses.losses.others if losses is not None and rewrite.separated.weighings else frozenset(),
        notes=(*rewrite.separated.notes, *kept.notes, *rewrite.notes),
        saved=kept,
        candidates=rewrite.candidates,
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


def _edits_of_parts(canvas: Canvas, points: Sequence[InsertionPoint]) -> tuple[Edit, ...]:
    """Return the edits at these parts that are not elementwise."""
    if not points:
        return ()
    shapes = {node.name: shape_of(v) for node in canvas.graph.nodes if isinstance(v := node.meta.get("val"), Tensor)}
    sites = {point.site for point in points}

    def reduces(edit: Edit) -> bool:
        changes_shape = any(shapes.get(name, edit.site.shape) != edit.site.shape for name in edit.nodes)
        return changes_shape or isinstance(edit.insertion.effect, MeasureTensor)

    return tuple(edit for edit in canvas.edits if edit.site in sites and reduces(edit))


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
