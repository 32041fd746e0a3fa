"""Hyperparameters of an optimizer by name, and its other options."""

from __future__ import annotations

import inspect
from collections import deque
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from typing import Any

from torch import Tensor
from torch.optim import Optimizer

from gradrewrite._compat.traced_numbers import Name

_PLAIN = (bool, int, float, str, type(None))
# Attributes of an optimizer that its own code does not compute with.
_OF_TORCH = frozenset(
    (
        "_opt_called",
        "_warned_capturable_if_run_uncaptured",
        "_zero_grad_profile_name",
        "defaults",
        "param_groups",
        "state",
        "step",
    )
)


def names_of(group: Mapping[str, Any]) -> Iterator[str]:
    """Yield the names of the numbers of a param group."""
    for key, value in group.items():
        if not isinstance(key, str) or key == "params" or "." in key:
            continue
        if _is_number(value):
            yield key
        elif type(value) in (list, tuple):
            yield from (f"{key}.{n}" for n, x in enumerate(value) if _is_number(x))


def _is_number(value: Any) -> bool:
    if isinstance(value, Tensor):
        return value.numel() == 1 and value.dtype.is_floating_point
    return isinstance(value, int | float) and not isinstance(value, bool)


def value_of(group: Mapping[str, Any], name: str) -> Any:
    """Return a number of a param group: ``"lr"``, ``"betas.0"``."""
    key, _, item = name.partition(".")
    return group[key][int(item)] if item else group[key]


def set_numbers(group: dict[str, Any], numbers: Mapping[str, Any]) -> None:
    """Set numbers of a param group by their names."""
    for name, value in numbers.items():
        key, _, item = name.partition(".")
        if item:
            values = list(group[key])
            values[int(item)] = value
            group[key] = type(group[key])(values)
        else:
            group[key] = value


def numbers_of(optimizer: Optimizer, numbers: Sequence[Name]) -> list[Any]:
    """Return present hyperparameters: numbers, or tensors given by the user."""
    groups = optimizer.param_groups
    return [value_of(groups[number], name) for number, name in numbers]


def key_of(
    optimizer: Optimizer,
    numbers: Sequence[Name] = (),
    compared: Sequence[Name] = (),
    groups: Sequence[int] | None = None,
) -> Hashable:
    """Return all values baked into a graph.

    Args:
        optimizer: Its code reads options of param groups, and its own attributes where it is not torch's.
        numbers: Those that are read at each call, and not baked in.
        compared: Those of which the sign is baked in.
        groups: The param groups that matter; None for all.
    """
    read, signed = frozenset(numbers), frozenset(compared)
    found = tuple(
        key_of_group(group, number, read, signed)
        for number, group in enumerate(optimizer.param_groups)
        if groups is None or number in groups
    )
    own = () if is_of_torch(optimizer) else attributes_of(optimizer)
    return type(optimizer), own, len(optimizer.param_groups), found


def key_of_group(
    group: Mapping[str, Any], number: int, read: frozenset[Name], signed: frozenset[Name]
) -> tuple[Hashable, ...]:
    """Return the size and the options of a param group."""
    found: list[Hashable] = [len(group["params"])]
    for name, value in group.items():
        if name == "params":
            continue
        if type(value) in (tuple, list):
            found.append(
                (name, *(_key_of_value(x, (number, f"{name}.{n}"), read, signed) for n, x in enumerate(value)))
            )
        else:
            found.append((name, _key_of_value(value, (number, name), read, signed)))
    return tuple(found)


def _key_of_value(value: Any, name: Name, read: frozenset[Name], signed: frozenset[Name]) -> Hashable:
    if name in signed:
        return "sign", bool(value > 0), bool(value < 0)
    return "read" if name in read else frozen(value)


def attributes_of(
    optimizer: Optimizer, of_tensor: Callable[[Tensor], Hashable] | None = None
) -> tuple[tuple[str, Hashable], ...]:
    """Return the plain attributes of an optimizer.

    The class may compute with them.
    """
    return tuple(
        (key, frozen(value, of_tensor))
        for key, value in vars(optimizer).items()
        if key not in _OF_TORCH and type(value) in (*_PLAIN, list, tuple, dict, deque)
    )


def frozen(value: Any, of_tensor: Callable[[Tensor], Hashable] | None = None) -> Hashable:
    """Return a value as one to compare with later ones.

    Tensors of one element are read; ``of_tensor`` answers in their place.
    """
    if isinstance(value, _PLAIN):
        return value
    if isinstance(value, Tensor):
        return (of_tensor or _read)(value)
    if isinstance(value, list | tuple | deque):
        return tuple(frozen(x, of_tensor) for x in value)
    if isinstance(value, dict):
        return tuple((str(key), frozen(x, of_tensor)) for key, x in value.items())
    return id(value)


def _read(tensor: Tensor) -> Hashable:
    return (str(tensor.dtype), *tensor.flatten().tolist()) if tensor.numel() == 1 else id(tensor)


def is_of_torch(optimizer: Optimizer) -> bool:
    """Whether class and ``step`` are of ``torch.optim``."""
    kind = type(optimizer)
    return all(of.__module__.startswith("torch.optim.") for of in (kind, inspect.unwrap(kind.step)))
