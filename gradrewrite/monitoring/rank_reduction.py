"""Records of all ranks, by sums and one maximum of fixed size."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import distributed as dist

from gradrewrite.distributed.groups import device_for, resolve_group, this_rank
from gradrewrite.ir.record_key import RecordKey
from gradrewrite.monitoring.wholes import CentralMoments, How, Rule, Summands
from gradrewrite.numerics.moments import MOMENTS


@dataclass(frozen=True, slots=True)
class _Schema:
    rules: dict[RecordKey, Rule]
    moments: tuple[tuple[RecordKey, ...], ...]  # the keys of each measurement of moments

    @property
    def summed(self) -> dict[RecordKey, Rule]:
        """The rules of records other than moments."""
        return {key: rule for key, rule in self.rules.items() if rule.statistic not in MOMENTS}


@dataclass(slots=True)
class RankReduction:
    """Sums of the records of all ranks of a group.

    The ranks agree on a schema, the records that one of them has, by sending it once. While no rank has others, each
    reduction takes one all-reduce with ``SUM`` (with ``std`` or ``kurtosis`` two, the first for the means) and, where a
    record has extremes, one with ``MAX``.
    """

    _schemas: dict[tuple[int, How | None], _Schema] = field(default_factory=dict)  # by the identity of the group

    def __call__(self, own: Summands, how: How | None, group: dist.ProcessGroup | None) -> Summands:
        """Return the summands of all ranks; a collective call. Without other ranks they are the given ones."""
        if this_rank() is None:
            return own
        group = resolve_group(group, "Monitor.reduce")
        key_of = (id(group), how)
        schema = self._schemas.get(key_of)
        sums = None if schema is None else _sum(own, schema, group)
        if schema is None or sums is None:
            schema = self._schemas[key_of] = _agree(own, group)
            sums = _sum(own, schema, group)
            assert sums is not None
        extremes = [key for key, rule in schema.rules.items() if rule.combination.is_extreme]
        if extremes:
            largest = _reduced([own.largest.get(key, -math.inf) for key in extremes], dist.ReduceOp.MAX, group)
            sums.largest = dict(zip(extremes, largest, strict=True))
        return sums


def _sum(own: Summands, schema: _Schema, group: dist.ProcessGroup) -> Summands | None:
    """Return the sums over the ranks; None for an incomplete schema."""
    has_others = any(schema.rules.get(key) != rule for key, rule in own.rules.items())
    has_others |= not own.moments.keys() <= set(schema.moments)
    parts = {keys: _shared(own, keys, own.moments.get(keys, CentralMoments()), group) for keys in schema.moments}
    means = [0.0] * len(parts)
    if parts:
        sent = [number for part in parts.values() for number in (part.size, part.size * part.mean)]
        found = _reduced(sent, dist.ReduceOp.SUM, group)
        means = [total / size if size else 0.0 for size, total in zip(found[::2], found[1::2], strict=True)]
    numbers = [float(has_others)]
    for key, rule in schema.summed.items():
        replicas = _replicas(own, key, group)
        numbers += [number / replicas for number in own.sums.get(key, [0.0] * rule.combination.num_sums)]
    for mean, part in zip(means, parts.values(), strict=True):
        part = part.about(mean)
        numbers += [part.size, part.second, part.third, part.fourth]
    flag, *found = _reduced(numbers, dist.ReduceOp.SUM, group)
    if flag:
        return None
    summands = Summands()
    for key, rule in schema.summed.items():
        summands.sums[key], found = found[: rule.combination.num_sums], found[rule.combination.num_sums :]
    for keys, mean in zip(parts, means, strict=True):
        (size, *powers), found = found[:4], found[4:]
        summands.moments[keys] = CentralMoments(size, mean, *powers)
    in_moments = {key for keys, whole in summands.moments.items() if whole.size for key in keys}
    there = in_moments | {key for key, numbers in summands.sums.items() if numbers[0] != 0}
    summands.rules = {key: rule for key, rule in schema.rules.items() if key in there}
    return summands


def _shared(
    own: Summands, keys: tuple[RecordKey, ...], part: CentralMoments, group: dist.ProcessGroup
) -> CentralMoments:
    """Return the share of this rank in a part of several ranks."""
    replicas = _replicas(own, keys[0], group)
    if replicas == 1:
        return part
    powers = (power / replicas for power in (part.second, part.third, part.fourth))
    return CentralMoments(part.size / replicas, part.mean, *powers)


def _replicas(own: Summands, key: RecordKey, group: dist.ProcessGroup) -> int:
    """Return the number of replicas of a tensor in the group.

    The group has all of them, or is among them.
    """
    return min(own.replicas.get(key, 1), group.size())


def _reduced(numbers: Sequence[float], op: Any, group: dist.ProcessGroup) -> list[float]:
    vector = torch.tensor(numbers, dtype=torch.float64).to(device_for(group, torch.device("cpu")))
    dist.all_reduce(vector, op, group)
    found: list[float] = vector.tolist()
    return found


def _agree(own: Summands, group: dist.ProcessGroup) -> _Schema:
    """Return the schema of all ranks' records."""
    gathered: list[Any] = [None] * dist.get_world_size(group)
    dist.all_gather_object(gathered, (own.rules, tuple(own.moments)), group=group)
    rules = {key: rule for found, _ in gathered for key, rule in found.items()}
    return _Schema(rules, tuple(dict.fromkeys(keys for _, moments in gathered for keys in moments)))
