"""Python values of a function, kept from call to call.

A function that is traced once is called once, and would freeze them.
"""

from __future__ import annotations

import dis
import functools
from collections.abc import Iterator, Mapping
from types import FunctionType, MethodType
from typing import Any

from torch import Tensor

_CONTAINERS = (list, tuple, set, dict)


def memory_of(fn: Any) -> dict[str, Any]:
    """Return the values that a call of ``fn`` may assign, by name: attributes, variables of closures, globals.

    Containers are copied, so that tensors put into them are seen.
    """
    return {name: dict(v) if isinstance(v, dict) else list(v) if isinstance(v, list) else v for name, v in _named(fn)}


def kept_by(fn: Any, before: Mapping[str, Any]) -> str | None:
    """Return the name of a value that ``fn`` has kept since ``memory_of``; None if there is none.

    Kept is a tensor that was not there, and another value in place of one; a first value in place of None is not,
    for a function may compute what it needs once.
    """
    for name, value in memory_of(fn).items():
        old = before.get(name)
        known = {id(tensor) for tensor in _tensors(old)}
        if any(id(tensor) not in known for tensor in _tensors(value)):
            return name
        if not isinstance(value, _CONTAINERS) and old is not None and value is not old:
            return name
    return None


def _named(fn: Any) -> Iterator[tuple[str, Any]]:
    if isinstance(fn, functools.partial):
        yield from _named(fn.func)
    elif isinstance(fn, MethodType):
        yield from _named(fn.__self__)
    elif isinstance(fn, FunctionType):
        yield from vars(fn).items()
        for name, cell in zip(fn.__code__.co_freevars, fn.__closure__ or (), strict=True):
            try:
                yield name, cell.cell_contents
            except ValueError:  # nothing was assigned yet
                continue
        stored = {step.argval for step in dis.get_instructions(fn) if step.opname == "STORE_GLOBAL"}
        yield from ((name, fn.__globals__[name]) for name in sorted(stored & fn.__globals__.keys()))
    elif hasattr(fn, "__dict__"):
        yield from vars(fn).items()


def _tensors(value: Any) -> Iterator[Tensor]:
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, _CONTAINERS):
        parts = value.values() if isinstance(value, dict) else value
        yield from (part for part in parts if isinstance(part, Tensor))
