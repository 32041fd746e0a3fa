"""Parameters and optimizer state behind ``optimizer.step()``: measured, kept, checked."""

from __future__ import annotations

import weakref
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, TypeAlias

import torch
from torch import Tensor

from gradrewrite._compat import fake_tensors
from gradrewrite._compat.dtensors import is_dtensor
from gradrewrite._utils.formatting import nearest
from gradrewrite.distributed.groups import RankGroups
from gradrewrite.distributed.shards import local_of, spread_of
from gradrewrite.errors import NoSuchSiteError
from gradrewrite.ir.outputs import BackwardOutputs, Pack
from gradrewrite.ir.provenance import Anchor
from gradrewrite.ir.record_key import RecordKey
from gradrewrite.numerics.measuring import measure_all
from gradrewrite.optimizer._target import Target
from gradrewrite.optimizer.step_exchange import ExchangeSettings, Slot, SpreadSite, exchange_figures, slots_of
from gradrewrite.policy.insertions import KeepTensor, MeasureTensor, Omitted
from gradrewrite.policy.rules import Answered, parameter_site, rules_at, state_site
from gradrewrite.rewriting.record_packing import RecordPacking
from gradrewrite.sites import Pattern, Site

_PATIENCE = 3  # steps without any state, until a rule for it is said to do nothing

_Interval: TypeAlias = tuple[int, int | None]  # of an action: its target, and its steps; None for each step

# Target, name and number among equal names, of each parameter of the optimizer; None without a name.
Names = Sequence[tuple[int, str, int] | None]


@dataclass(frozen=True, slots=True)
class _Member:
    """A tensor with actions."""

    site: Site
    parameter: int  # position in the optimizer
    key: Any  # of the state; None for the parameter itself
    target: int
    answers: tuple[Answered, ...]
    intervals: frozenset[_Interval]  # of these


@dataclass(slots=True)
class _Reading:
    """The measurements of these members; positions are theirs."""

    members: Sequence[_Member]
    plain: dict[torch.device, list[tuple[int, list[str]]]] = field(default_factory=lambda: defaultdict(list))
    spread: dict[int, SpreadSite] = field(default_factory=dict)
    settings: ExchangeSettings | None = None  # for the spread ones
    slots: Sequence[Slot] = ()
    kept: list[int] = field(default_factory=list)
    outputs: BackwardOutputs = field(default_factory=BackwardOutputs)  # packs of devices, that of spread ones, kept


