"""Parameters and optimizer state behind ``optimizer.step()``: measured, kept, checked."""

from __future__ import annotations

import weakref
from collections import defaultdict
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor

from gradrewrite._compat import fake_tensors
from gradrewrite._compat.dtensors import is_dtensor
from gradrewrite._utils.formatting import nearest
from gradrewrite.distributed.groups import RankGroups
from gradrewrite.distributed.shards import local_of, spread_of
from gradrewrite.errors import NoSuchSiteError
from gradrewrite.ir.ops import measure_all
from gradrewrite.ir.record_key import RecordKey
from gradrewrite.ir.record_layout import BackwardOutputs, FiniteCheck
from gradrewrite.optimizer._target import Target
from gradrewrite.optimizer.step_exchange import ExchangeSettings, SpreadSite, exchange_figures
from gradrewrite.policy.rules import Answered, ask_in_order, parameter_site, rules_at, state_site
from gradrewrite.policy.sampling import interval_of
from gradrewrite.policy.scope import Context, refuse
from gradrewrite.rewriting.action_tracing import check_dense
from gradrewrite.rewriting.lowering import Measure, Replace, lower_action
from gradrewrite.rewriting.record_nodes import RecordNumbering
from gradrewrite.sites import Pattern, Site

_PATIENCE = 3  # steps without any state, until a rule for it is said to do nothing

# Target, name and number among equal names, of each parameter of the optimizer; None without a name.
Names = Sequence[tuple[int, str, int] | None]


@dataclass(frozen=True, slots=True)
class _Member:
    """A tensor with actions that are due."""

    site: Site
    parameter: int  # position in the optimizer
    key: str | None  # of the state; None for the parameter itself
    target: int
    answers: tuple[Answered, ...]


@dataclass(slots=True)
class _Found:
    """The measurements of one step."""

    keys: dict[torch.device | None, list[RecordKey]] = field(default_factory=lambda: defaultdict(list))  # None: spread
    plain: dict[torch.device, list[tuple[Tensor, list[str]]]] = field(default_factory=lambda: defaultdict(list))
    spread: list[tuple[SpreadSite, Tensor]] = field(default_factory=list)
    checks: list[FiniteCheck] = field(default_factory=list)
    kept: list[tuple[Site, str, Tensor]] = field(default_factory=list)


