"""Held elements and functions behind ``optimizer.step()``."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, TypeAlias

import torch
from torch import Tensor

from gradrewrite._compat import dynamo_cache, fake_tensors, optimizers
from gradrewrite._compat.dtensors import is_dtensor
from gradrewrite.backends.engines import AotEager
from gradrewrite.distributed.shards import local_of, spread_of
from gradrewrite.errors import PolicyError
from gradrewrite.ir.markers import value_of
from gradrewrite.ir.outputs import BackwardOutputs
from gradrewrite.optimizer._target import Target
from gradrewrite.optimizer.step_graph import runnable
from gradrewrite.optimizer.update_graph import HeldParameter, Updated, UpdateRewrite, rewrite_update
from gradrewrite.optimizer.updated_tensors import Member, Names, tensors_of
from gradrewrite.policy.actions import describe
from gradrewrite.policy.insertions import Insertion, ReplaceTensor
from gradrewrite.policy.rules import parameter_site, state_site
from gradrewrite.policy.state_store import StateStore, write_states
from gradrewrite.sites import Site

Place: TypeAlias = tuple[int, Any]  # position of a parameter in the optimizer, and key of its state or None
Held: TypeAlias = Mapping[int, tuple[Insertion, ...]]  # by position of the parameter

_FACTORED = (
    "{}: {} holds elements of the parameter with those of its optimizer's state, and {} keeps {} of the shape {} for "
    "the parameter of shape {}, whose elements belong to several of the parameter's. Take an optimizer with state of "
    "the parameter's shape (AdamW, SGD), or leave this parameter out"
)


@dataclass(frozen=True, slots=True)
class _Plan:
    rewrite: UpdateRewrite
    run: Callable[..., Any]
    live: Sequence[Tensor]


class ChangedState:
    """The actions of one optimizer behind its update, as one graph."""

    def __init__(self, targets: Sequence[Target]) -> None:
        """Take the targets for their names, states and engine."""
        self._targets = targets
        self._plans: dict[Hashable, _Plan] = {}
        self._members: Sequence[Member] = ()  # for which they were made

    def save(
        self, optimizer: torch.optim.Optimizer, names: Names, members: Sequence[Member], held: Held
    ) -> dict[Place, Tensor]:
        """Copy the tensors read behind the update, on this rank.

        PolicyError for state of a held parameter that has another shape.
        """
        own = _parameters(optimizer)
        wanted: dict[Place, Tensor] = {}
        for n, insertions in held.items():
            site = _site_of(names, n, own[n])
            if optimizers.has_factored_state(optimizer, own[n]):
                raise _factored(site, insertions[0], optimizer, "rows and columns", own[n], own[n])
            wanted |= _held_tensors(optimizer, n, own[n], site, insertions[0])
        for member in members:
            if any(_reads_before(answered.insertion) for answered in member.changing):
                parameter = own[member.parameter]
                tensor = parameter if member.key is None else optimizer.state[parameter][member.key]
                wanted[member.parameter, member.key] = tensor
        with torch.no_grad():
            parts = [local_of(tensor).detach() for tensor in wanted.values()]
            copies = [torch.empty_like(part) for part in parts]
            if parts:
                optimizers.foreach_copy(copies, parts)
        return dict(zip(wanted, copies, strict=True))

    def run(
        self,
        optimizer: torch.optim.Optimizer,
        names: Names,
        members: Sequence[Member],
        held: Held,
        saved: Mapping[Place, Tensor],
        verdict: Tensor | None,
    ) -> tuple[BackwardOutputs, list[Tensor]] | None:
        """Put back held elements and call functions; return records and kept tensors.

        None without any action.

        ``verdict`` is not 0 where the device has skipped the update, which the host does not know.
        """
        own = _parameters(optimizer)
        changing = {(m.parameter, m.key): m for m in members if m.changing}
        tensors: dict[Place, Tensor] = {}
        for n, insertions in held.items():
            tensors |= _held_tensors(optimizer, n, own[n], _site_of(names, n, own[n]), insertions[0])
        for n, key in changing:
            tensors[n, key] = own[n] if key is None else optimizer.state[own[n]][key]
        if not tensors:
            return None
        with torch.no_grad():
            values = {place: local_of(tensor).detach() for place, tensor in tensors.items()}
            before = {
                place: saved[place] if place in saved else _at_first(optimizer, place[1], value)
                for place, value in values.items()
                if place[0] in held or any(_reads_before(a.insertion) for a in changing[place].changing)
            }
            gradients = [local_of(grad).detach() for n in held if (grad := own[n].grad) is not None]
            inputs = [*values.values(), *before.values(), *gradients]
            inputs += [] if verdict is None else [verdict.reshape(()).to(inputs[0].device)]
            plan = self._plan_for(names, members, held, tensors, changing, inputs, list(before), verdict is not None)
            results = list(plan.run(*inputs, *plan.live))
            packs, kept, states = plan.rewrite.outputs.split(results)
            self._write_states(plan, states, verdict)
            return plan.rewrite.outputs, [*packs, *kept]

    def _write_states(self, plan: _Plan, new: Sequence[Tensor], verdict: Tensor | None) -> None:
        targets = [tensor for _, tensor in plan.rewrite.outputs.states]
        if verdict is not None:
            is_skipped = verdict.reshape(()) > 0
            new = [torch.where(is_skipped.to(t.device), t, n) for t, n in zip(targets, new, strict=True)]
        write_states(targets, new)

    def _plan_for(
        self,
        names: Names,
        members: Sequence[Member],
        held: Held,
        tensors: Mapping[Place, Tensor],
        changing: Mapping[Place, Member],
        inputs: Sequence[Tensor],
        before: Sequence[Place],
        may_be_skipped: bool,
    ) -> _Plan:
        """Return the graph for tensors of these forms; it is kept for later steps."""
        if members is not self._members:
            self._members = members
            self._plans.clear()
        sessions = [target.session for target in self._targets if target.session is not None]

        def key() -> Hashable:
            forms = tuple((t.shape, t.stride(), t.dtype, t.device) for t in inputs)
            holds = tuple((n, tuple(insertion.key for insertion in own)) for n, own in held.items())
            values = tuple([session.step_values.number() for session in sessions])
            return forms, tuple(before), holds, values, may_be_skipped, tuple(map(id, sessions))

        known = self._plans.get(key())
        if known is not None:
            return known
        for member in changing.values():
            session = self._targets[member.target].session
            if session is not None:
                own = tuple(replace(a, position=a.position[1:]) for a in member.changing)
                session.step_values.note({replace(member.site, call=0): own})
        with fake_tensors.outside_of_modes(), dynamo_cache.compiling():
            plan = self._make(names, held, tensors, changing, inputs, before, may_be_skipped)
        self._plans[key()] = plan
        return plan

    def _make(
        self,
        names: Names,
        held: Held,
        tensors: Mapping[Place, Tensor],
        changing: Mapping[Place, Member],
        inputs: Sequence[Tensor],
        before: Sequence[Place],
        may_be_skipped: bool,
    ) -> _Plan:
        fakes = iter(fake_tensors.fakes_of(inputs))
        values = [next(fakes) for _ in tensors]
        copies = {place: next(fakes) for place in before}
        gradients = [next(fakes) for _ in held]
        places = list(tensors)
        updated = [
            Updated(
                changing[place].site if place in changing else _site_of(names, place[0], tensors[place], place[1]),
                value,
                copies.get(place),
                tuple(a.insertion for a in changing[place].changing) if place in changing else (),
                _spread_of(tensors[place]),
            )
            for place, value in zip(places, values, strict=True)
        ]
        of_held = [
            HeldParameter(insertions, tuple(i for i, (m, _) in enumerate(places) if m == n and (m, _) in copies), grad)
            for (n, insertions), grad in zip(held.items(), gradients, strict=True)
        ]
        rewrite = rewrite_update(updated, of_held, self._states(), may_be_skipped=may_be_skipped)
        gm, live = runnable(rewrite.graph_module, len(updated))
        engine = next((t.engine for t in self._targets if t.engine is not None), None) or AotEager()
        run = engine.compile_step(gm, [value_of(node) for node in gm.graph.find_nodes(op="placeholder")])
        return _Plan(rewrite, run, live)

    def _states(self) -> StateStore | None:
        return next((t.session.config.states for t in self._targets if t.session is not None), None)


def _parameters(optimizer: torch.optim.Optimizer) -> list[Tensor]:
    return [p for group in optimizer.param_groups for p in group["params"]]


def _reads_before(insertion: Insertion) -> bool:
    return isinstance(insertion.effect, ReplaceTensor) and insertion.effect.reads == "value"


def _site_of(names: Names, n: int, tensor: Tensor, key: Any = None) -> Site:
    named = names[n]
    assert named is not None  # or it would have no actions
    _, name, call = named
    site = parameter_site(name, tensor) if key is None else state_site(name, str(key), tensor)
    return replace(site, call=call)


def _held_tensors(
    optimizer: torch.optim.Optimizer, n: int, parameter: Tensor, site: Site, insertion: Insertion
) -> dict[Place, Tensor]:
    """Return a parameter and its state, without the numbers; PolicyError for a tensor of another shape."""
    found: dict[Place, Tensor] = {(n, None): parameter}
    for key, tensor in tensors_of(optimizer.state.get(parameter, {})):
        if tensor.shape != parameter.shape and tensor.dim():
            raise _factored(site, insertion, optimizer, repr(key), tensor, parameter)
        if tensor.shape == parameter.shape and not optimizers.is_number(key):
            found[n, key] = tensor
    return found


def _factored(
    site: Site, insertion: Insertion, optimizer: torch.optim.Optimizer, what: str, tensor: Tensor, parameter: Tensor
) -> PolicyError:
    shapes = tuple(tensor.shape), tuple(parameter.shape)
    text = _FACTORED.format(site, describe(insertion.action), type(optimizer).__name__, what, *shapes)
    return PolicyError(text, code="optimizer")


def _at_first(optimizer: torch.optim.Optimizer, key: Any, value: Tensor) -> Tensor:
    """Return a tensor of new state as before its first update."""
    return torch.zeros_like(value) if optimizers.begins_at_zero(optimizer, key) else value.clone()


def _spread_of(tensor: Tensor) -> Any:
    spread = spread_of(tensor) if is_dtensor(tensor) else None
    return spread if spread is not None and len(spread.ranks) > 1 and spread.size else None
