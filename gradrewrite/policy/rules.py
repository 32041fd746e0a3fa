"""Rules and policies: ``on``, and asking a policy about a site."""

from __future__ import annotations

import re
import sys
from collections.abc import Callable, Collection, Hashable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from fnmatch import fnmatchcase
from pathlib import Path
from types import FrameType
from typing import Any, TypeVar

from torch import Tensor

from gradrewrite._utils.formatting import describe_callable, located_callable, without_addresses
from gradrewrite.errors import PolicyError, RewriteError
from gradrewrite.policy.actions import (
    Answer,
    Bounded,
    Policy,
    actions_of,
    describe,
    insertion_anywhere,
    insertion_at,
    is_action,
    kinds_of,
)
from gradrewrite.policy.calls import Call, call, with_any_names
from gradrewrite.policy.frozen import explained
from gradrewrite.policy.insertions import Insertion
from gradrewrite.policy.measured_once import measured_once
from gradrewrite.policy.scope import Context, refuse, skips_updates
from gradrewrite.sites import Kind, Pattern, Site, kinds_with

_WITHOUT_KIND = kinds_with(lambda traits: not (traits.needs_kind or traits.at_guard))  # matched by a plain pattern
_CALLBACK = (
    "It is called with each gr.Site (kind, name, module, op, call, shape, dtype, source, ...), and returns an action, "
    "a list of them, or None"
)

Callback = TypeVar("Callback", bound=Callable[[Site], Any])


@explained
@dataclass(frozen=True, slots=True)
class Rule:
    """A policy with one action for every site that matches a pattern, as ``on`` makes it."""

    pattern: str
    action: Answer
    source: str = field(default="", compare=False)  # ``file:line`` of the call of ``on``

    def __call__(self, site: Site, /) -> Answer:
        """Answer with the action where the pattern matches and, if it names no kind, the action is allowed."""
        pattern = Pattern.parse(self.pattern)
        if not pattern.matches(site):
            return None
        if pattern.kind is None and not all(site.kind in kinds_of(a) for a in _flat(self.action)):
            return None
        return self.action

    def __repr__(self) -> str:
        """As the call that makes it."""
        return f"on({self.pattern!r}, {self.action!r})"


def on(pattern: str, action: Answer, *, reads: Mapping[str, str] | None = None) -> Rule:
    """Make the policy that takes ``action`` at every site of ``pattern``.

    Args:
        pattern: ``[kind:]glob[#call]``, as in ``Site.matches``. Without a kind the rule holds at every
            matching site at which the action is allowed; with one, an action that is not allowed there is
            a ``PolicyError`` when the graph is rewritten.
        action: An action, a tensor function, or a sequence of them (applied in order).
        reads: Of a tensor function, the values of other sites that it reads: ``gr.call(action, reads=reads)``.

    Returns:
        A frozen policy. A rule that matches no site raises ``NoSuchSiteError`` after the first training
        forward.

    Raises:
        ValueError: The pattern, or one in ``reads``, is malformed.
        TypeError: The function has no keyword of a name in ``reads``.
        PolicyError: ``action`` is none.

    Example:
        >>> from gradrewrite.passes import ClipByValue
        >>> on("error:decoder.*", ClipByValue(10.0))
        on('error:decoder.*', ClipByValue(10.0))
    """
    Pattern.parse(pattern)
    action = action if reads is None else _calling(action, reads, pattern)
    if not actions_of(action, where=f"on({pattern!r}, ...)"):
        raise PolicyError(f"on({pattern!r}, ...): no action was given")
    return Rule(pattern, action, line_of(sys._getframe(1)))


def _calling(action: Any, reads: Mapping[str, str], pattern: str) -> Call:
    if is_action(action) or not callable(action):
        raise PolicyError(f"on({pattern!r}, ..., reads=...): reads is for a tensor function, got {action!r}")
    return call(action, reads=reads)


def line_of(frame: FrameType) -> str:
    """Return file and line of a frame; ``""`` for code without a file."""
    file = frame.f_code.co_filename
    return "" if file.startswith("<") else f"{Path(file).name}:{frame.f_lineno}"


