"""Held elements and functions behind ``optimizer.step()``."""

from __future__ import annotations

import itertools
from collections import OrderedDict
from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, TypeAlias

import torch
from torch import Tensor

from gradrewrite._compat import dynamo_cache, fake_tensors, optimizers
from gradrewrite.backends.engines import AotEager
from gradrewrite.distributed.shards import local_of
from gradrewrite.errors import PolicyError
from gradrewrite.ir.markers import value_of
from gradrewrite.ir.outputs import BackwardOutputs
from gradrewrite.optimizer._target import Target
from gradrewrite.optimizer.step_graph import AtSteps, reads_value, runnable
from gradrewrite.optimizer.step_plan import ChangePlan
from gradrewrite.optimizer.step_sites import MAX_PLANS, spread_over_ranks
from gradrewrite.optimizer.update_graph import HeldParameter, Updated, UpdateRewrite, rewrite_update
from gradrewrite.optimizer.updated_tensors import Member, Names
from gradrewrite.policy.actions import describe
from gradrewrite.policy.insertions import Insertion
from gradrewrite.policy.rules import parameter_site, state_site
from gradrewrite.policy.state_store import write_states
from gradrewrite.sites import Site

Place: TypeAlias = tuple[int, Any]  # position of a parameter in the optimizer, and key of its state or None

_FACTORED = (
    "{}: {} holds elements of the parameter with those of its optimizer's state, and {} keeps {} for the parameter of "
    "shape {}, which has no element for each of its own. Take an optimizer with state of the parameter's shape (AdamW, "
    "SGD), or leave this parameter out"
)


@dataclass(frozen=True, slots=True)
class Work:
    """The actions behind one update, and the tensors from before it."""

    names: Names = ()
    members: Sequence[Member] = ()
    held: Mapping[int, tuple[Insertion, ...]] = field(default_factory=dict)  # by position of the parameter
    at_steps: AtSteps = field(default_factory=AtSteps)
    gradients: Sequence[Tensor] = ()  # of the held parameters
    before: Mapping[Place, Tensor] = field(default_factory=dict)  # copies of parts on this rank

    @property
    def changing(self) -> dict[Place, Member]:
        """The tensors with functions."""
        return {(member.parameter, member.key): member for member in self.members if member.changing}


@dataclass(frozen=True, slots=True)
class _Tensors:
    """The tensors of a work as they are now, and those that its graph reads."""

    places: Sequence[Place]
    tensors: Sequence[Tensor]
    before: Sequence[Place]  # with a copy from before
    held: Mapping[int, Sequence[int]]  # positions among the places, by that of the parameter
    inputs: Sequence[Tensor]  # the tensors, the copies, the gradients


@dataclass(frozen=True, slots=True)
class _Plan:
    rewrite: UpdateRewrite
    run: Callable[..., Any]
    live: Sequence[Tensor]


