"""Sampling: measurements in every n-th step."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Literal, TypeAlias

from gradrewrite._compat import autograd
from gradrewrite.policy.actions import Policy, actions_of, insertion_anywhere
from gradrewrite.policy.insertions import Insertion
from gradrewrite.policy.numbers import python_number
from gradrewrite.policy.rules import Answered, rules_of
from gradrewrite.policy.state_store import StateStore
from gradrewrite.sites import AFTER_UPDATE, Pattern

# The measurements of a graph: all of the policy, those without an interval of their own, or none.
Measured: TypeAlias = Literal["all", "every step", "nothing"]


def sampled(answers: Sequence[Answered], measured: Measured) -> tuple[Answered, ...]:
    """Return the answers at a site for a graph with these measurements."""

    def is_part(insertion: Insertion) -> bool:
        every = insertion.every
        return every is None or measured == "all" or (measured == "every step" and every == 1)

    if not any(is_part(answered.insertion) for answered in answers):
        return ()
    return tuple(a if is_part(a.insertion) else a.omitted() for a in answers)


def checked_interval(owner: str, name: str, value: Any) -> int:
    """Return a number of steps; ValueError if it is no whole number >= 1."""
    number = python_number(value)
    if isinstance(number, bool) or not isinstance(number, int) or number < 1:
        raise ValueError(f"{owner}: {name} is a whole number >= 1, got {value!r}")
    return number


@dataclass(eq=False, slots=True)
class SamplingSettings:
    """The settings of a monitor."""

    sample: int = 1  # steps between measurements
    num_requests: int = 0  # how often a step was asked for


class Sampling:
    """The measurements of one policy, step by step.

    A step is one of ``StateStore.step``: of the guarded optimizer, or a backward without one. Step 0 is measured. The
    decision on a step is made where its first forward begins, and holds until the next one.
    """

    def __init__(self, settings: SamplingSettings, states: StateStore, policy: Policy) -> None:
        self._settings, self._states = settings, states
        self._intervals: set[int] = set()  # of actions in graphs
        self._of_steps: set[int] = set()  # of actions at step sites
        for rule in rules_of(policy):
            kind = Pattern.parse(rule.pattern).kind
            actions = actions_of(rule.action, where="a rule")
            intervals = _intervals_of(found for a in actions if (found := insertion_anywhere(a)) is not None)
            if kind not in AFTER_UPDATE:
                (self._of_steps if kind == "step" else self._intervals).update(intervals)
        self._step, self._sample, self._is_asked = -1, 1, False
        self._has_forwards = False
        self._num_requests = settings.num_requests

    @property
    def kinds(self) -> list[Measured]:
        """All possible measurements of steps with the current settings."""
        found: list[Measured] = ["all"]
        if self._intervals and max(self._intervals) > 1:
            found.append("every step" if 1 in self._intervals else "nothing")
        if self._intervals and self._settings.sample > 1 and "nothing" not in found:
            found.append("nothing")
        return found

    @property
    def is_in_use(self) -> bool:
        """Whether steps may differ in their measurements."""
        intervals = self._intervals | self._of_steps
        return bool(intervals) and (self._settings.sample > 1 or max(intervals) > 1)

    def note(self, answers: Iterable[Sequence[Answered]], *, at_steps: bool = False) -> None:
        """Take note of answers of the policy to a rewritten graph, or at step sites."""
        found = _intervals_of(answered.insertion for own in answers for answered in own)
        (self._of_steps if at_steps else self._intervals).update(found)

    def begin(self) -> Measured:
        """Decide on the step of a forward; return the measurements of its graph.

        What a checkpoint computes again in a backward belongs to the step of that backward.
        """
        self._has_forwards = True
        self._decide()
        return self._measured(self._intervals)

    def of_update(self) -> Measured:
        """Return the measurements at step sites, of the last forward's step.

        Where another optimizer has made its step since, the step is the same one.
        """
        if not self._has_forwards:  # gradients that were given by hand
            self._decide()
        return self._measured(self._of_steps)

    def _decide(self) -> None:
        step = self._states.step
        if step != self._step and autograd.backward_id() == -1:
            requests = self._settings.num_requests
            self._step, self._sample = step, self._settings.sample
            self._is_asked, self._num_requests = requests != self._num_requests, requests

    def _measured(self, intervals: Collection[int]) -> Measured:
        if self._is_asked or not intervals:
            return "all"
        if self._step % self._sample:
            return "nothing"
        if max(intervals) == 1 or any(self.is_due(every) for every in intervals if every > 1):
            return "all"
        return "every step" if 1 in intervals else "nothing"

    def is_due(self, every: int) -> bool:
        """Return whether a measurement with this interval is due now."""
        return self._is_asked or not (self._step % self._sample or self._step % every)


def _intervals_of(insertions: Iterable[Insertion]) -> set[int]:
    return {insertion.every for insertion in insertions if insertion.every is not None}