class ObservedState:
    """The actions at parameters and state of one optimizer: they only measure, outside of any graph.

    Sharded tensors have the figures of the whole: in a step with a due measurement of such, each set of ranks makes one
    all-reduce with ``SUM`` and, where extremes are measured, one with ``MAX``.
    """

    def __init__(self, targets: Sequence[Target], groups: RankGroups) -> None:
        """Take the targets for their policies; NoSuchSiteError for rules without parameters."""
        self._targets, self._groups = targets, groups
        self._names: Names = ()  # at the last question to the policies
        self._key: object = None  # of the tensors and policies then
        self._members: tuple[_Member, ...] = ()
        self._due: frozenset[_Interval] = frozenset()  # all that members have
        self._readings: dict[frozenset[_Interval], _Reading] = {}  # by what is due
        self._has_state = False
        self._num_empty = 0  # steps without any state
        for target in targets:
            parameters = target.parameters()
            sites = [parameter_site(name, p) for name, p in parameters.items()]
            for rule in [] if target.session is None else rules_at(target.session.config.policy, "param"):
                # A backend knows no parameters before its first graph.
                if parameters and not any(map(Pattern.parse(rule.pattern).matches, sites)):
                    raise NoSuchSiteError(rule.pattern, nearest(rule.pattern, list(map(str, sites)))[:5], rule.source)

    @property
    def may_act(self) -> bool:
        """Whether a policy may have actions at parameters or state."""
        return any(t.session is not None and t.session.rules.may_observe_updates for t in self._targets)

    def measure(
        self, optimizer: torch.optim.Optimizer, names: Names, guard: int, num_guards: int
    ) -> tuple[BackwardOutputs, list[Tensor]] | None:
        """Return records and kept tensors of a finished step; else None.

        NoSuchSiteError where all guards (this one by its number) have state, and a rule matches none of it.
        """
        own = [p for group in optimizer.param_groups for p in group["params"]]
        states: list[Mapping[Any, Any]] = [optimizer.state.get(p, {}) for p in own]
        sessions = [None if (s := target.session) is None else weakref.ref(s) for target in self._targets]
        key = sessions, [(p.shape, _num_tensors(s)) for p, s in zip(own, states, strict=True)]
        if names is not self._names or key != self._key:
            with fake_tensors.outside_of_modes():
                self._members = self._ask(own, states, names, guard, num_guards)
            self._names, self._key = names, key
            self._readings.clear()
            self._due = frozenset((m.target, a.insertion.every) for m in self._members for a in m.answers)
        self._warn_of_none(optimizer)
        due = frozenset(interval for interval in self._due if self._is_due(*interval))
        if not due:
            return None
        members = [m for m in self._members if not due.isdisjoint(m.intervals)]
        tensors = [own[m.parameter] if m.key is None else states[m.parameter][m.key] for m in members]
        with torch.no_grad():
            if due not in self._readings:
                self._readings[due] = self._read(members, tensors, due)
            reading = self._readings[due]
            return reading.outputs, self._measure(reading, tensors)

    def _ask(
        self, own: Sequence[Tensor], states: Sequence[Mapping[Any, Any]], names: Names, guard: int, num_guards: int
    ) -> tuple[_Member, ...]:
        members = []
        sites: dict[int, list[Site]] = defaultdict(list)  # of state, by target
        for n, (parameter, found, named) in enumerate(zip(own, states, names, strict=True)):
            if named is None:
                continue
            number, name, call = named
            at_state = [(state_site(name, str(key), tensor), key, tensor) for key, tensor in _tensors_of(found)]
            sites[number] += [site for site, _, _ in at_state]
            for site, key, tensor in ((parameter_site(name, parameter), None, parameter), *at_state):
                answers = self._answers(number, site, tensor)
                if answers:
                    intervals = frozenset((number, answered.insertion.every) for answered in answers)
                    members.append(_Member(replace(site, call=call), n, key, number, answers, intervals))
        self._has_state = any(sites.values())
        for number, target in enumerate(self._targets):
            if target.session is not None:
                target.session.rules.note_state_sites(guard, sites[number], num_guards)
        return tuple(members)

    def _answers(self, number: int, site: Site, tensor: Tensor) -> tuple[Answered, ...]:
        answers = self._targets[number].ask(number, site, tensor)
        for effect in (answered.insertion.effect for answered in answers if tensor.is_complex()):
            assert isinstance(effect, MeasureTensor | KeepTensor)
            effect.run(local_of(tensor))  # which refuses what needs an order
        return answers

    def _is_due(self, number: int, every: int | None) -> bool:
        session = self._targets[number].session
        if session is None or every is None:
            return session is not None
        session.sampling.of_update()
        return session.sampling.is_due(every)

    def _read(self, members: Sequence[_Member], tensors: Sequence[Tensor], due: frozenset[_Interval]) -> _Reading:
        packing, found = RecordPacking(), _Reading(members)
        keys: dict[torch.device | None, list[RecordKey]] = defaultdict(list)  # None: of spread tensors
        for n, (member, tensor) in enumerate(zip(members, tensors, strict=True)):
            site, layout = member.site, spread_of(tensor)
            is_spread = layout is not None and len(layout.ranks) > 1 and layout.size > 0
            is_due = ((member.target, a.insertion.every) in due for a in member.answers)
            answers = tuple(a if d else a.omitted() for a, d in zip(member.answers, is_due, strict=True))
            for insertion in (answered.insertion for answered in answers):
                match insertion.effect:
                    case Omitted(names):
                        packing.numbering.new(names, str(site))
                    case KeepTensor():
                        packing.keep(insertion, site, len(found.kept))
                        found.kept.append(n)
                    case MeasureTensor(statistics):
                        seen = Anchor("", n)  # of no node; checks are in the order of the members
                        keys[None if is_spread else tensor.device] += packing.measure(insertion, site, seen=seen)
                        if statistics and not is_spread:
                            found.plain[tensor.device].append((n, list(statistics.values())))
                    case _:
                        raise AssertionError(f"{insertion.action!r} does not stand at parameters or state")
            if is_spread and layout is not None:
                self._note_mesh(tensor)
                found.spread[n] = SpreadSite(site, layout, answers, None)
        if keys[None]:
            spread = tuple(found.spread.values())
            groups = {ranks: self._groups.of_ranks(ranks) for ranks in sorted({one.spread.ranks for one in spread})}
            found.settings, found.slots = ExchangeSettings(spread, groups), slots_of(spread)
        packs = [Pack(tuple(keys[device])) for device in (*found.plain, None) if keys.get(device)]
        found.outputs = packing.outputs(packs, (key for pack in packs for key in pack.keys))
        return found

    def _measure(self, reading: _Reading, tensors: Sequence[Tensor]) -> list[Tensor]:
        """Return the packs, and copies of the kept tensors."""
        parts = [local_of(tensor).detach() for tensor in tensors]
        found = [measure_all([(parts[n], names) for n, names in reports]) for reports in reading.plain.values()]
        if reading.settings is not None:
            own = {member.site: parts[n] for n, member in reading.spread.items()}
            figures = exchange_figures(reading.settings, reading.slots, own)
            widest = torch.float64 if any(figure.dtype == torch.float64 for figure in figures) else torch.float32
            found.append(torch.stack([figure.to(widest) for figure in figures]))
        return found + [tensors[n].detach().clone() for n in reading.kept]

    def _note_mesh(self, tensor: Tensor) -> None:
        if is_dtensor(tensor):
            self._groups.note_mesh(tensor.device_mesh)

    def _warn_of_none(self, optimizer: torch.optim.Optimizer) -> None:
        """Warn once of a rule for an optimizer without state."""
        self._num_empty = _PATIENCE + 1 if self._has_state else self._num_empty + 1
        if self._num_empty != _PATIENCE:
            return
        for session in (target.session for target in self._targets if target.session is not None):
            for rule in rules_at(session.config.policy, "state"):
                session.warnings.warn_once(
                    rule.pattern,
                    f"{rule.pattern!r} does nothing: after {_PATIENCE} steps this {type(optimizer).__name__} has no "
                    "tensor in its state",
                )
            session.warnings.flush_warnings()


def _tensors_of(state: Mapping[Any, Any]) -> list[tuple[Any, Tensor]]:
    tensors = ((key, value) for key, value in state.items() if isinstance(value, Tensor))
    return [(key, value) for key, value in tensors if value.is_floating_point() or value.is_complex()]


def _num_tensors(state: Mapping[Any, Any]) -> int:
    return sum([isinstance(value, Tensor) for value in state.values()])
