"""Parameters and optimizer state behind ``optimizer.step()``, with the answers of the policies there."""

from __future__ import annotations

import weakref
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, TypeAlias

import torch
from torch import Tensor

from gradrewrite._compat import fake_tensors
from gradrewrite._utils.formatting import nearest
from gradrewrite.distributed.shards import local_of
from gradrewrite.errors import NoSuchSiteError
from gradrewrite.optimizer._target import Target
from gradrewrite.policy.insertions import KeepTensor, MeasureTensor
from gradrewrite.policy.rules import Answered, parameter_site, rules_at, state_site
from gradrewrite.sites import Pattern, Site

_PATIENCE = 3  # steps without any state, until a rule for it is said to do nothing

# Target, name and number among equal names, of each parameter of the optimizer; None without a name.
Names: TypeAlias = Sequence[tuple[int, str, int] | None]


@dataclass(frozen=True, slots=True)
class Member:
    """A tensor with actions."""

    site: Site
    parameter: int  # position in the optimizer
    key: Any  # of the state; None for the parameter itself
    target: int
    answers: tuple[Answered, ...]

    @property
    def measuring(self) -> tuple[Answered, ...]:
        """The answers that leave it as it is."""
        return tuple(a for a in self.answers if isinstance(a.insertion.effect, MeasureTensor | KeepTensor))

    @property
    def changing(self) -> tuple[Answered, ...]:
        """The functions that change it."""
        return tuple(a for a in self.answers if not isinstance(a.insertion.effect, MeasureTensor | KeepTensor))


class UpdatedTensors:
    """The tensors of one optimizer with actions at ``param`` and ``state`` sites."""

    def __init__(self, targets: Sequence[Target], guard: int) -> None:
        """Take the targets for their policies, and the ``id()`` of the guard; NoSuchSiteError without parameters."""
        self._targets, self._guard = targets, guard
        self._names: Names = ()  # at the last question to the policies
        self._key: object = None  # of the tensors and policies then
        self._members: tuple[Member, ...] = ()
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
        return any(t.session is not None and t.session.rules.may_act_after_updates for t in self._targets)

    def members(self, optimizer: torch.optim.Optimizer, names: Names, num_guards: int) -> tuple[Member, ...]:
        """Return the tensors with actions; the tuple is the same one until something has changed.

        NoSuchSiteError where all guards have state, and a rule matches none of it.
        """
        if not self.may_act:
            return ()
        own = [p for group in optimizer.param_groups for p in group["params"]]
        states: list[Mapping[Any, Any]] = [optimizer.state.get(p, {}) for p in own]
        sessions = [None if (s := target.session) is None else weakref.ref(s) for target in self._targets]
        key = sessions, [(p.shape, p.dtype, p.device, _num_tensors(s)) for p, s in zip(own, states, strict=True)]
        if names is not self._names or key != self._key:
            with fake_tensors.outside_of_modes():
                self._members = self._ask(own, states, names, num_guards)
            self._names, self._key = names, key
        return self._members

    def warn_of_none(self, optimizer: torch.optim.Optimizer) -> None:
        """Warn once, after some steps, of a rule for an optimizer without state."""
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

    def _ask(
        self, own: Sequence[Tensor], states: Sequence[Mapping[Any, Any]], names: Names, num_guards: int
    ) -> tuple[Member, ...]:
        members = []
        sites: dict[int, list[Site]] = defaultdict(list)  # of state, by target
        for n, (parameter, found, named) in enumerate(zip(own, states, names, strict=True)):
            if named is None:
                continue
            number, name, call = named
            at_state = [(state_site(name, str(key), tensor), key, tensor) for key, tensor in tensors_of(found)]
            sites[number] += [site for site, _, _ in at_state]
            for site, key, tensor in ((parameter_site(name, parameter), None, parameter), *at_state):
                answers = self._answers(number, site, tensor)
                if answers:
                    members.append(Member(replace(site, call=call), n, key, number, answers))
        self._has_state = any(sites.values())
        for number, target in enumerate(self._targets):
            if target.session is not None:
                target.session.rules.note_state_sites(self._guard, sites[number], num_guards)
        return tuple(members)

    def _answers(self, number: int, site: Site, tensor: Tensor) -> tuple[Answered, ...]:
        answers = self._targets[number].ask(number, site, tensor)
        for effect in (answered.insertion.effect for answered in answers if tensor.is_complex()):
            if isinstance(effect, MeasureTensor):
                effect.run(local_of(tensor))  # which refuses what needs an order
        return answers


def tensors_of(state: Mapping[Any, Any]) -> list[tuple[Any, Tensor]]:
    """Return the floating-point and complex tensors in the state of a parameter, by their keys."""
    tensors = ((key, value) for key, value in state.items() if isinstance(value, Tensor))
    return [(key, value) for key, value in tensors if value.is_floating_point() or value.is_complex()]


def _num_tensors(state: Mapping[Any, Any]) -> int:
    return sum([isinstance(value, Tensor) for value in state.values()])
