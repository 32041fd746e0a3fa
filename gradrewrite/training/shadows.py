"""Shadows of optimizers: class and options over other tensors."""

from __future__ import annotations

import copy
import inspect
from collections import OrderedDict, defaultdict, deque
from collections.abc import Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from gradrewrite._compat import optimizers, traced_numbers
from gradrewrite.training.hyperparameters import attributes_of, frozen, set_numbers


@dataclass(frozen=True, slots=True)
class Member:
    """A parameter of a shadow.

    Attributes:
        position: Of the parameter among all of the optimizer.
        group: Of its param group.
        parameter: The tensor in its place.
        gradient: That of its gradient.
        state: Those of its state, by key, and plain values.
    """

    position: int
    group: int
    parameter: Tensor
    gradient: Tensor
    state: dict[str, Any]


@dataclass(frozen=True, slots=True)
class Options:
    """Ways through the code of an optimizer.

    Attributes:
        capturable: Whether step counts stay tensors.
        foreach: Whether few kernels work on lists.
    """

    capturable: bool = False
    foreach: bool = False

    def of(self, group: Mapping[str, Any]) -> dict[str, bool]:
        """Return those of a param group."""
        wanted = {
            "capturable": self.capturable, "foreach": self.foreach, "fused": False, "differentiable": False
        }  # fmt: skip
        return {name: value for name, value in wanted.items() if name in group}


def numbered(optimizer: Optimizer) -> Iterator[tuple[int, int, Tensor]]:
    """Yield position, param group and tensor of each parameter."""
    position = 0
    for number, group in enumerate(optimizer.param_groups):
        for parameter in group["params"]:
            yield position, number, parameter
            position += 1


def own_step(optimizer: Optimizer, *args: Any) -> Any:
    """Run the ``step`` of the class, without its wrappers."""
    return inspect.unwrap(type(optimizer).step)(optimizer, *args)


def shadow_of(
    optimizer: Optimizer,
    members: Sequence[Member],
    options: Options | None,
    numbers: Mapping[tuple[int, str], Any],
    *,
    all_groups: bool,
) -> Optimizer:
    """Return the optimizer over other parameters, with other numbers.

    Args:
        optimizer: It stays as it is.
        members: The parameters.
        options: None for those of the optimizer.
        numbers: By param group and name.
        all_groups: Whether groups without members stay.
    """
    given = {id(p): m.parameter for m in members for n, _, p in numbered(optimizer) if n == m.position}
    shadow = object.__new__(type(optimizer))
    vars(shadow).update(
        {key: _rebuilt(value, given) for key, value in vars(optimizer).items() if key not in ("step", "param_groups")}
    )
    shadow.state = defaultdict(dict)
    shadow.param_groups = []
    for number, group in enumerate(optimizer.param_groups):
        own = [m for m in members if m.group == number]
        if own or all_groups:
            changed = _rebuilt({key: value for key, value in group.items() if key != "params"}, {})
            changed |= options.of(group) if options is not None else {}
            set_numbers(changed, {name: value for (of, name), value in numbers.items() if of == number})
            shadow.param_groups.append({**changed, "params": [m.parameter for m in own]})
    for member in members:
        member.parameter.grad = member.gradient
        if member.state:
            shadow.state[member.parameter] = dict(member.state)
    return shadow


def _rebuilt(value: Any, given: Mapping[int, Tensor]) -> Any:
    """Copy containers, with other tensors in the place of some."""
    if isinstance(value, Tensor):
        return given.get(id(value), value)
    if type(value) in (list, tuple, set, deque):
        return type(value)(_rebuilt(x, given) for x in value)
    if type(value) in (dict, OrderedDict):
        return type(value)((key, _rebuilt(x, given)) for key, x in value.items())
    if isinstance(value, defaultdict):
        return copy.copy(value)
    return value


def counters_of(member: Member) -> list[Tensor]:
    """Return the numbers among the tensors of a state."""
    return [
        t
        for key, t in member.state.items()
        if isinstance(t, Tensor) and t.dim() == 0 and t.dtype != torch.bool and optimizers.is_number(key)
    ]


def run_step(
    shadow: Optimizer, members: Sequence[Member], numbers: Mapping[tuple[int, str], tuple[Tensor, float]]
) -> set[tuple[int, str]]:
    """Run a shadow with numbers as tensors; return compared ones."""
    mode = traced_numbers.Numbers(numbers, [t for m in members for t in counters_of(m)])
    with torch.no_grad(), traced_numbers.told_of_compilation(True), mode:
        own_step(shadow)
    return mode.compared


def changed_part(before: Mapping[str, Hashable], after: Mapping[str, Hashable]) -> str:
    """Return the name of the first changed value, or ``""``."""
    return next((name for name in {**before, **after} if before.get(name) != after.get(name)), "")


def plain_parts_of(shadow: Optimizer) -> dict[str, Hashable]:
    """Return the values of an optimizer outside of tensors."""

    def same(tensor: Tensor) -> Hashable:
        return id(tensor), tensor._version

    found: dict[str, Hashable] = {
        f"param_groups[{number}][{key!r}]": frozen(value, same)
        for number, group in enumerate(shadow.param_groups)
        for key, value in group.items()
        if key != "params"
    }
    for state in shadow.state.values():
        for key, value in state.items():
            if not isinstance(value, Tensor):
                found[f"state[parameter][{key!r}]"] = frozen(value, same)
    return found | {f".{key}": value for key, value in attributes_of(shadow, same)}
