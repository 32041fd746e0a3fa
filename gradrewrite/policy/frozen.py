"""Errors of assignments to frozen values."""

from __future__ import annotations

from dataclasses import FrozenInstanceError, fields
from typing import Any, NoReturn, TypeVar

_T = TypeVar("_T", bound=type)


def explained(frozen: _T) -> _T:
    """Let assignments to attributes of a frozen dataclass say how another value is made."""

    def refuse(self: Any, name: str, value: Any) -> NoReturn:
        raise FrozenInstanceError(_text(self, name, repr(value)))

    def refuse_to_delete(self: Any, name: str) -> NoReturn:
        raise FrozenInstanceError(_text(self, name, "..."))

    setattr(frozen, "__setattr__", refuse)  # noqa: B010 - mypy refuses to assign to a method
    setattr(frozen, "__delattr__", refuse_to_delete)  # noqa: B010
    return frozen


def _text(frozen: Any, name: str, value: str) -> str:
    kind, settings = type(frozen).__name__, [field.name for field in fields(frozen) if field.init]
    if name not in settings:
        return f"{kind} has no setting {name!r}, and does not change; its settings are {', '.join(settings)}"
    return (
        f"{kind}.{name}: {kind} does not change, for compiled graphs have it. dataclasses.replace(..., {name}={value}) "
        "makes another one; a number that changes while training is a tensor, filled in place, or a gr.Schedule"
    )