def check_policy(policy: Any) -> None:
    """Look at a policy where it is given: PolicyError for none, ValueError for a tensor in a rule that is no bound."""
    if isinstance(policy, type):
        raise PolicyError(
            f"a policy was wanted, got the class {policy.__name__}; a rule is "
            f"gr.on('error:*', {policy.__name__}(...)), with the pattern of its sites"
        )
    if is_action(policy):
        found = insertion_anywhere(policy)
        is_of_group = found is not None and found.group is not None
        kind = "error" if "error" in kinds_of(policy) and not is_of_group else "gradient"
        raise PolicyError(f"{policy!r} is an action, not a policy: say where, as in gr.on('{kind}:*', {policy!r})")
    if isinstance(policy, Sequence) and not isinstance(policy, str):
        for item in policy:
            check_policy(item)
    elif not callable(policy):
        raise PolicyError(
            f"a policy is a function Site -> action, a rule (gr.on), or a list of them; got {policy!r}{_meant(policy)}"
        )
    elif isinstance(policy, Rule):
        check_bounds(policy)
        _check_at_steps(policy)
        _check_kind(policy)


def _meant(policy: Any) -> str:
    """Return the way out for a value in the place of a policy; ``""`` if none is known."""
    if isinstance(policy, Mapping):
        return ". Write [gr.on(pattern, action) for pattern, action in policy.items()]; all that match act, in order"
    if isinstance(policy, re.Pattern):
        return ". Patterns are globs, gr.on('error:decoder.*', action); a function of the site may use re"
    if isinstance(policy, str):
        return f". A pattern needs an action: gr.on({policy!r}, action)"
    return ". The policy that changes nothing is []" if policy is None else ""


def _check_at_steps(rule: Rule) -> None:
    """Refuse wrong actions at step sites; without a guard nobody asks there."""
    for action in _flat(rule.action) if Pattern.parse(rule.pattern).kind == "step" else ():
        if "step" not in kinds_of(action):
            allowed = ", ".join(sorted(kinds_of(action)))
            raise PolicyError(
                f"{rule.pattern}: {describe(action)} does not apply to this kind of site; it applies to {allowed}",
                code="action-not-allowed",
            )


def _check_kind(rule: Rule) -> None:
    """Refuse actions for kinds that a pattern without a kind does not match; it would match none."""
    for action in _flat(rule.action) if Pattern.parse(rule.pattern).kind is None else ():
        if (kinds := kinds_of(action)) and kinds.isdisjoint(_WITHOUT_KIND):
            kind = min(kinds)
            raise PolicyError(
                f"{rule.pattern}: {describe(action)} applies to {kind} sites alone, which only a pattern with that "
                f"kind matches: gr.on({f'{kind}:{rule.pattern}'!r}, {describe(action)})",
                code="action-not-allowed",
            )


def check_bounds(policy: Policy) -> None:
    """Raise ValueError where a tensor in a rule is no bound now; other callables cannot be looked into."""
    for rule in rules_of(policy):
        for action in _flat(rule.action):
            if isinstance(action, Bounded):
                try:
                    action.check_bounds()
                except ValueError as err:
                    raise ValueError(f"gr.on({rule.pattern!r}, ...): {err}") from None


def ask(policy: Policy, site: Site) -> tuple[Any, ...]:
    """Ask a policy about one site: all answers, flat, in list order.

    PolicyError if an answer is no action, or not allowed at this kind of site; or if the policy itself raised.
    """
    return tuple(answered.action for answered in ask_in_order(policy, site))


@dataclass(frozen=True, slots=True)
class Answered:
    """An action from a policy's answer."""

    position: tuple[int, ...]  # of the callback in the nested lists of the policy
    insertion: Insertion
    is_lenient: bool = False  # where the gradient takes no action, it is left out

    @property
    def action(self) -> Any:
        """The action as it is at the site."""
        return self.insertion.action

    def omitted(self) -> Answered:
        """Return the answer of a step that leaves the action out."""
        return replace(self, insertion=self.insertion.omitted())


