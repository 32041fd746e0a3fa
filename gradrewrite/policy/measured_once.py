"""Statistics of one value that several actions at a site record: they are measured once."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import replace

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
            known = [one for one in effect.statistics.items() if one in later and found[later[one]].every in often]
            twice = known if effect.fails is None else []
        elif not isinstance(effect, GroupEffect) or isinstance(effect, WeighLossGradients):  # other groups come last
            later.clear()
        for name, statistic in twice:
            found[later[name, statistic]] = _with_observed(found[later[name, statistic]], name)
        if isinstance(effect, MeasureTensor | ReplaceTensor):
            for one in effect.statistics.items():
                later.setdefault(one, len(found))
        found.append(_without(insertion, [name for name, _ in twice]))
    return found[::-1]


def _with_observed(insertion: Insertion, name: str) -> Insertion:
    if not isinstance(insertion.effect, ReplaceTensor):
        return insertion
    return replace(insertion, effect=replace(insertion.effect, observed=insertion.effect.observed | {name}))


def _without(insertion: Insertion, names: Collection[str]) -> Insertion:
    effect = insertion.effect
    if not names or not isinstance(effect, MeasureTensor):
        return insertion
    left = {name: statistic for name, statistic in effect.statistics.items() if name not in names}
    return replace(insertion, effect=MeasureTensor(left), key=(insertion.key, tuple(left)))
