"""Trials, on tiny parameters, of the numbers taken as tensors."""

from __future__ import annotations

from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from gradrewrite._compat import traced_numbers
from gradrewrite._compat.traced_numbers import Name
from gradrewrite.training.hyperparameters import names_of, value_of
from gradrewrite.training.optimizer_refusals import check_state, refusal, refusal_of
from gradrewrite.training.shadows import (
    Member,
    Options,
    changed_part,
    own_step,
    plain_parts_of,
    run_step,
    shadow_of,
)

_TOLERANCES = {torch.float64: 1e-11, torch.float32: 1e-5}
CHANGES = "its step changes %s, a Python value, which would stay as it is in a graph"
_COARSE = 2.0**-6  # a few roundings of half precision


@dataclass(frozen=True, slots=True)
class Trial:
    """A way through an optimizer's code, equal to its own.

    Attributes:
        options: The way.
        numbers: Those that are tensors on it, by param group and name.
    """

    options: Options
    numbers: tuple[Name, ...]


def try_out(optimizer: Optimizer, members: Sequence[Member], *, foreach: bool, all_groups: bool) -> Trial:
    """Run tiny steps in each way; TraceError if none fits.

    The gradients and the state of ``members`` do not matter.
    """
    tiny = _Tiny(optimizer, _tiny_members(members), all_groups)
    wanted, changed = tiny.plain_step()
    failures: list[Exception] = []
    found: list[Trial] = []
    for capturable in (foreach, not foreach):
        options = Options(capturable, foreach)
        failure = tiny.failure_with(options, (), wanted)
        if failure is not None:
            failures.append(failure)
        elif changed:
            raise refusal(optimizer, CHANGES % changed)
        else:
            found.append(Trial(options, tiny.accepted(options, wanted)))
            if len(found[-1].numbers) == len(tiny.given):
                break
    if not found:
        raise refusal_of(optimizer, failures[0]) from failures[0]
    return max(found, key=lambda trial: len(trial.numbers))


def state_keys(optimizer: Optimizer, members: Sequence[Member], *, all_groups: bool) -> list[frozenset[str]]:
    """Return the keys of the state after plain steps."""
    tiny = _tiny_members(members)
    stepped = _Tiny(optimizer, tiny, all_groups)
    found = {_kind_of(m): frozenset(m.state) for m in stepped.members}
    return [found[_kind_of(m)] for m in members]


def _kind_of(m: Member) -> Hashable:
    return m.group, m.parameter.dim(), 0 in m.parameter.shape, m.parameter.dtype, m.parameter.device


def _tiny_members(members: Sequence[Member]) -> list[Member]:
    found: dict[Hashable, Member] = {}
    for m in members:
        shape, key = [min(size, 2) for size in m.parameter.shape], _kind_of(m)
        if key not in found:
            found[key] = Member(m.position, m.group, _values(m.parameter, shape, 0), _values(m.parameter, shape, 1), {})
    return list(found.values())


def _values(like: Tensor, shape: Sequence[int], number: int) -> Tensor:
    """Return numbers between -1 and 1, equal in each process."""
    count = torch.Size(shape).numel()
    wave = torch.cos(torch.arange(2 * count, dtype=torch.float64) * 2.3 + number * 1.7)
    flat = torch.complex(wave[:count], wave[count:]) if like.is_complex() else wave[:count]
    return flat.reshape(torch.Size(shape)).to(like.device, like.dtype)