def leave_out_unsupported(callback: Callback) -> Callback:
    """Let actions of a callback be left out at sparse gradients and those of tensor subclasses."""
    callback.is_lenient = True  # type: ignore[attr-defined]
    return callback


def ask_in_order(policy: Policy, site: Site, position: tuple[int, ...] = ()) -> tuple[Answered, ...]:
    """Ask a policy about one site, as ``ask`` does, with the position of each answer in the list of policies.

    What several actions would record of one value is left to one of them.

    Of a callback that is no rule the answers at ``saved``, ``param``, ``state`` and ``backward`` sites count only if it
    tells their kind from others: it is asked once more, at a site of a kind that does not exist, for an op at the error
    of its value too, and answers something else there.
    """
    found = _ask(policy, site, position)
    insertions = measured_once([answered.insertion for answered in found])
    return tuple(replace(a, insertion=insertion) for a, insertion in zip(found, insertions, strict=True))


def _ask(policy: Policy, site: Site, position: tuple[int, ...]) -> tuple[Answered, ...]:
    if callable(policy):
        rule = policy.pattern if isinstance(policy, Rule) else without_addresses(describe_callable(policy))
        is_lenient = getattr(policy, "is_lenient", False) is True
        return tuple(
            Answered(position, replace(insertion, rule=rule), is_lenient) for insertion in _ask_callback(policy, site)
        )
    items = enumerate(policy)
    return tuple(found for number, item in items for found in _ask(item, site, (*position, number)))


def _ask_callback(policy: Callable[[Site], Answer], site: Site) -> tuple[Insertion, ...]:
    if site.traits.needs_kind and not isinstance(policy, Rule) and not _tells_kind(policy, site):
        return ()
    try:
        answer = policy(site)
    except RewriteError:
        raise
    except Exception as err:
        raise PolicyError(f"{site}: the policy raised {type(err).__name__}: {err}. {_CALLBACK}") from err
    try:
        insertions = tuple(_insertion_at(site, action) for action in actions_of(answer, where=str(site)))
        for insertion in insertions:
            refuse(insertion, Context(site))
    except PolicyError as err:
        if not isinstance(policy, Rule) or not policy.source:
            raise
        raise PolicyError(f"{policy.source}: {err.text}", code=err.code) from None
    return insertions


def _insertion_at(site: Site, action: Any) -> Insertion:
    try:
        return insertion_at(action, site)
    except RewriteError:
        raise
    except Exception as err:  # of the user's function of a site, or for what it returned
        raise PolicyError(f"{site}: {describe(action)}: {type(err).__name__}: {err}") from err


def _tells_kind(policy: Callable[[Site], Answer], site: Site) -> bool:
    """Return whether a callback answers otherwise at this site than at one of an unknown kind.

    At the backward of an op it answers otherwise than at the error of the same value, too: no action is for both.
    """
    unknown: Any = "unknown"
    others = [replace(site, kind=unknown, nbytes=None)]
    if site.kind == "backward":
        others.append(replace(site, kind="error"))
    found = _outcome(policy, site)
    return all(found != _outcome(policy, other) for other in others)


def _outcome(policy: Callable[[Site], Answer], site: Site) -> Hashable:
    """Return a key of an answer; None after an exception."""
    try:
        actions = actions_of(policy(site), where=str(site))
    except Exception:  # of a callback that was not written for such sites
        return None
    return tuple(without_addresses(repr(action)) for action in actions)  # of new objects in each call, too


def rules_of(policy: Policy) -> tuple[Rule, ...]:
    """All rules in a policy, in list order; other callables cannot be looked into."""
    if isinstance(policy, Rule):
        return (policy,)
    if callable(policy):
        return ()
    return tuple(rule for item in policy for rule in rules_of(item))


def parts_of(policy: Policy) -> tuple[Any, ...]:
    """Return the rules and callbacks of a policy's nested lists, as they are now."""
    return (policy,) if callable(policy) else tuple(part for item in policy for part in parts_of(item))


