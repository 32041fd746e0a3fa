"""Python values of a function, kept from call to call.

A function that is traced once is called once, and would freeze them.
"""

from __future__ import annotations

import dis
import functools
from collections import deque
from collections.abc import Iterator, Mapping
from types import FunctionType, MethodType, ModuleType
from typing import Any

from torch import Tensor

from gradrewrite._compat.make_fx import is_traced

Memory = Mapping[str, tuple[Any, ...]]  # values, and the elements of containers, by name

_CONTAINERS = (list, tuple, set, frozenset, dict, deque)
_DEPTH = 3  # of functions and objects that a function refers to


def memory_of(fn: Any) -> Memory:
    """Return all values within reach of a function.

    They are its attributes, variables of closures, arguments of a partial, and globals that it assigns; those of a
    function or object behind such a name too.
    """
    return {name: _elements(value) for name, value in _reachable(fn, "", _DEPTH)}


def changed_since(before: Memory, fn: Any) -> str | None:
    """Return the name of the first new value; None without one."""
    after = memory_of(fn)
    return next((name for name, values in after.items() if not _same(values, before.get(name, ()))), None)


def leaked_since(before: Memory, fn: Any) -> str | None:
    """Return the name of the first traced tensor; None without one."""
    known = {id(value) for values in before.values() for value in values}
    return next(
        (
            name
            for name, values in memory_of(fn).items()
            if any(isinstance(v, Tensor) and id(v) not in known and is_traced(v) for v in values)
        ),
        None,
    )


def _same(values: tuple[Any, ...], others: tuple[Any, ...]) -> bool:
    return len(values) == len(others) and all(a is b for a, b in zip(values, others, strict=True))


def _elements(value: Any) -> tuple[Any, ...]:
    if isinstance(value, dict):
        return (*value, *value.values())
    return tuple(value) if isinstance(value, _CONTAINERS) else (value,)


def _reachable(value: Any, prefix: str, depth: int) -> Iterator[tuple[str, Any]]:
    if depth == 0:
        return
    for name, part in _parts(value):
        yield f"{prefix}{name}", part
        if not isinstance(part, (Tensor, type, ModuleType, *_CONTAINERS)):
            yield from _reachable(part, f"{prefix}{name}.", depth - 1)


def _parts(value: Any) -> Iterator[tuple[str, Any]]:
    if isinstance(value, functools.partial):
        yield from [("func", value.func), ("args", value.args), *value.keywords.items()]
    elif isinstance(value, MethodType):
        yield from _parts(value.__self__)
    elif isinstance(value, FunctionType):
        yield from vars(value).items()
        for name, cell in zip(value.__code__.co_freevars, value.__closure__ or (), strict=True):
            try:
                yield name, cell.cell_contents
            except ValueError:  # nothing was assigned yet
                continue
        stored = {step.argval for step in dis.get_instructions(value) if step.opname == "STORE_GLOBAL"}
        yield from ((name, value.__globals__[name]) for name in sorted(stored & value.__globals__.keys()))
    else:
        slots = (name for cls in type(value).__mro__ for name in getattr(cls, "__slots__", ()) if name != "__dict__")
        yield from ((name, getattr(value, name)) for name in slots if hasattr(value, name))
        yield from getattr(value, "__dict__", {}).items()
