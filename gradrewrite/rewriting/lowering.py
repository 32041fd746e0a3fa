"""Lowering of a policy's answers: each action becomes an insertion of a closed union, and groups are collected.

No other module of the rewrite asks an action for its protocols, or for its variant at a site.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Collection, Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, TypeAlias

from torch import Tensor

from gradrewrite.errors import PolicyError
from gradrewrite.ir.reports import OnFailure
from gradrewrite.ir.statistics import IN_UNITS
from gradrewrite.policy.actions import (
    Action,
    BucketedAction,
    ExampleAction,
    ExampleClip,
    GroupAction,
    LossAction,
    LossWeighing,
    Measurement,
    MeasuringAction,
    NormScaling,
    ParameterScaling,
    Recomputation,
    SavedForm,
    SpecializingAction,
    UpdateJudge,
    action_key,
    describe,
    takes_value,
)
from gradrewrite.policy.recording import record_statistics
from gradrewrite.policy.rules import Answered
from gradrewrite.policy.sampling import Omitted, interval_of
from gradrewrite.rewriting.insertion_points import InsertionPoint
from gradrewrite.sites import Site


@dataclass(frozen=True, slots=True, eq=False)
class Replace:
    """The replacement of one value by a function of it."""

    action: Any  # as the policy answered it
    key: Hashable  # equal for actions that insert the same nodes
    run: Callable[..., Tensor]
    takes_value: bool  # ``run``'s second argument is the value that the gradient is of
    examples: ExampleAction | None  # the action, if its further arguments are per-example figures
    # Its second argument is the Gram matrix of the losses' gradients. Where these are taken apart, it stands at that of
    # the first loss, and at the others what is left without the matrix; None for nothing.
    reads_losses: bool
    of_others: Measure | None
    statistics: Mapping[str, str]  # of its argument, that it records; see ``Measure``
    rule: str  # the rule that the answer is of; see ``Answered``
    observed: frozenset[str] = frozenset()  # the names of those that a measurement of the same value has as well


@dataclass(frozen=True, slots=True, eq=False)
class Measure:
    """The measurement of one value, without a change of it; see ``Replace``."""

    action: Any
    key: Hashable
    run: Callable[..., Tensor]  # records the statistics, and returns its argument
    statistics: Mapping[str, str]  # keys of ``statistics.STATISTICS``, by the names of the records
    fails: OnFailure | None  # the consequence of a last statistic that is not 0
    rule: str


@dataclass(frozen=True, slots=True, eq=False)
class Average:
    """A collective on one value, in a bucket with others."""

    action: BucketedAction


@dataclass(frozen=True, slots=True, eq=False)
class ScaleParameter:
    """A factor of the parameter after the update; the gradient stays as it is."""

    action: ParameterScaling


@dataclass(frozen=True, slots=True, eq=False)
class ReplaceGroup:
    """The replacement of the values of a group by a function of all."""

    action: GroupAction
    points: Sequence[InsertionPoint]
    rule: str


@dataclass(frozen=True, slots=True, eq=False)
class ScaleGroup:
    """The product of the values of a group with one factor of their norms."""

    action: NormScaling
    points: Sequence[InsertionPoint]
    rule: str


@dataclass(frozen=True, slots=True, eq=False)
class WeighExamples:
    """The weights of the batch's examples in the gradients of a group."""

    action: ExampleClip
    points: Sequence[InsertionPoint]
    rule: str


@dataclass(frozen=True, slots=True, eq=False)
class WeighLosses:
    """The weighted sum of the gradients of each loss, in the place of their sum."""

    action: LossWeighing
    points: Sequence[InsertionPoint]
    rule: str


@dataclass(frozen=True, slots=True, eq=False)
class JudgeGroup:
    """A verdict on the update from one figure, at step sites; the values of the group stay as they are."""

    action: UpdateJudge
    points: Sequence[InsertionPoint]
    rule: str


@dataclass(frozen=True, slots=True, eq=False)
class SavedPlan:
    """The actions at one saved tensor."""

    forms: tuple[SavedForm, ...] = ()  # each of the parts of the one before
    recomputation: Recomputation | None = None
    measured: tuple[Replace | Omitted, ...] = ()  # the second argument of ``run`` is the restored tensor

    @property
    def is_acting(self) -> bool:
        """Whether the tensor is kept in another form, or not at all."""
        return bool(self.forms) or self.recomputation is not None


