"""Action protocols: what a policy may answer."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Mapping, Sequence
from typing import Any, ClassVar, Protocol, TypeAlias, runtime_checkable

from torch import Tensor

from gradrewrite.errors import PolicyError
from gradrewrite.sites import Kind, Site

TensorFunction: TypeAlias = Callable[[Tensor], Tensor]
Answer: TypeAlias = "Action | GroupAction | TensorFunction | Sequence[Answer] | None"
Policy: TypeAlias = "Callable[[Site], Answer] | Sequence[Policy]"

BACKWARD: frozenset[Kind] = frozenset(("error", "gradient", "input"))
ANYWHERE: frozenset[Kind] = BACKWARD | {"activation"}


@runtime_checkable
class Action(Protocol):
    """An action at one site: a frozen value (internal until 1.0).

    Attributes:
        kinds: The kinds of site at which the action is allowed.
        has_units: Whether it means something else for a gradient that a loss scale multiplied; it is then
            given the unscaled gradient.
    """

    kinds: ClassVar[frozenset[Kind]]
    has_units: ClassVar[bool]

    def apply(self, tensor: Tensor) -> Tensor:
        """Compute the replacement with torch operations; traced once, on fake tensors."""
        ...


@runtime_checkable
class SpecializingAction(Action, Protocol):
    """An action that differs from site to site (internal until 1.0)."""

    def specialize(self, site: Site) -> Action:
        """The action for one site."""
        ...


@runtime_checkable
class Measurement(Action, Protocol):
    """An action that only measures (internal until 1.0)."""

    @property
    def statistics(self) -> Mapping[str, str]:
        """Keys of ``statistics.STATISTICS``, by the names of the records."""
        ...

    @property
    def fails(self) -> str | None:
        """The consequence of a last statistic that is not 0 (``CheckFinite.on_failure``); None if there is none."""
        ...


@runtime_checkable
class GroupAction(Protocol):
    """An action at several sites at once, after the actions of the single sites (internal until 1.0).

    Attributes:
        kinds: The kinds of site at which the action is allowed.
        has_units: As for an ``Action``.
        group: Sites whose actions have the same group are treated together.
    """

    kinds: ClassVar[frozenset[Kind]]
    has_units: ClassVar[bool]

    @property
    def group(self) -> Hashable:
        """Name of the group."""
        ...

    def apply_group(self, tensors: Sequence[Tensor]) -> Sequence[Tensor]:
        """Compute all replacements, in the order of ``tensors``."""
        ...


def actions_of(answer: Any, *, where: str) -> tuple[Any, ...]:
    """Flatten what a policy answered; PolicyError names ``where`` if it is nonsense."""
    if answer is None:
        return ()
    if isinstance(answer, type):
        raise PolicyError(
            f"{where}: got the class {answer.__name__}; an action is a value, as in {answer.__name__}(...)"
        )
    if isinstance(answer, Action | GroupAction):
        return (answer,)
    if isinstance(answer, Sequence) and not isinstance(answer, str):
        return tuple(action for item in answer for action in actions_of(item, where=where))
    if callable(answer):
        return (answer,)
    raise PolicyError(
        f"{where}: a policy answers with an action, a tensor function, a sequence of them, or None; got {answer!r}"
    )


def kinds_of(action: Any) -> frozenset[Kind]:
    """Return the kinds of site at which an action or a tensor function is allowed."""
    return action.kinds if isinstance(action, Action | GroupAction) else BACKWARD
