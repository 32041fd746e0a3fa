"""Functions of several values in repeated eager backwards."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from gradrewrite.policy.insertions import Insertion
from gradrewrite.policy.rules import Answered
from gradrewrite.sites import Site

# The insertion, sites and values of a group -> new values
Run = Callable[[Insertion, Sequence[Site], Sequence[Tensor]], Sequence[Tensor]]


@dataclass
class EagerGroups:
    """The groups at errors and inputs, with values and results.

    The backward is run until each function was given all of its values.
    """

    names: set[Hashable] = field(default_factory=set)
    _members: dict[Site, list[Answered]] = field(default_factory=dict)
    _values: dict[Hashable, dict[Site, Tensor]] = field(default_factory=dict)
    _results: dict[Hashable, dict[Site, Tensor]] = field(default_factory=dict)

    def expect(self, site: Site, answers: Sequence[Answered]) -> None:
        """Note the groups of a site, in the order of the policy."""
        self._members[site] = [one for one in answers if one.insertion.group in self.names]

    def act(self, site: Site, value: Tensor) -> Tensor:
        """Note the value of a site for its groups; return their last result."""
        for answered in self._members[site]:
            group = answered.insertion.group
            self._values.setdefault(group, {})[site] = value
            value = self._results.get(group, {}).get(site, value)
        return value

    def run(self, run: Run) -> bool:
        """Run all functions on the last values; return whether a result is new."""
        before, self._results = self._results, {group: dict(self._run_one(group, run)) for group in self._values}
        return not _are_equal(before, self._results)

    def __contains__(self, site: object) -> bool:
        """Whether a site has a group."""
        return bool(self._members.get(site))  # type: ignore[call-overload]

    def _run_one(self, group: Hashable, run: Run) -> Iterator[tuple[Site, Tensor]]:
        values = self._values[group]
        sites = [site for site in self._members if site in values]
        (insertion,) = (one.insertion for one in self._members[sites[0]] if one.insertion.group == group)
        return zip(sites, run(insertion, sites, [values[site] for site in sites]), strict=True)


def _are_equal(
    first: Mapping[Hashable, Mapping[Site, Tensor]], second: Mapping[Hashable, Mapping[Site, Tensor]]
) -> bool:
    if first.keys() != second.keys() or any(first[group].keys() != second[group].keys() for group in first):
        return False
    pairs = ((first[group][site], second[group][site]) for group in first for site in first[group])
    return all(torch.allclose(a, b, rtol=0.0, atol=0.0, equal_nan=True) for a, b in pairs)