class _Tiny:
    """Tiny parameters after two plain steps.

    Attributes:
        members: The parameters.
        given: The numbers of their param groups.
    """

    def __init__(self, optimizer: Optimizer, members: Sequence[Member], all_groups: bool) -> None:
        self._optimizer, self._all_groups = optimizer, all_groups
        self.given = {
            (number, name): float(value_of(group, name))
            for number, group in enumerate(optimizer.param_groups)
            for name in names_of(group)
            if all_groups or any(m.group == number for m in members)
        }
        self._tensors = {
            name: value for name, value in self.given.items()
            if isinstance(value_of(optimizer.param_groups[name[0]], name[1]), Tensor)
        }  # fmt: skip
        self.members = self._after_steps(members)

    def _after_steps(self, members: Sequence[Member]) -> list[Member]:
        shadow = shadow_of(self._optimizer, members, Options(), self._tensors, all_groups=self._all_groups)
        try:
            for number in range(2):
                for m in members:
                    m.parameter.grad = _values(m.parameter, m.parameter.shape, number + 2)
                with torch.no_grad(), traced_numbers.told_of_compilation(False):
                    own_step(shadow)
        except Exception as err:
            raise refusal_of(self._optimizer, err) from err
        for state in shadow.state.values():
            check_state(self._optimizer, state)
        return [
            Member(m.position, m.group, m.parameter, m.gradient, dict(shadow.state.get(m.parameter, {})))
            for m in members
        ]

    def _copied(self) -> list[Member]:
        return [
            Member(
                m.position,
                m.group,
                m.parameter.detach().clone(),
                m.gradient.clone(),
                {key: value.clone() if isinstance(value, Tensor) else value for key, value in m.state.items()},
            )
            for m in self.members
        ]

    def plain_step(self) -> tuple[list[Tensor], str]:
        """Return results of the third step, and a changed value.

        The second is the name of a value outside of tensors; ``""`` if none changes.
        """
        members = self._copied()
        shadow = shadow_of(self._optimizer, members, Options(), self._tensors, all_groups=self._all_groups)
        before = plain_parts_of(shadow)
        try:
            with torch.no_grad(), traced_numbers.told_of_compilation(False):
                own_step(shadow)
        except Exception as err:
            raise refusal_of(self._optimizer, err) from err
        return _results(shadow, members), changed_part(before, plain_parts_of(shadow))

    def failure_with(self, options: Options, names: Sequence[Name], wanted: Sequence[Tensor]) -> Exception | None:
        """Return why the third step differs with numbers as tensors."""
        members = self._copied()
        tensors = {
            name: (torch.tensor(self.given[name], dtype=torch.float64, device=members[0].parameter.device),
                   self.given[name])
            for name in names
        }  # fmt: skip
        values: Mapping[Name, Any] = self._tensors | {name: tensor for name, (tensor, _) in tensors.items()}
        try:
            shadow = shadow_of(self._optimizer, members, options, values, all_groups=self._all_groups)
            with traced_numbers.reads_refused():
                run_step(shadow, members, tensors)
        except Exception as err:
            return err
        got = _results(shadow, members)
        if len(got) == len(wanted) and all(map(_close, got, wanted)):
            return None
        return traced_numbers.HostReadError("its step computes something else where step counts are tensors")

    def accepted(self, options: Options, wanted: Sequence[Tensor]) -> tuple[Name, ...]:
        """Return the numbers to be tensors together."""
        names = tuple(self.given)
        if self.failure_with(options, names, wanted) is None:
            return names
        found: tuple[Name, ...] = ()
        for name in names:
            if self.failure_with(options, (*found, name), wanted) is None:
                found = (*found, name)
        return found


def _results(shadow: Optimizer, members: Sequence[Member]) -> list[Tensor]:
    """Return parameters and tensors of state after a step."""
    found = [m.parameter for m in members]
    for m in members:
        found += [value for value in shadow.state.get(m.parameter, {}).values() if isinstance(value, Tensor)]
    return [t.detach() for t in found]


def _close(got: Tensor, wanted: Tensor) -> bool:
    if got.shape != wanted.shape or got.dtype != wanted.dtype:
        return False
    tolerance = _TOLERANCES.get(wanted.dtype.to_real() if wanted.is_complex() else wanted.dtype, _COARSE)
    wide = torch.complex128 if wanted.is_complex() else torch.float64
    got, wanted = got.cpu().to(wide), wanted.cpu().to(wide)
    largest = float(wanted.abs().max()) if wanted.numel() else 0.0
    is_near = (got - wanted).abs() <= tolerance * (wanted.abs() + largest)
    return bool((is_near | (got == wanted) | (got.isnan() & wanted.isnan())).all())
