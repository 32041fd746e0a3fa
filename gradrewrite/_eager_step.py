"""The reference of a guarded ``optimizer.step()``: the same actions by hand, and the plain optimizer."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from gradrewrite._compat import optimizers
from gradrewrite.numerics.statistics import norm_of, total_norm_of
from gradrewrite.policy.actions import Policy
from gradrewrite.policy.insertions import (
    HoldElements,
    Insertion,
    JudgeUpdate,
    MeasureTensor,
    ReplaceTensor,
    ScaleParameter,
    group_effect,
    run_group,
)
from gradrewrite.policy.recording import Recording, recording
from gradrewrite.policy.rules import Answered, ask_in_order, parameter_site, state_site, step_site
from gradrewrite.policy.state_store import StateStore
from gradrewrite.sites import Site

Apply = Callable[[Insertion, Tensor, Tensor], Tensor]
Note = Callable[[Recording, str, Sequence[str]], None]
Saved = Mapping[tuple[int, Any], Tensor]  # copies, by identity of the parameter, and key of its state or None


@dataclass
class EagerStep:
    """A plain optimizer of a plain model, and the policy's actions before and after its update."""

    optimizer: torch.optim.Optimizer
    model: nn.Module
    policy: Policy
    apply: Apply  # an insertion, by a gradient and its value
    note: Note  # the reports of an action, by its site and those of its group
    acted: dict[str, None] = field(default_factory=dict)  # sites with an action
    changed: dict[str, None] = field(default_factory=dict)  # where an action changed the gradient
    _states: StateStore = field(default_factory=StateStore)
    _num_steps: int = 0

    def __call__(self, *, failed: bool) -> None:
        """Update the parameters, unless a check has failed, here or in the backward before."""
        self._states.note_backward(self._num_steps)  # schedules follow the number of steps
        self._num_steps += 1
        names = {id(parameter): name for name, parameter in self.model.named_parameters()}
        own = [p for group in self.optimizer.param_groups for p in group["params"] if id(p) in names]
        present = [(step_site(names[id(p)], p), p) for p in own if p.grad is not None]
        factors: list[tuple[Tensor, ScaleParameter]] = []
        held: list[tuple[Tensor, HoldElements]] = []
        with torch.no_grad():
            groups = self._run_single(present, factors, held)
            skips = failed or self._failed
            for members in groups:  # before an action of a group has changed anything
                effect = members[0][1].insertion.effect
                if isinstance(effect, JudgeUpdate):
                    skips |= self._judge(effect, [parameter for *_, parameter in members], is_skipped=skips)
            for members in groups:
                self._run_group(members)
            if skips:
                return
            saved = {(id(p), key): tensor.clone() for p in own for key, tensor in self._tensors_of(p).items()}
            self.optimizer.step()
            for parameter, factor in factors:
                parameter.mul_(factor.factor())
            for parameter, hold in held:
                self._put_back(step_site(names[id(parameter)], parameter), parameter, hold, saved)
            self._run_behind(names, own, saved)

    def _run_single(
        self,
        present: Sequence[tuple[Site, Tensor]],
        factors: list[tuple[Tensor, ScaleParameter]],
        held: list[tuple[Tensor, HoldElements]],
    ) -> list[list[tuple[Site, Answered, Tensor]]]:
        """Run actions of one gradient in their order; return the members of each group, in the order of the policy."""
        groups: dict[Any, list[tuple[Site, Answered, Tensor]]] = {}
        self._failed = False
        for site, parameter in present:
            answers = ask_in_order(self.policy, site)
            for answered in answers:
                self.acted[str(site)] = None
                insertion, effect = answered.insertion, answered.insertion.effect
                if insertion.group is not None:
                    groups.setdefault(insertion.group, []).append((site, answered, parameter))
                    continue
                if isinstance(effect, ScaleParameter):
                    factors.append((parameter, effect))
                if isinstance(effect, HoldElements):
                    held.append((parameter, effect))
                if isinstance(effect, MeasureTensor) and effect.fails == "skip":
                    self._failed |= not bool(_grad(parameter).isfinite().all())
                self._replace(site, parameter, self._run(insertion, site, _grad(parameter), parameter))
        return sorted(groups.values(), key=lambda members: min(answered.position for _, answered, _ in members))

    def _run(self, insertion: Insertion, site: Site, tensor: Tensor, value: Tensor) -> Tensor:
        states = self._states.scope(str(site))
        with recording(tensor.device, states=states) as reported:
            states.begin()
            result = self.apply(insertion, tensor, value)
            states.write()
        if tensor.dtype == torch.float64:
            self.note(reported, str(site), ())
        return result

    def _run_group(self, members: Sequence[tuple[Site, Answered, Tensor]]) -> None:
        effect, grads = group_effect(members[0][1].insertion), [_grad(parameter) for *_, parameter in members]
        if isinstance(effect, JudgeUpdate):
            return
        where = f"step:group:{effect.group}"
        states = self._states.scope(where)
        with recording(grads[0].device, states=states) as reported:
            results = run_group(effect, [site for site, *_ in members], grads)
            states.write()
        if all(g.dtype == torch.float64 for g in grads):
            self.note(reported, where, [str(site) for site, *_ in members])
        for (site, _, parameter), result in zip(members, results, strict=True):
            self._replace(site, parameter, result)

    def _judge(self, judge: JudgeUpdate, parameters: Sequence[Tensor], *, is_skipped: bool) -> bool:
        """Judge an update by its total norm."""
        states = self._states.scope(f"judge:{judge.group}")
        with recording(parameters[0].device, states=states):
            figure, _ = total_norm_of([norm_of(_grad(p)) for p in parameters])
            _, is_spike = judge.judge(figure)
            if not is_spike and not is_skipped:
                states.write()
        return bool(is_spike)

    def _replace(self, site: Site, parameter: Tensor, result: Tensor) -> None:
        if not torch.equal(result, _grad(parameter)):
            self.changed[str(site)] = None
        parameter.grad = result

    def _tensors_of(self, parameter: Tensor) -> dict[Any, Tensor]:
        """Return a parameter under None, and the tensors of its state."""
        state = self.optimizer.state.get(parameter, {}).items()
        return {None: parameter, **{key: t for key, t in state if isinstance(t, Tensor)}}

    def _before(self, saved: Saved, parameter: Tensor, key: Any, tensor: Tensor) -> Tensor:
        first = torch.zeros_like(tensor) if optimizers.begins_at_zero(self.optimizer, key) else tensor.clone()
        return saved.get((id(parameter), key), first)

    def _put_back(self, site: Site, parameter: Tensor, hold: HoldElements, saved: Saved) -> None:
        """Put back the held elements of a parameter and its state."""
        states = self._states.scope(str(site))
        with recording(parameter.device, states=states) as reported:
            mask = hold.where(_grad(parameter), saved[id(parameter), None])
            states.write()
        if parameter.dtype == torch.float64:
            self.note(reported, str(site), ())
        for key, tensor in self._tensors_of(parameter).items():
            if tensor.shape == parameter.shape and not optimizers.is_number(key):
                tensor.copy_(torch.where(mask, self._before(saved, parameter, key, tensor), tensor))

    def _run_behind(self, names: Mapping[int, str], parameters: Sequence[Tensor], saved: Saved) -> None:
        """Run functions of parameters and of the optimizer's state behind the update, then measurements."""
        for parameter in parameters:
            name = names[id(parameter)]
            for key, tensor in self._tensors_of(parameter).items():
                site = parameter_site(name, tensor) if key is None else state_site(name, key, tensor)
                before = self._before(saved, parameter, key, tensor)
                answers = ask_in_order(self.policy, site)
                for answered in sorted(answers, key=lambda a: not isinstance(a.insertion.effect, ReplaceTensor)):
                    self.acted[str(site)] = None
                    result = self._run(answered.insertion, site, tensor.detach(), before)
                    if not torch.equal(result, tensor):
                        self.changed[str(site)] = None
                    tensor.copy_(result)


def _grad(parameter: Tensor) -> Tensor:
    assert parameter.grad is not None
    return parameter.grad