class ChangedState:
    """The actions of one optimizer behind its update, as one graph."""

    def __init__(self, targets: Sequence[Target]) -> None:
        """Take the targets for their states and engine."""
        self._targets = targets
        self._plans: OrderedDict[Hashable, _Plan] = OrderedDict()
        self._checked: set[Hashable] = set()  # works that were traced before an update
        self._members: Sequence[Member] = ()  # for which they were made

    def plan(self, optimizer: torch.optim.Optimizer, work: Work) -> ChangePlan | None:
        """Return the graph of a work, for the graph of a whole step; None without any action.

        CallbackError or PolicyError as from ``run``.
        """
        if not (work.held or work.changing):
            return None
        self._check_whole(optimizer, work)
        own = _parameters(optimizer)
        work = replace(work, gradients=[own[n].detach() for n in work.held])
        tensors = self._tensors(optimizer, work)
        rewrite = self._rewrite(work, tensors, may_be_skipped=False)
        return ChangePlan(rewrite, tensors.places, tensors.before, list(work.held))

    def _check_whole(self, optimizer: torch.optim.Optimizer, work: Work) -> None:
        own = _parameters(optimizer)
        for n, insertions in work.held.items():
            if optimizers.has_factored_state(optimizer, own[n]):
                raise _factored(work, n, own[n], insertions[0], optimizer, "rows and columns")

    def prepare(self, optimizer: torch.optim.Optimizer, work: Work) -> Work:
        """Return a work with copies of the tensors read behind the update.

        Functions are traced before anything is changed: CallbackError or PolicyError as from ``run``, but for state
        that the update is to make.
        """
        own = _parameters(optimizer)
        if not (work.held or work.changing):
            return work
        self._check_whole(optimizer, work)
        gradients = [grad for n in work.held if (grad := own[n].grad) is not None]
        places = self._places(optimizer, work)
        with torch.no_grad():
            read = {place: local_of(tensor).detach() for place, tensor in places.items() if _is_read(work, place)}
            copies = [torch.empty_like(part) for part in read.values()]
            if copies:
                optimizers.foreach_copy(copies, list(read.values()))
        work = replace(work, gradients=gradients, before=dict(zip(read, copies, strict=True)))
        tensors = self._tensors(optimizer, work)
        key = self._key(work, tensors)
        if key not in self._checked and (key, False) not in self._plans and (key, True) not in self._plans:
            with fake_tensors.outside_of_modes(), dynamo_cache.compiling():
                self._rewrite(work, tensors, may_be_skipped=False)
            self._checked.add(key)
        return work

    def run(
        self, optimizer: torch.optim.Optimizer, work: Work, verdict: Tensor | None
    ) -> tuple[BackwardOutputs, list[Tensor]] | None:
        """Put back held elements and call functions; return records and kept tensors.

        ``verdict`` is not 0 where the device has skipped the update, which the host does not know: tensors and states
        stay as they are then, and records are NaN. None without any action.
        """
        if not (work.held or work.changing):
            return None
        tensors = self._tensors(optimizer, work)
        plan = self._plan_for(work, tensors, may_be_skipped=verdict is not None)
        with torch.no_grad():
            verdicts = [] if verdict is None else [verdict.reshape(()).to(tensors.inputs[0].device)]
            packs, kept, states = plan.rewrite.outputs.split(list(plan.run(*tensors.inputs, *verdicts, *plan.live)))
            targets = [tensor for _, tensor in plan.rewrite.outputs.states]
            if verdict is not None:
                is_skipped = verdict.reshape(()) > 0
                states = [torch.where(is_skipped.to(t.device), t, n) for t, n in zip(targets, states, strict=True)]
                packs = [pack.masked_fill(is_skipped.to(pack.device), torch.nan) for pack in packs]
            write_states(targets, states)
        return plan.rewrite.outputs, [*packs, *kept]

    def _places(self, optimizer: torch.optim.Optimizer, work: Work) -> dict[Place, Tensor]:
        """Return the tensors of a work; PolicyError for state without an element for each of the parameter."""
        own = _parameters(optimizer)
        found: dict[Place, Tensor] = {}
        for n, insertions in work.held.items():
            found |= _held_tensors(optimizer, work, n, own[n], insertions[0])
        for n, key in work.changing:
            found[n, key] = own[n] if key is None else optimizer.state[own[n]][key]
        return found

    def _tensors(self, optimizer: torch.optim.Optimizer, work: Work) -> _Tensors:
        places, own = self._places(optimizer, work), _parameters(optimizer)
        held = {
            n: [list(places).index(place) for place in _held_tensors(optimizer, work, n, own[n], insertions[0])]
            for n, insertions in work.held.items()
        }
        of_held = set(itertools.chain.from_iterable(held.values()))
        before = [place for n, place in enumerate(places) if n in of_held or _is_read(work, place)]
        with torch.no_grad():
            values = {place: local_of(tensor).detach() for place, tensor in places.items()}
            copies = [_before(optimizer, work, place, values[place]) for place in before]
            gradients = [local_of(gradient).detach() for gradient in work.gradients]
        return _Tensors(list(places), list(places.values()), before, held, [*values.values(), *copies, *gradients])

    def _key(self, work: Work, tensors: _Tensors) -> Hashable:
        forms = tuple((t.shape, t.stride(), t.dtype, t.device) for t in tensors.inputs)
        holds = tuple((n, tuple(insertion.key for insertion in own)) for n, own in work.held.items())
        sessions = [target.session for target in self._targets if target.session is not None]
        values = tuple([(id(session), session.step_values.number()) for session in sessions])
        return forms, tuple(tensors.places), tuple(tensors.before), holds, values

    def _plan_for(self, work: Work, tensors: _Tensors, *, may_be_skipped: bool) -> _Plan:
        """Return the graph for tensors of these forms; it is kept for later steps."""
        if work.members is not self._members:
            self._members = work.members
            self._plans.clear()
            self._checked.clear()
        known = self._plans.get((self._key(work, tensors), may_be_skipped))
        if known is not None:
            return known
        with fake_tensors.outside_of_modes(), dynamo_cache.compiling():
            rewrite = self._rewrite(work, tensors, may_be_skipped=may_be_skipped)
            gm, live = runnable(rewrite.graph_module, len(tensors.places))
            engine = next((t.engine for t in self._targets if t.engine is not None), None) or AotEager()
            run = engine.compile_step(gm, [value_of(node) for node in gm.graph.find_nodes(op="placeholder")])
        plan = self._plans[self._key(work, tensors), may_be_skipped] = _Plan(rewrite, run, live)
        if len(self._plans) > MAX_PLANS:
            self._plans.popitem(last=False)
        return plan

    def _rewrite(self, work: Work, tensors: _Tensors, *, may_be_skipped: bool) -> UpdateRewrite:
        changing = work.changing
        for member in changing.values():
            session = self._targets[member.target].session
            if session is not None:
                own = tuple(replace(a, position=a.position[1:]) for a in member.changing)
                session.step_values.note({replace(member.site, call=0): own})
        fakes = iter(fake_tensors.fakes_of(tensors.inputs))
        values = [next(fakes) for _ in tensors.places]
        copies = {place: next(fakes) for place in tensors.before}
        updated = [
            Updated(
                _site_of(work.names, place[0], tensor, place[1]),
                value,
                copies.get(place),
                tuple(a.insertion for a in changing[place].changing) if place in changing else (),
                spread_over_ranks(tensor),
            )
            for place, tensor, value in zip(tensors.places, tensors.tensors, values, strict=True)
        ]
        held = [
            HeldParameter(work.held[n], tuple(members), gradient)
            for (n, members), gradient in zip(tensors.held.items(), fakes, strict=True)
        ]
        states = next((t.session.config.states for t in self._targets if t.session is not None), None)
        return rewrite_update(updated, held, states, work.at_steps, may_be_skipped=may_be_skipped)