Reporting: TypeAlias = "Replace | Measure | GroupInsertion"  # what may have records
Insertion: TypeAlias = Replace | Measure | Average | ScaleParameter | Omitted
GroupInsertion: TypeAlias = ReplaceGroup | ScaleGroup | WeighExamples | WeighLosses | JudgeGroup


@dataclass(frozen=True, slots=True, eq=False)
class InsertionPlan:
    """The insertions of one graph."""

    single: Mapping[InsertionPoint, tuple[Insertion, ...]]  # in the order of the sites
    # They follow, in the order in which the policy list names them; those of one callback in the order of its sites.
    groups: tuple[GroupInsertion, ...]
    # How many of the single insertions come before the weighing of losses there.
    before_weighing: Mapping[InsertionPoint, int]

    def changed(self) -> set[InsertionPoint]:
        """Return the insertion points with changed values."""
        found = {point for point, own in self.single.items() if not all(map(_is_idle, own))}
        return found.union(*(group.points for group in self.groups))


def _is_idle(insertion: Insertion) -> bool:
    reads_losses = isinstance(insertion, Replace) and insertion.reads_losses  # which measures, too
    return reads_losses or isinstance(insertion, Measure | Omitted)


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
            if isinstance(answered.action, GroupAction):
                grouped.append((point, answered))
                if isinstance(answered.action, LossWeighing):
                    before.setdefault(point, len(own))
            else:
                own.append(lower_action(answered.action, point.site, answered.rule))
        behind = before.get(point, 0)
        single[point] = (*_recorded_once(own[:behind], point.site), *_recorded_once(own[behind:], point.site))
    return InsertionPlan(single, tuple(_groups(grouped)), before)


def lower_single(answers: Iterable[Answered], site: Site) -> tuple[Insertion, ...]:
    """Return the insertions of the actions at a site that are of no group, in order."""
    own = [lower_action(a.action, site, a.rule) for a in answers if not isinstance(a.action, GroupAction)]
    return tuple(_recorded_once(own, site))


def _recorded_once(insertions: Sequence[Insertion], site: Site) -> list[Insertion]:
    """Remove statistics from measurements that the next actions record of the same value, in as many steps or more."""
    found: list[Insertion] = []
    later: dict[tuple[str, str], tuple[int, int | None]] = {}  # position and interval, by name and statistic
    for insertion in reversed(insertions):
        whole = lower_action(insertion.action, site) if isinstance(insertion, Omitted) else insertion
        every = interval_of(whole.action)
        twice: list[tuple[str, str]] = []
        if not isinstance(whole, Measure):
            later.clear()
        elif whole.fails is None:
            twice = [one for one in whole.statistics.items() if one in later and later[one][1] in (None, 1, every)]
        for name, statistic in twice:
            position, _ = later[name, statistic]
            if isinstance(keeper := found[position], Replace):
                found[position] = replace(keeper, observed=keeper.observed | {name})
        if isinstance(whole, Measure | Replace):
            for one in whole.statistics.items():
                later.setdefault(one, (len(found), every))
        found.append(_without(insertion, dict(twice)))
    return found[::-1]


def _without(insertion: Insertion, names: Collection[str]) -> Insertion:
    if isinstance(insertion, Omitted):
        return replace(insertion, names=tuple(name for name in insertion.names if name not in names))
    if not names or not isinstance(insertion, Measure):
        return insertion
    left = {name: key for name, key in insertion.statistics.items() if name not in names}
    return replace(insertion, key=(insertion.key, tuple(left)), run=partial(_measured, left), statistics=left)


def _measured(statistics: Mapping[str, str], tensor: Tensor) -> Tensor:
    if statistics:
        record_statistics(tensor, statistics)
    return tensor


