"""Statistics of one value that several actions at a site record: they are measured once."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace

from gradrewrite.numerics.statistics import PARTS, STATISTICS
from gradrewrite.policy.insertions import GroupEffect, Insertion, MeasureTensor, ReplaceTensor, WeighLossGradients


def measured_once(insertions: Sequence[Insertion]) -> list[Insertion]:
    """Remove statistics from measurements that the next actions record of the same value, in as many steps or more."""
    found: list[Insertion] = []
    later: dict[tuple[str, str], int] = {}  # position by name and statistic
    for insertion in reversed(insertions):
        effect = insertion.effect
        twice: list[tuple[str, str]] = []
        if isinstance(effect, MeasureTensor):
            often = (None, 1, insertion.every)
            known = {one for one in effect.statistics.items() if one in later and found[later[one]].every in often}
            twice = _apart(effect.statistics, known) if effect.fails is None else []
        elif not isinstance(effect, GroupEffect) or isinstance(effect, WeighLossGradients):  # other groups come last
            later.clear()
        for name, statistic in twice:
            found[later[name, statistic]] = _with_observed(found[later[name, statistic]], name)
        if isinstance(effect, MeasureTensor | ReplaceTensor):
            for one in effect.statistics.items():
                later.setdefault(one, len(found))
        found.append(_without(insertion, [name for name, _ in twice]))
    return found[::-1]


def _apart(statistics: Mapping[str, str], known: set[tuple[str, str]]) -> list[tuple[str, str]]:
    """Return the known statistics that are not needed beside those that are left."""
    found = dict(known)
    for parts in map(set, PARTS.values()):
        if not parts.intersection(statistics) <= found.keys():
            found = {name: key for name, key in found.items() if name not in parts}
    if "numel" in statistics and "numel" not in found:  # the weight of all but sums and norms
        found = {name: key for name, key in found.items() if STATISTICS[key].combination.kind in ("sum", "norm")}
    return list(found.items())


def _with_observed(insertion: Insertion, name: str) -> Insertion:
    if not isinstance(insertion.effect, ReplaceTensor):
        return insertion
    return replace(insertion, effect=replace(insertion.effect, observed=insertion.effect.observed | {name}))


def _without(insertion: Insertion, names: Collection[str]) -> Insertion:
    effect = insertion.effect
    if not names or not isinstance(effect, MeasureTensor):
        return insertion
    left = {name: statistic for name, statistic in effect.statistics.items() if name not in names}
    every = insertion.every if left else None  # what measures nothing is in each graph
    return replace(insertion, effect=MeasureTensor(left), every=every, key=(insertion.key, tuple(left)))
