"""The rewrite of a joint graph: stages, one behind the other."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from types import MappingProxyType

from torch import fx

from gradrewrite._compat import fake_tensors, inductor
from gradrewrite._utils.progress import current_progress
from gradrewrite.ir import editing
from gradrewrite.ir.edits import Edit
from gradrewrite.ir.marked_graph import MarkedJointGraph
from gradrewrite.ir.markers import value_of
from gradrewrite.ir.outputs import BackwardOutputs
from gradrewrite.ir.provenance import Anchor
from gradrewrite.ir.replay_graph import ReplayGraph
from gradrewrite.policy.actions import describe
from gradrewrite.policy.insertions import (
    AverageOverRanks,
    ExampleEffect,
    Insertion,
)
from gradrewrite.policy.rules import Answered, ask_in_order
from gradrewrite.policy.sampling import Measured, sampled
from gradrewrite.rewriting.asking import check_subclasses, check_uses, possible
from gradrewrite.rewriting.canvas import Canvas
from gradrewrite.rewriting.config import RewriteConfig
from gradrewrite.rewriting.inserters import (
    InsertedBackwards,
    InsertedLoops,
    SavedInsertion,
    SavedRewrite,
    find_saved,
    insert,
    insert_at_backwards,
    insert_averages,
    insert_group,
    insert_in_loops,
    weigh_losses,
)
from gradrewrite.rewriting.insertion_points import FoundPoints, InsertionPoint, anchors_of, find_insertion_points
from gradrewrite.rewriting.loss_weighing import SeparatedPlan, take_apart
from gradrewrite.rewriting.lowering import Group, InsertionPlan, lower
from gradrewrite.rewriting.replay_capture import make_replay_graph
from gradrewrite.rewriting.result import RewriteResult
from gradrewrite.rewriting.saved_tensors import SavedTensors
from gradrewrite.sites import Site

logger = logging.getLogger(__name__)


@dataclass(eq=False)
class _Rewrite:
    """A rewrite, stage by stage: each stage sets the fields behind those of the stages before it."""

    marked: MarkedJointGraph
    config: RewriteConfig
    asked: Mapping[Site, tuple[Answered, ...]]
    measured: Measured
    is_replayed: bool
    canvas: Canvas

    # loops
    loops: InsertedLoops = field(init=False)
    # backwards
    backwards: InsertedBackwards = field(init=False)
    # find
    found: FoundPoints = field(init=False)
    # ask
    at_points: list[tuple[InsertionPoint, tuple[Answered, ...]]] = field(init=False)
    answers: dict[Site, tuple[Answered, ...]] = field(init=False)
    out_of_reach: tuple[Site, ...] = field(init=False)
    notes: list[str] = field(init=False)
    saved: SavedTensors | None = field(init=False)  # None where nothing asks for them
    kept: SavedRewrite = field(init=False)
    # separate
    separated: SeparatedPlan = field(init=False)
    anchors: dict[Site, Anchor] = field(init=False)
    plain: dict[int, fx.Node] = field(init=False)  # gradients before the actions at their sites, by output
    # insert
    averaged: dict[InsertionPoint, Sequence[Insertion]] = field(init=False)
    early: list[Group] = field(init=False)  # groups of errors, and those that act before gradients are averaged
    # saved, replay, pack
    replay_graph: ReplayGraph | None = None
    counters: list[str] = field(default_factory=list)  # names of the nodes of boundary counters
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


def _insert_in_loops(rewrite: _Rewrite) -> None:
    given = rewrite.canvas, rewrite.marked, rewrite.config, rewrite.ask, rewrite.measured
    rewrite.loops = insert_in_loops(*given)


def _insert_at_backwards(rewrite: _Rewrite) -> None:
    rewrite.backwards = insert_at_backwards(rewrite.canvas, rewrite.marked, rewrite.ask)


def _find(rewrite: _Rewrite) -> None:
    rewrite.found = find_insertion_points(rewrite.marked)


def _ask(rewrite: _Rewrite) -> None:
    found, ask = rewrite.found, rewrite.ask
    at_points = [(point, possible(ask(point.site), value_of(point.node).layout)) for point in found.points]
    outside = {site: ask(site) for site in found.outside}
    check_uses({point.site: answers for point, answers in at_points if point.is_sum}, found.refused, ask)
    of_subclasses = {site: possible(ask(site)) for site in found.subclasses}
    rewrite.at_points = at_points
    rewrite.answers = {point.site: answers for point, answers in at_points} | outside | of_subclasses
    rewrite.answers |= rewrite.loops.answers | rewrite.backwards.answers
    rewrite.out_of_reach = tuple(site for site, answers in outside.items() if answers)
    inside = {site: possible(answers) for site, answers in rewrite.loops.of_subclasses.items()}
    name = next((value.subclass for value in rewrite.marked.values if value.subclass), "")
    classes = found.subclasses | dict.fromkeys(inside, name)
    rewrite.notes = list(check_subclasses(of_subclasses | inside, classes))
    rewrite.saved, candidates = find_saved(rewrite.marked, rewrite.config.policy, ask)
    rewrite.kept = SavedRewrite(candidates)


def _separate(rewrite: _Rewrite) -> None:
    """Plan the insertions, and separate the gradients of several losses."""
    canvas = rewrite.canvas
    plan = lower((point, sampled(found, rewrite.measured)) for point, found in rewrite.at_points)
    separated = rewrite.separated = take_apart(canvas, rewrite.marked, plan)
    canvas.num_measured = sum(point.output is None for point in separated.plan.measured())
    changed = separated.plan.changed().union(*(weighing.members for weighing in separated.weighings))
    canvas.changed = {point.marker for point in changed if point.marker is not None}
    rewrite.plain = {point.output: point.node for point in rewrite.points if point.output is not None}
    rewrite.anchors = anchors_of(separated.first_points(rewrite.points)) | rewrite.loops.anchors
    rewrite.anchors |= rewrite.backwards.anchors
    rewrite.notes[:0] = separated.notes
    marked = rewrite.marked
    where = "" if marked.is_whole else " in this graph, which is a part of the model"
    where += " outside of its loops" * bool(marked.loops)
    canvas.let_read(rewrite.points, marked.inputs_by_node(), where, has_losses=bool(separated.weighings))


def _insert_singles(rewrite: _Rewrite) -> None:
    """Insert at single points, and groups of errors before anything at gradients is."""
    progress = current_progress()
    progress.begin("rewriting", len(rewrite.plan.single))
    rewrite.averaged = {}
    weighed = {point for weighing in rewrite.separated.weighings for point in weighing.members}
    of_errors = [g for g in rewrite.plan.groups if all(p.marker is not None and p not in weighed for p in g.points)]
    points = sorted(rewrite.plan.single, key=lambda point: point.site.traits.is_leaf)
    first = next((point for point in points if point.site.traits.is_leaf), None)
    for point in points:
        if point is first:
            _insert_early(rewrite, of_errors)
        own = rewrite.plan.single[point]
        if any(isinstance(insertion.effect, AverageOverRanks) for insertion in own):
            rewrite.averaged[point] = own
        else:
            insert(rewrite.canvas, point, own)
        progress.advance()
    if first is None:
        _insert_early(rewrite, of_errors)


def _insert_early(rewrite: _Rewrite, groups: Sequence[Group]) -> None:
    for group in groups:
        insert_group(rewrite.canvas, group)
    rewrite.early = list(groups)


def _insert_averages(rewrite: _Rewrite) -> None:
    of_examples = [group for group in rewrite.plan.groups if isinstance(group.effect, ExampleEffect)]
    early = [group for group in of_examples if not rewrite.averaged.keys().isdisjoint(group.points)]
    insert_averages(rewrite.canvas, rewrite.averaged, early)
    rewrite.early += early


def _weigh_losses(rewrite: _Rewrite) -> None:
    for weighing in rewrite.separated.weighings:
        rewrite.plain |= weigh_losses(rewrite.canvas, weighing)
    for point, late in rewrite.separated.late.items():
        point.records_of = ""  # no longer the gradient of one loss
        insert(rewrite.canvas, point, late)


def _insert_groups(rewrite: _Rewrite) -> None:
    canvas = rewrite.canvas
    for group in rewrite.plan.groups:
        if group not in rewrite.early:
            insert_group(canvas, group)
    if canvas.examples is not None:
        canvas.examples.add_up_terms()
    canvas.check_states()
    canvas.packing.states |= canvas.carried.chain(canvas.graph, canvas.current)
    canvas.packing.follow(canvas.current, canvas.graph)


def _insert_at_saved(rewrite: _Rewrite) -> None:
    """Ask the policy at the saved tensors, and insert their forms."""
    if rewrite.saved is None:
        return
    insertion = SavedInsertion(rewrite.canvas, rewrite.saved)
    insertion.ask(rewrite.ask, rewrite.measured)
    insertion.insert()
    rewrite.kept = insertion.result(rewrite.kept.candidates)
    rewrite.answers |= insertion.answers
    rewrite.anchors |= insertion.anchors
    rewrite.notes += insertion.notes


def _copy_for_replay(rewrite: _Rewrite) -> None:
    canvas = rewrite.canvas
    if canvas.packing.has_checks or rewrite.is_replayed:
        points = rewrite.separated.points_of(rewrite.points)
        found = make_replay_graph(canvas, points, rewrite.marked, rewrite.plain, rewrite.loops.replayed)
        rewrite.replay_graph, rewrite.counters = found
    of_parts = canvas.reducing_edits({point.site for point in rewrite.points if point.is_part})
    first: dict[Site, Edit] = {}
    for edit in of_parts:
        first.setdefault(edit.site, edit)
    rewrite.notes += (_PART.format(site, describe(edit.action)) for site, edit in first.items())


def _pack(rewrite: _Rewrite) -> None:
    """Pack the records, and erase markers and unused nodes."""
    canvas = rewrite.canvas
    rewrite.outputs, rewrite.record_nodes = canvas.packing.pack_into(canvas.graph, canvas.forward)
    canvas.erase_unused()


STAGES: tuple[tuple[str, Callable[[_Rewrite], None]], ...] = (
    ("loops", _insert_in_loops),
    ("backwards", _insert_at_backwards),
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
) -> tuple[RewriteResult, ReplayGraph | None]:
    """Ask the policy at every site of a joint graph and insert its answers; all markers go.

    The graph is changed in place. Where the policy was asked already, its answers are in ``asked``. Of actions that
    only measure, those of ``measured`` are inserted. The replay graph is None where nothing is checked, unless
    ``is_replayed``, and where the step cannot be replayed. The logger of this module has the text of the graph after
    each stage, at level DEBUG.
    """
    graph = marked.graph
    canvas = Canvas(graph, config.loss_scale, config.states, marked, config.label())
    assumed = fake_tensors.assumptions(graph)
    rewrite = _Rewrite(marked, config, asked, measured, is_replayed, canvas)
    for name, stage in STAGES:
        stage(rewrite)
        if logger.isEnabledFor(logging.DEBUG):
            logger.debug("after %s:\n%s", name, str(graph))  # a graph that changes later
    return _result(rewrite, assumes=fake_tensors.assumptions(graph) != assumed), rewrite.replay_graph


def _result(rewrite: _Rewrite, *, assumes: bool) -> RewriteResult:
    canvas, losses = rewrite.canvas, rewrite.canvas.losses
    live = editing.live_tensors(canvas.graph)
    if live or (canvas.packing.has_checks and rewrite.replay_graph is not None):
        inductor.stop_folding()
    return RewriteResult(
        answers=rewrite.answers,
        edits=tuple(canvas.edits),
        record_nodes=(*rewrite.counters, *rewrite.loops.nodes, *(node.name for node in rewrite.record_nodes)),
        anchors=rewrite.anchors,
        outputs=rewrite.outputs,
        live=live,
        out_of_reach=rewrite.out_of_reach,
        assumes=assumes,
        copies={name: (of, None) for name, of in rewrite.loops.replaced.items()} | (losses.copies if losses else {}),
        refused_outputs=losses.losses.others if losses is not None and rewrite.separated.weighings else frozenset(),
        notes=tuple(rewrite.notes),
        saved=rewrite.kept,
        loops=tuple(rewrite.loops.codes),
        zeros=rewrite.loops.covers | rewrite.backwards.covers,
    )


_PART = (
    "{}: {} acts on the part of each process by itself, because the value is a plain tensor that was taken out of a "
    "sharded DTensor. To have it act on the global tensor, keep the DTensor: ColwiseParallel(use_local_output=False), "
    "or the same option of what returns it"
)
