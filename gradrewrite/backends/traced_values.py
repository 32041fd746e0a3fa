"""Sets of Python values of a policy's functions: one for each compilation."""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from gradrewrite._utils.formatting import located_callable
from gradrewrite._utils.warnings import PendingWarnings
from gradrewrite.errors import CallbackError
from gradrewrite.policy.actions import Policy, actions_of, is_action
from gradrewrite.policy.insertions import action_key
from gradrewrite.policy.rules import Answered, ask_in_order, callbacks_of, rules_of
from gradrewrite.rewriting.function_values import FunctionValues, functions_in
from gradrewrite.sites import Site

MOST_SETS = 8
_TOO_MANY = (
    "{} reads {}, which has had {} values so far, and is {} now: each is traced and compiled anew, at most {} times. "
    "A bound that changes with the step is a gr.Schedule; a value that is computed from former steps is a gr.State; "
    "any other value is a tensor that is changed in place (tensor.fill_(...)), which is read at every backward"
)
_PRINTS = (
    "{} prints while it is traced, once for each site, and not at each backward; figures of a backward are recorded, "
    "with gr.record(name, value) or gr.passes.Observe(), and are in model.monitor"
)


@dataclass(eq=False)
class _Set:
    functions: dict[int, FunctionValues] = field(default_factory=dict)  # traced ones, by identity
    answers: dict[Site, tuple[Answered, ...]] = field(default_factory=dict)
    callbacks: list[FunctionValues] = field(default_factory=list)


class TracedValues:
    """The sets of Python values that a policy's callbacks and functions have had, by number."""

    def __init__(self, policy: Policy, warnings: PendingWarnings) -> None:
        self._policy, self._warnings = policy, warnings
        actions = (action for rule in rules_of(policy) for action in actions_of(rule.action, where="a rule"))
        # Functions of a site: what they return is in the action there.
        of_sites = (function for action in actions if is_action(action) for function in functions_in(action))
        self._callbacks = (*callbacks_of(policy).values(), *of_sites)
        self._sets = [_Set()]
        self._current = 0

    def note(self, answers: Mapping[Site, tuple[Answered, ...]]) -> list[FunctionValues]:
        """Note answers, just traced, and return the values that each of their functions reads."""
        own, found = self._sets[self._current], {}
        for site, given in answers.items():
            own.answers[site] = given
            for function in (f for answered in given for f in functions_in(answered.action)):
                if id(function) not in own.functions:
                    own.functions[id(function)] = FunctionValues([function])
                    self._note_print(own.functions[id(function)])
                found[id(function)] = own.functions[id(function)]
        own.callbacks = self._read_callbacks()
        return list(found.values())

    def _note_print(self, values: FunctionValues) -> None:
        if values.prints:
            name = located_callable(values.functions[0])
            self._warnings.warn_once(f"print {name}", _PRINTS.format(name))

    def number(self) -> int:
        """Return the number of the present set; CallbackError for too many."""
        known = self._sets[self._current]
        if not (known.functions or known.callbacks) and len(self._sets) == 1:
            return self._current
        changed = self._first_change(known)
        if changed is None:
            return self._current
        for number, known in enumerate(self._sets):
            if number != self._current and self._first_change(known) is None:
                self._current = number
                return number
        if len(self._sets) == MOST_SETS:
            function, name, value = changed
            text = _TOO_MANY.format(located_callable(function), name, MOST_SETS, shown_value(value), MOST_SETS)
            raise CallbackError(text, code="changing-value")
        self._sets.append(_Set())
        self._current = len(self._sets) - 1
        return self._current

    def _read_callbacks(self) -> list[FunctionValues]:
        return [FunctionValues([callback]) for callback in self._callbacks]

    def _first_change(self, known: _Set) -> tuple[Any, str, Any] | None:
        changed = first_change(known.functions.values())
        if changed is not None:
            return changed
        changed = first_change(known.callbacks)
        if changed is None:
            return None
        asked = ((ask_in_order(self._policy, site), given) for site, given in known.answers.items())
        if all(_key_of(now) == _key_of(given) for now, given in asked):
            known.callbacks = self._read_callbacks()  # they answer as before
            return None
        return changed


def shown_value(value: Any) -> str:
    """Return a value as text for a message."""
    text = repr(value)
    return text if len(text) <= 60 else f"another {type(value).__name__}"


def _key_of(given: tuple[Answered, ...]) -> Hashable:
    return tuple((answered.position, action_key(answered.action)) for answered in given)


def first_change(values: Iterable[FunctionValues]) -> tuple[Any, str, Any] | None:
    """Return the first function with a changed value, and its name and present value; None without one."""
    for own in values:
        changed = own.first_change()
        if changed is not None:
            return own.functions[0], *changed
    return None
