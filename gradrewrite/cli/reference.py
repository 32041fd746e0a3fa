"""Entries of the reference: signatures and docstrings of public names."""

from __future__ import annotations

import importlib
import inspect
from types import FunctionType
from typing import Any

MODULES = ("gradrewrite", "gradrewrite.passes", "gradrewrite.testing", "gradrewrite.viz")
_NAMES = {"gr": "gradrewrite", "P": "gradrewrite.passes", **{m.rpartition(".")[2]: m for m in MODULES}}


def entry(name: str) -> str | None:
    """Return the entry of a public name, such as ``ClipByNorm`` or ``gr.Monitor.reduce``; None for any other."""
    if name in (*_NAMES, *MODULES):
        inside = f"{_NAMES.get(name, name)}."
        return "\n".join([f"# {inside[:-1]}", "", *(n for n in names() if n.rpartition(".")[0] == inside[:-1])])
    first, dot, rest = name.partition(".")
    full = f"{_NAMES.get(first, first)}.{rest}" if dot else name
    for module in reversed(MODULES):
        path = full.removeprefix(f"{module}.")
        value = _attribute(module, path.split("."))
        if value is not None and (_has_own_doc(value) or "." not in path):
            doc = inspect.getdoc(value) if _has_own_doc(value) else ""
            title = f"# {module}.{path}{_signature(value) if _has_own_doc(value) else f' = {value}'}"
            return "\n".join([title, "", doc or "", *_members(value)]).rstrip()
    return None


def names() -> list[str]:
    """Return all public names, in full."""
    return [f"{module}.{name}" for module in MODULES for name in importlib.import_module(module).__all__]


def first_line(value: Any) -> str:
    """Return the first line of a docstring; of a type alias its value."""
    return (inspect.getdoc(value) or "").partition("\n")[0] if _has_own_doc(value) else f"``{value}``"


def _has_own_doc(value: Any) -> bool:
    return inspect.isclass(value) or inspect.isroutine(value) or isinstance(value, property)


def _attribute(module: str, path: list[str]) -> Any:
    found = importlib.import_module(module)
    if path[0] not in found.__all__ or any(part.startswith("_") for part in path):
        return None
    value = getattr(found, path[0])
    for part in path[1:]:
        value = inspect.getattr_static(value, part, None)
    return value


class _Annotation(str):
    __slots__ = ()
    __repr__ = str.__str__  # without quotes


def _signature(value: Any) -> str:
    function = value.__func__ if isinstance(value, staticmethod | classmethod) else value
    try:
        found = inspect.signature(function)
    except (TypeError, ValueError):  # a property, or a constant
        return ""
    parameters = [p.replace(annotation=_annotation(p.annotation)) for p in found.parameters.values()]
    return str(found.replace(parameters=parameters, return_annotation=_annotation(found.return_annotation)))


def _annotation(annotation: Any) -> Any:
    return _Annotation(annotation) if isinstance(annotation, str) else annotation


def _members(value: Any) -> list[str]:
    """Return a line for each public method and property of a class."""
    if not inspect.isclass(value):
        return []
    kinds = [kind for kind in reversed(value.__mro__) if kind.__module__.startswith("gradrewrite")]
    own = {name: member for kind in kinds for name, member in vars(kind).items() if not name.startswith("_")}
    shown = (property, classmethod, staticmethod, FunctionType)
    lines = [f"    {n}{_signature(m)}: {first_line(m)}" for n, m in own.items() if isinstance(m, shown)]
    return ["", "Members:", *lines] if lines else []