def lower_action(action: Any, site: Site, rule: str = "") -> Insertion:
    """Return the insertion of an action of one site, in its variant for that site; ``rule`` as in ``Answered``."""
    if isinstance(action, Omitted):
        return action
    if isinstance(action, BucketedAction):
        return Average(action)
    if isinstance(action, ParameterScaling):
        return ScaleParameter(action)
    found = action.specialize(site) if isinstance(action, SpecializingAction) else action
    if isinstance(found, Measurement):
        return Measure(action, action_key(found), found.apply, found.statistics, found.fails, rule)
    run = found.apply if isinstance(found, Action) else found
    examples = found if isinstance(found, ExampleAction) and found.example_quantities else None
    reads_losses = isinstance(found, LossAction) and bool(found.loss_figures)
    reads_value = examples is None and not reads_losses and takes_value(found)
    others = lower_action(found.without_losses, site, rule) if isinstance(found, LossAction) else None
    of_others = replace(others, action=action) if isinstance(others, Measure) and others.statistics else None
    statistics = found.statistics if isinstance(found, MeasuringAction) else {}
    return Replace(action, action_key(found), run, reads_value, examples, reads_losses, of_others, statistics, rule)


def lower_saved(answers: Sequence[Answered], site: Site) -> SavedPlan:
    """Return the plan for a saved tensor; PolicyError for answers that contradict each other."""
    forms: list[SavedForm] = []
    recomputation: Recomputation | None = None
    measured: list[Replace | Omitted] = []
    for answered in answers:
        action = answered.action
        if isinstance(action, SavedForm):
            if action_key(action) not in map(action_key, forms):
                forms.append(action)
        elif isinstance(action, Recomputation):
            recomputation = action
        else:
            insertion = lower_action(action, site, answered.rule)
            assert isinstance(insertion, Replace | Omitted)
            measured.append(insertion)
    kinds = [type(form) for form in forms]
    if (recomputation is not None and forms) or len(set(kinds)) < len(kinds):
        given = ", ".join(describe(a.action) for a in answers)
        raise PolicyError(
            f"{site}: {given}: one tensor is kept in one form, which Offload() may keep in host memory, or it is "
            "computed again; let the rules match different sites",
            code="saved-tensor",
        )
    return SavedPlan(tuple(forms), recomputation, tuple(measured))


def is_in_units(insertion: Insertion | GroupInsertion) -> bool:
    """Return whether an insertion needs the unscaled gradient; a group's factor takes the scale itself."""
    if isinstance(insertion, Measure):
        return not IN_UNITS.isdisjoint(insertion.statistics.values())
    return not isinstance(insertion, ScaleGroup | WeighLosses | ScaleParameter | Omitted | JudgeGroup)


def _groups(members: Sequence[tuple[InsertionPoint, Answered]]) -> list[GroupInsertion]:
    groups: dict[tuple[type, Hashable], dict[InsertionPoint, Answered]] = defaultdict(dict)
    named_at: dict[tuple[type, Hashable], tuple[int, ...]] = {}
    for point, answered in members:
        key = (type(answered.action), answered.action.group)
        groups[key].setdefault(point, answered)
        first, known = next(iter(groups[key].items()))
        _check_same((first, known.action), (point, answered.action))
        named_at[key] = min(named_at.get(key, answered.position), answered.position)
    _check_names([group for _, group in groups])
    ordered = sorted(groups, key=named_at.__getitem__)  # stable: equal positions stay in the order of sites
    return [_lower_group(next(iter(groups[key].values())), list(groups[key])) for key in ordered]


def _lower_group(answered: Answered, points: Sequence[InsertionPoint]) -> GroupInsertion:
    action, rule = answered.action, answered.rule
    if isinstance(action, ExampleClip):
        return WeighExamples(action, points, rule)
    if isinstance(action, LossWeighing):
        return WeighLosses(action, points, rule)
    if isinstance(action, UpdateJudge):
        return JudgeGroup(action, points, rule)
    if isinstance(action, NormScaling):
        return ScaleGroup(action, points, rule)
    return ReplaceGroup(action, points, rule)


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


def _check_same(first: tuple[InsertionPoint, GroupAction], other: tuple[InsertionPoint, GroupAction]) -> None:
    if action_key(first[1]) != action_key(other[1]):
        raise PolicyError(
            f"{other[0].site}: {other[1]!r} and {first[1]!r} at {first[0].site} are in one group {first[1].group!r}, "
            "which has one bound, one norm type and one log; give one of them another group",
            code="groups",
        )