class ObservedState:
    """The actions at parameters and state of one optimizer: they only measure, outside of any graph.

    Sharded tensors have the figures of the whole: in a step with a due measurement of such, each set of ranks makes one
    all-reduce with ``SUM`` and, where extremes are measured, one with ``MAX``.
    """

    def __init__(self, targets: Sequence[Target], groups: RankGroups) -> None:
        """Take the targets for their policies; NoSuchSiteError for a rule that matches no parameter of its model."""
        self._targets, self._groups = targets, groups
        self._key: Hashable = None  # of the tensors that the policies were asked about
        self._members: tuple[_Member, ...] = ()
        self._num_empty = 0  # steps without any state
        for target in targets:
            parameters = target.parameters()
            sites = [parameter_site(name, p) for name, p in parameters.items()]
            for rule in [] if target.session is None else rules_at(target.session.config.policy, "param"):
                # A backend knows no parameters before its first graph.
                if parameters and not any(map(Pattern.parse(rule.pattern).matches, sites)):
                    raise NoSuchSiteError(rule.pattern, nearest(rule.pattern, list(map(str, sites)))[:5])

    @property
    def may_act(self) -> bool:
        """Whether a policy may have actions at parameters or state."""
        return any(t.session is not None and t.session.rules.may_observe_updates for t in self._targets)

    def measure(
        self, optimizer: torch.optim.Optimizer, names: Names, guard: int, num_guards: int
    ) -> tuple[BackwardOutputs, list[Tensor]] | None:
        """Return the records and the kept tensors of a step that is over; None where nothing is due.

        NoSuchSiteError where all guards (this one by its number) have state, and a rule matches none of it.
        """
        own = [p for group in optimizer.param_groups for p in group["params"]]
        states = [_tensors_of(optimizer.state.get(p, {})) for p in own]
        sessions = [None if (s := target.session) is None else weakref.ref(s) for target in self._targets]
        key = tuple(sessions), tuple(names), tuple((p.shape, *s) for p, s in zip(own, states, strict=True))
        if key != self._key:
            with fake_tensors.outside_of_modes():
                self._members = self._ask(own, states, names, guard, num_guards)
            self._key = key
        self._warn_of_none(optimizer, states)
        due = [member for member in map(self._due, self._members) if member.answers]
        if not due:
            return None
        with torch.no_grad():
            return self._measure([(m, own[m.parameter] if m.key is None else states[m.parameter][m.key]) for m in due])

    def _ask(
        self, own: Sequence[Tensor], states: Sequence[Mapping[str, Tensor]], names: Names, guard: int, num_guards: int
    ) -> tuple[_Member, ...]:
        members = []
        sites: dict[int, list[Site]] = defaultdict(list)  # of state, by target
        for n, (parameter, found, named) in enumerate(zip(own, states, names, strict=True)):
            if named is None:
                continue
            number, name, call = named
            at_state = [(state_site(name, key, tensor), key, tensor) for key, tensor in found.items()]
            sites[number] += [site for site, _, _ in at_state]
            for site, key, tensor in ((parameter_site(name, parameter), None, parameter), *at_state):
                answers = self._answers(number, site, tensor)
                if answers:
                    members.append(_Member(replace(site, call=call), n, key, number, answers))
        for number, target in enumerate(self._targets):
            if target.session is not None:
                target.session.rules.note_state_sites(guard, sites[number], num_guards)
        return tuple(members)

    def _answers(self, number: int, site: Site, tensor: Tensor) -> tuple[Answered, ...]:
        session = self._targets[number].session
        if session is None:
            return ()
        answers = ask_in_order(session.config.policy, site, (number,))
        for answered in answers:
            check_dense(answered.action, site, tensor)
            if fake_tensors.is_wrapper(tensor) and not is_dtensor(tensor):
                refuse(answered.action, Context(site, tensor_type=type(tensor).__name__))
            if tensor.is_complex():
                _lowered(answered, site).run(local_of(tensor))  # which refuses what needs an order
        session.rules.note_step_answers(answered.position[1:] for answered in answers)
        return answers

    def _due(self, member: _Member) -> _Member:
        """Return the member with the actions that are due in the step at hand."""
        session = self._targets[member.target].session
        if session is None:
            return replace(member, answers=())
        session.sampling.begin()
        intervals = [(answered, interval_of(answered.action)) for answered in member.answers]
        is_due = session.sampling.is_due
        return replace(member, answers=tuple(a for a, every in intervals if every is None or is_due(every)))

    def _measure(self, given: Sequence[tuple[_Member, Tensor]]) -> tuple[BackwardOutputs, list[Tensor]]:
        numbering, found = RecordNumbering(), _Found()
        for member, tensor in given:
            site, part, layout = member.site, local_of(tensor).detach(), spread_of(tensor)
            is_spread = layout is not None and len(layout.ranks) > 1 and layout.size > 0
            for insertion in (_lowered(answered, site) for answered in member.answers):
                if isinstance(insertion, Replace):  # no other action that is none of ``Measure`` may stand here
                    found.kept.append((site, insertion.action.what, tensor.detach().clone()))
                    continue
                keys = numbering.new(insertion.statistics, str(site))
                found.keys[None if is_spread else part.device] += keys
                if keys and not is_spread:
                    found.plain[part.device].append((part, list(insertion.statistics.values())))
                if insertion.fails is not None:
                    found.checks.append(FiniteCheck(site, insertion.fails, keys[-1], len(found.checks), ""))
            if is_spread and layout is not None:
                self._note_mesh(tensor)
                found.spread.append((SpreadSite(site, layout, member.answers, None), part))
        packs = [(found.keys[device], measure_all(reports)) for device, reports in found.plain.items()]
        if found.keys[None]:
            packs.append((found.keys[None], self._exchange(found.spread)))
        outputs = BackwardOutputs(
            packs=tuple(tuple(keys) for keys, _ in packs),
            keys=tuple(key for keys, _ in packs for key in keys),
            num_skips=(0,) * len(packs),
            verdicts=(False,) * len(packs),
            kept=tuple(site for site, _, _ in found.kept),
            kept_as=tuple(what for _, what, _ in found.kept),
            kept_every=(1,) * len(found.kept),
            checks=tuple(found.checks),
            counts=frozenset(numbering.counts),
        )
        return outputs, [*(pack for _, pack in packs), *(tensor for _, _, tensor in found.kept)]

    def _exchange(self, spread: Sequence[tuple[SpreadSite, Tensor]]) -> Tensor:
        sets = sorted({member.spread.ranks for member, _ in spread})
        groups = {ranks: self._groups.of_ranks(ranks) for ranks in sets}
        settings = ExchangeSettings(tuple(member for member, _ in spread), groups)
        figures = exchange_figures(settings, [part for _, part in spread])
        widest = torch.float64 if any(figure.dtype == torch.float64 for figure in figures) else torch.float32
        return torch.stack([figure.to(widest) for figure in figures])

    def _note_mesh(self, tensor: Tensor) -> None:
        if is_dtensor(tensor):
            self._groups.note_mesh(tensor.device_mesh)

    def _warn_of_none(self, optimizer: torch.optim.Optimizer, states: Sequence[Mapping[str, Tensor]]) -> None:
        """Warn once of a rule for the state of an optimizer that has none."""
        self._num_empty = _PATIENCE + 1 if any(states) else self._num_empty + 1
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


def _tensors_of(state: Mapping[Any, Any]) -> dict[str, Tensor]:
    tensors = ((str(key), value) for key, value in state.items() if isinstance(value, Tensor))
    return {key: value for key, value in tensors if value.is_floating_point() or value.is_complex()}


def _lowered(answered: Answered, site: Site) -> Measure | Replace:
    insertion = lower_action(answered.action, site, answered.rule)
    assert isinstance(insertion, Measure | Replace)
    return insertion