def policy_text(policy: Policy) -> list[str]:
    """Return the rules and callbacks of a policy as text, with the lines that made the rules; no address in memory."""
    return [_part_text(part) for part in parts_of(policy)]


def _part_text(part: Any) -> str:
    if not isinstance(part, Rule):
        return without_addresses(located_callable(part))
    text = f"gr.{without_addresses(repr(part))}"
    return f"{text}, {part.source}" if part.source else text


def rule_skips(policy: Policy) -> bool:
    """Whether a rule of a policy may skip updates."""
    found = (insertion_anywhere(action) for rule in rules_of(policy) for action in _flat(rule.action))
    return any(insertion is not None and skips_updates(insertion) for insertion in found)


def answers_alike(policy: Policy, name: str) -> bool:
    """Return whether a policy answers alike at all calls of a site's name: it has rules alone, and none of one call."""
    patterns = [Pattern.parse(rule.pattern) for rule in rules_of(policy)]
    return not callbacks_of(policy) and not any(p.call is not None and fnmatchcase(name, p.glob) for p in patterns)


def callbacks_of(policy: Policy, position: tuple[int, ...] = ()) -> dict[tuple[int, ...], Callable[[Site], Answer]]:
    """Return all callables in a policy that are no rules, by their position in its nested lists."""
    if isinstance(policy, Rule):
        return {}
    if callable(policy):
        return {position: policy}
    found = (callbacks_of(item, (*position, number)) for number, item in enumerate(policy))
    return {key: callback for one in found for key, callback in one.items()}


def may_answer_at(policy: Policy, kinds: Collection[Kind]) -> bool:
    """Whether a policy may have answers at sites of these kinds."""
    if isinstance(policy, Rule):
        return Pattern.parse(policy.pattern).kind in kinds
    return callable(policy) or any(may_answer_at(item, kinds) for item in policy)


def rules_at(policy: Policy, kind: Kind) -> list[Rule]:
    """Return a policy's rules for one kind of site."""
    return [rule for rule in rules_of(policy) if Pattern.parse(rule.pattern).kind == kind]


def patterns_of_uses(policy: Policy) -> list[Pattern]:
    """Return a policy's patterns of single uses of values: those of its rules, and of their reads."""
    rules = rules_of(policy)
    actions = (action for rule in rules for action in actions_of(rule.action, where=rule.pattern))
    insertions = (found for action in actions if (found := insertion_anywhere(action)) is not None)
    read = [with_any_names(text) for found in insertions for _, text in found.read_patterns]
    patterns = [*(Pattern.parse(rule.pattern) for rule in rules), *read]
    return [pattern for pattern in patterns if pattern.to is not None]


def first_guarded_site(policy: Policy, parameters: Mapping[str, Tensor]) -> str | None:
    """Return the first site at a guard with an answer, among these parameters, or a rule for optimizer state."""
    for name, parameter in parameters.items():
        sites = [step_site(name, parameter)] * parameter.requires_grad + [parameter_site(name, parameter)]
        try:
            found = next((site for site in sites if ask_in_order(policy, site)), None)
        except RewriteError:  # a callback that does not expect step sites, and that no guard asks
            return None
        if found is not None:
            return str(found)
    return next((rule.pattern for rule in rules_at(policy, "state")), None)


def step_site(name: str, parameter: Tensor) -> Site:
    """Return the step site of a parameter."""
    return _site("step", name, name, parameter)


def parameter_site(name: str, parameter: Tensor) -> Site:
    """Return the site of a parameter after the update."""
    return _site("param", name, name, parameter)


def state_site(name: str, key: str, state: Tensor) -> Site:
    """Return the site of a tensor of the optimizer's state of a parameter."""
    return _site("state", f"{name}.{key}", name, state)


def _site(kind: Kind, name: str, parameter: str, tensor: Tensor) -> Site:
    module, shape = parameter.rpartition(".")[0], tuple(tensor.shape)
    return Site(kind=kind, name=name, module=module, shape=shape, dtype=tensor.dtype, device=tensor.device)


def _flat(answer: Any) -> tuple[Any, ...]:
    return actions_of(answer, where="a rule")
