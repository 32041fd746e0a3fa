"""Records of all ranks: one sum and one maximum, however many ranks there are."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch import distributed as dist

from gradrewrite.distributed.groups import device_for, resolve_group, this_rank
from gradrewrite.ir.record_key import RecordKey
from gradrewrite.monitoring.wholes import How, Rule, Summands

_Schema = dict[RecordKey, Rule]


@dataclass(slots=True)
class RankReduction:
    """Sums of the records of all ranks of a group.

    The ranks agree on a schema, the records that one of them has, by sending it once. While no rank has others, each
    reduction takes one all-reduce with ``SUM`` and, where a record has extremes, one with ``MAX``.
    """

    _schemas: dict[tuple[int, How | None], _Schema] = field(default_factory=dict)  # by the identity of the group

    def __call__(self, own: Summands, how: How | None, group: dist.ProcessGroup | None) -> Summands:
        """Return the summands of all ranks; a collective call. Without other ranks they are the given ones."""
        if this_rank() is None:
            return own
        group = resolve_group(group, "Monitor.reduce")
        device, key_of = device_for(group, torch.device("cpu")), (id(group), how)
        schema = self._schemas.get(key_of)
        sums = None if schema is None else self._sum(own, schema, group, device)
        if schema is None or sums is None:
            schema = self._schemas[key_of] = _agree(own, group)
            sums = self._sum(own, schema, group, device)
            assert sums is not None
        extremes = [key for key, rule in schema.items() if rule.is_extreme]
        if extremes:
            largest = torch.tensor([own.largest.get(key, -math.inf) for key in extremes], dtype=torch.float64)
            largest = largest.to(device)
            dist.all_reduce(largest, dist.ReduceOp.MAX, group)
            sums.largest = dict(zip(extremes, largest.tolist(), strict=True))
        there = {key for key, own_sums in sums.sums.items() if own_sums[0] != 0}
        sums.rules = {key: rule for key, rule in sums.rules.items() if key in there}
        return sums

    def _sum(self, own: Summands, schema: _Schema, group: dist.ProcessGroup, device: torch.device) -> Summands | None:
        """Return the sums over the ranks; None if one of them has a record that is not in the schema."""
        has_others = any(schema.get(key) != rule for key, rule in own.rules.items())
        numbers = [float(has_others)]
        for key, rule in schema.items():
            numbers += own.sums.get(key, [0.0] * rule.num_sums) if not has_others else [0.0] * rule.num_sums
        vector: Tensor = torch.tensor(numbers, dtype=torch.float64).to(device)
        dist.all_reduce(vector, dist.ReduceOp.SUM, group)
        flag, *found = vector.tolist()
        if flag:
            return None
        summands = Summands(rules=dict(schema))
        for key, rule in schema.items():
            summands.sums[key], found = found[: rule.num_sums], found[rule.num_sums :]
        return summands


def _agree(own: Summands, group: dist.ProcessGroup) -> _Schema:
    """Return the records of all ranks, in the order of the first rank that has each."""
    gathered: list[Any] = [None] * dist.get_world_size(group)
    dist.all_gather_object(gathered, [(str(key), rule) for key, rule in own.rules.items()], group=group)
    return {RecordKey.parse(text): rule for found in gathered for text, rule in found}
