"""The insertion plan of weighed losses: points of single losses and of weighted sums."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace

from torch import fx

from gradrewrite.ir import editing
from gradrewrite.ir.marked_graph import MarkedJointGraph
from gradrewrite.policy.actions import describe
from gradrewrite.policy.insertions import AverageOverRanks, Insertion, ReplaceTensor, WeighLossGradients
from gradrewrite.policy.scope import Context, needs_examples, refuse
from gradrewrite.rewriting.canvas import Canvas
from gradrewrite.rewriting.insertion_points import InsertionPoint
from gradrewrite.rewriting.loss_gradients import AsksForLosses, LossGradients
from gradrewrite.rewriting.lowering import Group, InsertionPlan, reads_losses

ByLoss = Mapping[int, InsertionPoint]


@dataclass(frozen=True, slots=True)
class Weighing:
    """One group of losses' gradients, with the points of each loss by the point of their weighted sum."""

    group: Group
    effect: WeighLossGradients
    members: Mapping[InsertionPoint, ByLoss]


@dataclass(frozen=True, slots=True)
class SeparatedPlan:
    """An insertion plan with the weighing of losses set apart."""

    plan: InsertionPlan  # without it; single insertions before it are at the points of each loss
    weighings: Sequence[Weighing] = ()
    late: Mapping[InsertionPoint, Sequence[Insertion]] = field(default_factory=dict)  # behind the weighted sums
    split: Mapping[InsertionPoint, ByLoss] = field(default_factory=dict)  # errors that several losses share
    notes: tuple[str, ...] = ()  # for warnings

    def points_of(self, points: Sequence[InsertionPoint]) -> list[InsertionPoint]:
        """Return these points, with those of each loss instead of errors that several losses share."""
        return [own for point in points for own in (self.split[point].values() if point in self.split else [point])]

    def first_points(self, points: Sequence[InsertionPoint]) -> list[InsertionPoint]:
        """Return these points, with that of the first loss in the place of several."""
        several = {**self.split, **{p: own for weighing in self.weighings for p, own in weighing.members.items()}}
        return [next(iter(several[point].values())) if point in several else point for point in points]


def take_apart(canvas: Canvas, marked: MarkedJointGraph, plan: InsertionPlan) -> SeparatedPlan:
    """Separate the backward by losses, if an action asks for it; return the plan."""
    reading = {p: i for p, own in plan.single.items() for i in own if reads_losses(i)}
    weighed = [group for group in plan.groups if isinstance(group.effect, WeighLossGradients)]
    if not (reading or weighed):
        return SeparatedPlan(plan)
    is_part = not (marked.is_whole and marked.is_last)
    for point, insertion in reading.items():
        refuse(insertion, Context(point.site, tensor_type_of(point), is_part))
    groups = check_weighing(plan, is_part=is_part)
    for edit in canvas.edits:  # inside loops, so far
        if not edit.site.traits.in_forward and edit.site.iteration is not None:
            refuse(edit.insertion, Context(edit.site, is_in_loop=True, is_weighed_behind=True))
    asking = [AsksForLosses(insertion, point.site) for point, insertion in reading.items()]
    asking += [AsksForLosses(group.insertion, group.points[0].site) for group in groups]
    acting = {point.marker for point in plan.changed() if point.marker is not None}
    canvas.losses = LossGradients(marked, asking[0], acting)
    rows = canvas.losses.measured([point.node for point in reading])
    canvas.loss_rows = {point.site: own for point, own in zip(reading, rows, strict=True)}
    return separate(plan, groups, canvas.losses)


def check_weighing(plan: InsertionPlan, *, is_part: bool) -> list[Group]:
    """Return the groups of losses' gradients; PolicyError where one cannot be."""
    groups = [group for group in plan.groups if _weighs(group)]
    for group in groups:
        kinds = {point.site.kind for point in group.points}
        for point in group.points:
            refuse(group.insertion, Context(point.site, tensor_type_of(point), is_part))
            _check_averages(group, point, plan)
        if "error" in kinds and len(group.points) > 1:
            sites = ", ".join(str(point.site) for point in group.points[:3])
            sites = f"{sites}{', ...' if len(group.points) > 3 else ''}"
            refuse(group.insertion, Context(group.points[0].site, sites=sites))
        _check_others(group, plan)
    return groups


def _weighs(group: Group) -> bool:
    return isinstance(group.effect, WeighLossGradients)


def tensor_type_of(point: InsertionPoint) -> str:
    """Return the class name of the gradient at a point."""
    return "Tensor" if point.layout is None else "DTensor"


def _check_averages(group: Group, point: InsertionPoint, plan: InsertionPlan) -> None:
    late = plan.single[point][plan.before_weighing[point] :]
    several = [i for own in plan.single.values() for i in own]
    averages = several if point.site.kind == "error" else late  # gradients are averaged upstream
    average = next((i.action for i in averages if _averages_over_several(i)), None)
    refuse(group.insertion, Context(point.site, later_average="" if average is None else describe(average)))


def _averages_over_several(insertion: Insertion) -> bool:
    return isinstance(insertion.effect, AverageOverRanks) and insertion.effect.processes().size() > 1


