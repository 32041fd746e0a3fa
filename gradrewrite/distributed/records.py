"""Records of several ranks, combined on the host."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any, Literal

from torch import distributed as dist

from gradrewrite.distributed.groups import this_rank


def combine_over_ranks(
    records: Mapping[str, float], how: Literal["mean", "max", "sum"], group: dist.ProcessGroup | None
) -> dict[str, float]:
    """Return the records of all ranks of a group (all ranks if None), each combined over the ranks that have it.

    A collective call. NaN on one rank makes the result NaN.
    """
    if this_rank() is None:
        return dict(records)
    gathered: list[Any] = [None] * dist.get_world_size(group)
    dist.all_gather_object(gathered, dict(records), group=group)
    names = dict.fromkeys(name for own in gathered for name in own)
    return {name: _combine([own[name] for own in gathered if name in own], how) for name in names}


def _combine(values: list[float], how: str) -> float:
    if any(math.isnan(value) for value in values):
        return math.nan
    if how == "max":
        return max(values)
    total = sum(values)  # of infinities of both signs: NaN, as for tensors
    return total / len(values) if how == "mean" else total
