"""Policies, rules, and what a policy may answer.

A *policy* is called while the graph is rewritten and answers with an action; a *tensor function* is an
action: it is traced once and its operations become nodes of the backward graph.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, Protocol, TypeAlias, runtime_checkable

from torch import Tensor

from gradrewrite.errors import PolicyError, RewriteError
from gradrewrite.sites import Kind, Pattern, Site

TensorFunction: TypeAlias = Callable[[Tensor], Tensor]
Answer: TypeAlias = "Action | GroupAction | TensorFunction | Sequence[Answer] | None"
Policy: TypeAlias = "Callable[[Site], Answer] | Sequence[Policy]"

BACKWARD: frozenset[Kind] = frozenset(("error", "gradient", "input"))
ANYWHERE: frozenset[Kind] = BACKWARD | {"activation"}


@runtime_checkable
class Action(Protocol):
    """What to insert at one site: a frozen value (internal until 1.0).

    Attributes:
        kinds: The kinds of site at which the action may stand.
        has_units: Whether it means something else for a gradient that a loss scale multiplied; it is then
            given the unscaled gradient.
    """

    kinds: ClassVar[frozenset[Kind]]
    has_units: ClassVar[bool]

    def apply(self, tensor: Tensor) -> Tensor:
        """Compute the replacement with torch operations; traced once, on fake tensors."""
        ...


@runtime_checkable
class AdaptingAction(Action, Protocol):
    """An action that differs from site to site (internal until 1.0)."""

    def at(self, site: Site) -> Action:
        """The action for one site."""
        ...


@runtime_checkable
class MeasuringAction(Action, Protocol):
    """An action that only measures (internal until 1.0)."""

    @property
    def measures(self) -> Mapping[str, str]:
        """By the names of the records, keys of ``statistics.STATISTICS``."""
        ...

    @property
    def fails(self) -> str | None:
        """What follows if the last figure is not 0 (``CheckFinite.on_failure``); None if nothing does."""
        ...


@runtime_checkable
class GroupAction(Protocol):
    """What to insert at several sites at once, after the actions of the single sites (internal until 1.0).

    Attributes:
        kinds: The kinds of site at which the action may stand.
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


@dataclass(frozen=True, slots=True)
class Rule:
    """A ready-made policy: take ``action`` at every site that ``pattern`` names; made by ``on``."""

    pattern: str
    action: Answer

    def __call__(self, site: Site, /) -> Answer:
        """Answer with the action where the pattern matches and, if it names no kind, the action may stand."""
        pattern = Pattern.parse(self.pattern)
        if not pattern.matches(site):
            return None
        if pattern.kind is None and not all(site.kind in kinds_of(a) for a in _flat(self.action)):
            return None
        return self.action

    def __repr__(self) -> str:
        """As the call that makes it."""
        return f"on({self.pattern!r}, {self.action!r})"


def on(pattern: str, action: Answer) -> Rule:
    """Make the policy that takes ``action`` at every site that ``pattern`` names.

    Args:
        pattern: ``[kind:]glob[#call]``, as in ``Site.matches``. Without a kind the rule holds at every
            matching site at which the action may stand; with one, an action that may not stand there is
            a ``PolicyError`` when the graph is rewritten.
        action: An action, a tensor function, or a sequence of them (applied in order).

    Returns:
        A frozen policy. A rule that matches no site raises ``NoSuchSiteError`` after the first training
        forward.

    Raises:
        ValueError: The pattern is malformed.
        PolicyError: ``action`` is none.

    Example:
        >>> from gradrewrite.passes import ClipByValue
        >>> on("error:decoder.*", ClipByValue(10.0))
        on('error:decoder.*', ClipByValue(10.0))
    """
    Pattern.parse(pattern)
    if not actions_of(action, where=f"on({pattern!r}, ...)"):
        raise PolicyError(f"on({pattern!r}, ...): no action was given")
    return Rule(pattern, action)


def check_policy(policy: Any) -> None:
    """Raise PolicyError unless ``policy`` is one: a callable, or nested sequences of them."""
    if isinstance(policy, Action | GroupAction):
        raise PolicyError(f"{policy!r} is an action, not a policy: say where, as in gr.on('error:*', {policy!r})")
    if isinstance(policy, Sequence) and not isinstance(policy, str):
        for item in policy:
            check_policy(item)
    elif not callable(policy) or isinstance(policy, type):
        raise PolicyError(f"a policy is a function Site -> action, a rule (gr.on), or a list of them; got {policy!r}")


def ask(policy: Policy, site: Site) -> tuple[Any, ...]:
    """Ask a policy about one site: all answers, flat, in list order.

    Raises:
        PolicyError: An answer is no action, or may not stand at this kind of site; or the policy itself raised.
    """
    return tuple(answered.action for answered in ask_in_order(policy, site))


@dataclass(frozen=True, slots=True)
class Answered:
    """An action that a policy answered with, and where in the nested lists of the policy the callback stands."""

    position: tuple[int, ...]
    action: Any


def ask_in_order(policy: Policy, site: Site, position: tuple[int, ...] = ()) -> tuple[Answered, ...]:
    """Ask a policy about one site, as ``ask`` does, with the position of each answer in the list of policies."""
    if callable(policy):
        return tuple(Answered(position, action) for action in _ask_callback(policy, site))
    items = enumerate(policy)
    return tuple(found for number, item in items for found in ask_in_order(item, site, (*position, number)))


def _ask_callback(policy: Callable[[Site], Answer], site: Site) -> tuple[Any, ...]:
    try:
        answer = policy(site)
    except RewriteError:
        raise
    except Exception as err:
        raise PolicyError(f"{site}: the policy raised {type(err).__name__}: {err}") from err
    actions = actions_of(answer, where=str(site))
    for action in actions:
        if site.kind not in kinds_of(action):
            allowed = ", ".join(sorted(kinds_of(action)))
            raise PolicyError(f"{site}: {action!r} cannot stand at this kind of site; it may stand at {allowed}")
    return actions


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
    """Kinds of site at which an action or a tensor function may stand."""
    return action.kinds if isinstance(action, Action | GroupAction) else BACKWARD


def rules_of(policy: Policy) -> tuple[Rule, ...]:
    """All rules in a policy, in list order; other callables cannot be looked into."""
    if isinstance(policy, Rule):
        return (policy,)
    if callable(policy):
        return ()
    return tuple(rule for item in policy for rule in rules_of(item))


def _flat(answer: Any) -> tuple[Any, ...]:
    return actions_of(answer, where="a rule")