def _parameters(optimizer: torch.optim.Optimizer) -> list[Tensor]:
    return [p for group in optimizer.param_groups for p in group["params"]]


def _is_read(work: Work, place: Place) -> bool:
    """Whether a tensor is read as it was before the update."""
    member = work.changing.get(place)
    return place[0] in work.held or (member is not None and any(reads_value(a.insertion) for a in member.changing))


def _site_of(names: Names, n: int, tensor: Tensor, key: Any = None) -> Site:
    named = names[n]
    assert named is not None  # or it would have no actions
    _, name, call = named
    site = parameter_site(name, tensor) if key is None else state_site(name, str(key), tensor)
    return replace(site, call=call)


def _held_tensors(
    optimizer: torch.optim.Optimizer, work: Work, n: int, parameter: Tensor, insertion: Insertion
) -> dict[Place, Tensor]:
    """Return a parameter and its state, without the numbers; PolicyError for a tensor of another shape."""
    found: dict[Place, Tensor] = {(n, None): parameter}
    for key, value in optimizer.state.get(parameter, {}).items():
        if isinstance(value, list | tuple | dict) and any(isinstance(one, Tensor) for one in _items(value)):
            raise _factored(work, n, parameter, insertion, optimizer, f"{key!r}, several tensors,")
        if not isinstance(value, Tensor) or optimizers.is_number(key):
            continue
        if value.shape == parameter.shape:
            found[n, key] = value
        elif value.numel() != 1:
            shape = tuple(value.shape)
            raise _factored(work, n, parameter, insertion, optimizer, f"{key!r} of the shape {shape}")
    return found


def _items(value: Any) -> Sequence[Any]:
    return list(value.values()) if isinstance(value, dict) else value


def _factored(
    work: Work, n: int, parameter: Tensor, insertion: Insertion, optimizer: torch.optim.Optimizer, what: str
) -> PolicyError:
    site, name = replace(_site_of(work.names, n, parameter), kind="step"), type(optimizer).__name__
    text = _FACTORED.format(site, describe(insertion.action), name, what, tuple(parameter.shape))
    return PolicyError(text, code="optimizer")


def _before(optimizer: torch.optim.Optimizer, work: Work, place: Place, value: Tensor) -> Tensor:
    """Return a tensor from before the update; zeros for new state."""
    if place in work.before:
        return work.before[place]
    return torch.zeros_like(value) if optimizers.begins_at_zero(optimizer, place[1]) else value.clone()
