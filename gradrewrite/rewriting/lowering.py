"""The insertion plan of a graph, from the answers of a policy: single insertions by point, and groups."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from gradrewrite.errors import PolicyError
from gradrewrite.numerics.statistics import IN_UNITS
from gradrewrite.policy.actions import describe
from gradrewrite.policy.insertions import (
    GroupEffect,
    Insertion,
    JudgeUpdate,
    KeepTensor,
    MeasureTensor,
    Omitted,
    RecomputeSaved,
    ReplaceTensor,
    ScaleGroup,
    ScaleParameter,
    StoreSaved,
    WeighLossGradients,
    group_effect,
)
from gradrewrite.policy.rules import Answered
from gradrewrite.policy.scope import Context, refuse
from gradrewrite.rewriting.insertion_points import InsertionPoint
from gradrewrite.sites import Site


@dataclass(frozen=True, slots=True, eq=False)
class Group:
    """The insertion of a group action, and its points."""

    insertion: Insertion
    effect: GroupEffect
    points: Sequence[InsertionPoint]

    @property
    def action(self) -> Any:
        """The action, as the policy answered it."""
        return self.insertion.action


@dataclass(frozen=True, slots=True, eq=False)
class SavedPlan:
    """The actions at one saved tensor."""

    forms: tuple[Insertion, ...] = ()  # each of the parts of the one before
    recomputation: Insertion | None = None
    measured: tuple[Insertion, ...] = ()  # the second argument of ``run`` is the restored tensor

    @property
    def is_acting(self) -> bool:
        """Whether the tensor is kept in another form, or not at all."""
        return bool(self.forms) or self.recomputation is not None


@dataclass(frozen=True, slots=True, eq=False)
class InsertionPlan:
    """The insertions of one graph."""

    single: Mapping[InsertionPoint, tuple[Insertion, ...]]  # in the order of the sites
    # They follow, in the order in which the policy list names them; those of one callback in the order of its sites.
    groups: tuple[Group, ...]
    # How many of the single insertions come before the weighing of losses there.
    before_weighing: Mapping[InsertionPoint, int]

    def measured(self) -> list[InsertionPoint]:
        """Return the insertion points with measurements."""
        return [p for p, own in self.single.items() if any(isinstance(i.effect, MeasureTensor) for i in own)]

    def changed(self) -> set[InsertionPoint]:
        """Return the insertion points with changed values."""
        found = {point for point, own in self.single.items() if not all(map(_is_idle, own))}
        return found.union(*(group.points for group in self.groups))


def _is_idle(insertion: Insertion) -> bool:
    return reads_losses(insertion) or isinstance(insertion.effect, MeasureTensor | Omitted)  # the former measures, too


def reads_losses(insertion: Insertion) -> bool:
    """Return whether an insertion of a single site reads the Gram matrix of the losses' gradients."""
    return isinstance(insertion.effect, ReplaceTensor) and insertion.effect.reads == "losses"


def lower(answers: Iterable[tuple[InsertionPoint, Sequence[Answered]]]) -> InsertionPlan:
    """Return the insertion plan for a policy's answers.

    PolicyError if two actions of one group differ, or two groups have one name in records and states.
    """
    single: dict[InsertionPoint, tuple[Insertion, ...]] = {}
    before: dict[InsertionPoint, int] = {}
    grouped: list[tuple[InsertionPoint, Answered]] = []
    for point, found in answers:
        own: list[Insertion] = []
        for answered in found:
            if isinstance(answered.insertion.effect, GroupEffect):
                grouped.append((point, answered))
                if isinstance(answered.insertion.effect, WeighLossGradients):
                    before.setdefault(point, len(own))
            else:
                own.append(answered.insertion)
        single[point] = tuple(own)
    return InsertionPlan(single, tuple(_groups(grouped)), before)


def lower_saved(answers: Sequence[Answered], site: Site) -> SavedPlan:
    """Return the plan for a saved tensor; PolicyError for answers that contradict each other."""
    forms: dict[Hashable, Insertion] = {}
    recomputation: Insertion | None = None
    measured: list[Insertion] = []
    for insertion in (answered.insertion for answered in answers):
        if isinstance(insertion.effect, StoreSaved):
            forms.setdefault(insertion.key, insertion)
        elif isinstance(insertion.effect, RecomputeSaved):
            recomputation = insertion
        else:
            assert isinstance(insertion.effect, ReplaceTensor | KeepTensor | Omitted)
            measured.append(insertion)
    kinds = [type(insertion.action) for insertion in forms.values()]
    if (recomputation is not None and forms) or len(set(kinds)) < len(kinds):
        refuse(answers[0].insertion, Context(site, forms=", ".join(describe(a.action) for a in answers)))
    return SavedPlan(tuple(forms.values()), recomputation, tuple(measured))


def is_in_units(insertion: Insertion) -> bool:
    """Return whether an insertion needs the unscaled gradient; a group's factor takes the scale itself."""
    effect = insertion.effect
    if isinstance(effect, MeasureTensor):
        return not IN_UNITS.isdisjoint(effect.statistics.values())
    return not isinstance(effect, ScaleGroup | WeighLossGradients | ScaleParameter | Omitted | JudgeUpdate)


def _groups(members: Sequence[tuple[InsertionPoint, Answered]]) -> list[Group]:
    groups: dict[Hashable, dict[InsertionPoint, Answered]] = defaultdict(dict)
    named_at: dict[Hashable, tuple[int, ...]] = {}
    for point, answered in members:
        key = answered.insertion.group
        groups[key].setdefault(point, answered)
        first, known = next(iter(groups[key].items()))
        _check_same((first, known.insertion), (point, answered.insertion))
        named_at[key] = min(named_at.get(key, answered.position), answered.position)
    found = {}
    for key, own in groups.items():
        insertion = next(iter(own.values())).insertion
        found[key] = Group(insertion, group_effect(insertion), list(own))
    _check_names([group.effect.group for group in found.values()])
    return [found[key] for key in sorted(groups, key=named_at.__getitem__)]  # equal positions stay in order


def _check_names(groups: Iterable[Hashable]) -> None:
    by_name: dict[str, Hashable] = {}
    for group in groups:
        other = by_name.setdefault(str(group), group)
        if other != group:
            raise PolicyError(
                f"the groups {other!r} and {group!r} are two, and their records and states would have one name, "
                f"group:{group}; give one of them another name",
                code="groups",
            )


def _check_same(first: tuple[InsertionPoint, Insertion], other: tuple[InsertionPoint, Insertion]) -> None:
    (point, known), (at, insertion) = first, other
    if known.key != insertion.key:
        raise PolicyError(
            f"{at.site}: {insertion.action!r} and {known.action!r} at {point.site} are in one group "
            f"{group_effect(known).group!r}, which has one action with one setting; give one of them another group",
            code="groups",
        )
