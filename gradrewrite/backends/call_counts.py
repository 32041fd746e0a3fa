"""Calls of modules and ops in one forward that runs in several graphs."""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

from gradrewrite._compat import autograd
from gradrewrite.errors import PolicyError
from gradrewrite.policy.rules import Rule, rules_of
from gradrewrite.sites import Pattern, Site


class ForwardCalls(threading.local):
    """Numbers of calls so far, in the forward of this thread."""

    def __init__(self) -> None:
        self.counts: Counter[str] = Counter()

    def begin(self) -> None:
        """A forward begins."""
        self.counts = Counter()


@dataclass(frozen=True, eq=False)
class PartOfForward:
    """The calls in one graph of a forward in several."""

    frame: str
    before: Mapping[str, int]  # when it was compiled, by name
    own: Mapping[str, int]  # in it
    sites: Sequence[Site]
    rules: Sequence[Rule]  # with the number of a call

    @classmethod
    def of(cls, frame: str, before: Mapping[str, int], sites: Sequence[Site], policy: object) -> PartOfForward:
        """Count the calls of a graph's sites."""
        last: dict[str, int] = {}
        for name, call in (address for site in sites for address in site.addresses):
            last[name] = max(last.get(name, 0), call)
        own = {name: call + 1 - before.get(name, 0) for name, call in last.items()}
        rules = [rule for rule in rules_of(policy) if Pattern.parse(rule.pattern).call is not None]  # type: ignore[arg-type]
        return cls(frame, {name: before.get(name, 0) for name in own}, own, sites, rules)

    def run(self, calls: ForwardCalls) -> None:
        """Count a run; PolicyError for a rule with the number of another run."""
        if autograd.backward_id() != -1:  # an activation checkpoint computes it again
            return
        counts = calls.counts
        if self.rules and any(counts[name] != number for name, number in self.before.items()):
            self._check(counts)
        counts.update(self.own)

    def _check(self, counts: Mapping[str, int]) -> None:
        for rule, site in self._differing(counts):
            raise PolicyError(
                f"{rule.pattern!r}: {site.name} is called several times behind graph breaks, and torch runs one "
                f"compiled frame ({self.frame}) for more than one of these calls, where no call has a number. Leave "
                "out #call, or lift the graph break (fullgraph=True finds it)",
                code="calls-of-a-frame",
            )

    def _differing(self, counts: Mapping[str, int]) -> Iterable[tuple[Rule, Site]]:
        """Yield rules that match a site otherwise in this run than when the graph was compiled."""
        for site in self.sites:
            moved = tuple((name, call - self.before[name] + counts[name]) for name, call in site.addresses)
            now = replace(site, addresses=moved)
            for rule in self.rules:
                pattern = Pattern.parse(rule.pattern)
                if pattern.matches(site) != pattern.matches(now):
                    yield rule, site