def _check_others(group: Group, plan: InsertionPlan) -> None:
    """Raise PolicyError for per-example actions, and for groups that would come before the weighing."""
    site = group.points[0].site
    all_insertions = [*(i for own in plan.single.values() for i in own), *(other.insertion for other in plan.groups)]
    for insertion in filter(needs_examples, all_insertions):
        refuse(group.insertion, Context(site, of_examples=describe(insertion.action)))
    for other in plan.groups[: plan.groups.index(group)]:
        if not _weighs(other) and not set(other.points).isdisjoint(group.points):
            refuse(group.insertion, Context(site, earlier_group=describe(other.action)))


def separate(plan: InsertionPlan, groups: Sequence[Group], losses: LossGradients) -> SeparatedPlan:
    """Take the backward apart as far as losses share it up to the sites of these groups, and the plan with it."""
    plan = replace(plan, groups=tuple(group for group in plan.groups if not _weighs(group)))
    targets = [point for group in groups for point in group.points]
    if losses.losses.number < 2 or not targets:
        texts = [f"{_named(group)}: the model returns one loss, and nothing is weighed" for group in groups]
        return SeparatedPlan(plan, notes=tuple(texts))
    rows, markers = losses.separate([point.node for point in targets], {point.marker for point in targets})
    _refuse_shared([*groups, *plan.groups], set(groups), markers)
    for point in plan.single:
        _refresh(point)
    everywhere = {point for group in groups if _is_everywhere(group) for point in group.points}
    members = {
        point: {k: _point_of(point, k, losses.losses.name(k), node) for k, node in own.items()}
        for point, own in zip(targets, rows, strict=True)
        if len(own) > 1 or (own and point in everywhere)
    }
    left = [(point, own) for point, own in zip(targets, rows, strict=True) if point not in members]
    alone = {point: k for point, own in left for k in own}
    for point, k in alone.items():
        point.records_of = losses.losses.name(k)
    split = {
        point: {
            k: _point_of(point, k, losses.losses.name(k), marker.all_input_nodes[0], marker)
            for k, marker in markers[point.marker].items()
        }
        for point in plan.single
        if point.marker is not None and point.marker in markers
    }
    single: dict[InsertionPoint, tuple[Insertion, ...]] = {}
    late: dict[InsertionPoint, Sequence[Insertion]] = {}
    for point, own in plan.single.items():
        early = own
        if point in members or point in alone:
            position = plan.before_weighing[point]
            early, late[point] = own[:position], own[position:]
        single.update(_by_loss(early, members.get(point, split.get(point, {0: point}))))
    weighings = [
        Weighing(group, group.effect, {p: members[p] for p in group.points if p in members})
        for group in groups
        if isinstance(group.effect, WeighLossGradients)
    ]
    notes = [
        f"{_named(w.group)}: no gradient here is shared by losses, and nothing is weighed"
        for w in weighings
        if not w.members
    ]
    for total, parts in losses.losses.parts.items():
        listed = ", ".join(map(str, parts))
        notes.append(
            f"{_named(groups[0])}: loss {total} of the model (in the order of its outputs) is computed from loss "
            f"{listed}, as a total from its parts; each is weighed, with a gradient of 0 where backward is called "
            "without it. Return the parts alone, or detach what is only to be seen"
        )
    return SeparatedPlan(replace(plan, single=single), [w for w in weighings if w.members], late, split, tuple(notes))


def _is_everywhere(group: Group) -> bool:
    return isinstance(group.effect, WeighLossGradients) and group.effect.everywhere


def _refuse_shared(groups: Sequence[Group], weighing: Collection[Group], markers: Collection[fx.Node | None]) -> None:
    """Raise PolicyError for groups at errors of several losses."""
    for group in groups:
        for point in group.points:
            if point.marker in markers:
                weighs = group in weighing
                refuse(group.insertion, Context(point.site, is_weighed_upstream=weighs, is_weighed_behind=not weighs))


def _named(group: Group) -> str:
    return f"{group.points[0].site}: {describe(group.action)}"


def _by_loss(
    insertions: tuple[Insertion, ...], points: ByLoss
) -> Iterator[tuple[InsertionPoint, tuple[Insertion, ...]]]:
    """Return insertions by the points of each loss; figures of all losses are taken once."""
    first, *others = points.values()
    yield first, insertions
    of_one = tuple(one for insertion in insertions if (one := _at_others(insertion)) is not None)
    yield from ((point, of_one) for point in others)


def _at_others(insertion: Insertion) -> Insertion | None:
    """Return the insertion at the gradient of a loss other than the first; None for nothing."""
    effect = insertion.effect
    if not (isinstance(effect, ReplaceTensor) and effect.reads == "losses"):
        return insertion
    if effect.of_others is None:
        return None
    return replace(insertion, effect=effect.of_others, key=(insertion.key, "of others"))


def _refresh(point: InsertionPoint) -> None:
    """Let a point have the node that is there now."""
    if point.marker is not None and point.marker.all_input_nodes:  # none of a marker that was copied
        point.node = point.marker.all_input_nodes[0]
    elif point.output is not None:
        point.node = editing.outputs_of(point.before)[point.output]


def _point_of(
    point: InsertionPoint, loss: int, name: str, node: fx.Node, marker: fx.Node | None = None
) -> InsertionPoint:
    before = point.before if marker is None else marker
    return replace(point, node=node, before=before, marker=marker, output=None, loss=loss, records_of=name)
