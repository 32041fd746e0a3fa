"""Bucketed actions: one operation for several gradients, its begin and end."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from typing import Any

from torch import Tensor, fx

from gradrewrite.distributed.buckets import bucket_order
from gradrewrite.ir.markers import value_of
from gradrewrite.policy.actions import BucketedAction, action_key
from gradrewrite.rewriting.insertion_points import InsertionPoint
from gradrewrite.rewriting.lowering import Average, Insertion


def rounds_of(insertions: Sequence[Insertion]) -> list[tuple[list[Insertion], BucketedAction | None]]:
    """Split the insertions of a site: those before each average, with its action; then the others, with None."""
    rounds: list[tuple[list[Insertion], BucketedAction | None]] = []
    before: list[Insertion] = []
    for insertion in insertions:
        if isinstance(insertion, Average):
            rounds.append((before, insertion.action))
            before = []
        else:
            before.append(insertion)
    return [*rounds, (before, None)]


def buckets_of(
    members: Sequence[tuple[InsertionPoint, BucketedAction]], nodes: Mapping[InsertionPoint, fx.Node]
) -> list[tuple[BucketedAction, list[InsertionPoint]]]:
    """Sort gradients into the buckets of their actions, in the order of the graph.

    The graph computes them in this order.

    Args:
        members: The insertion points, each with its action.
        nodes: The nodes of their gradients.

    Returns:
        Each bucket with its action; they come in the order in which they are complete, members likewise.
    """
    order = {node: number for number, node in enumerate(next(iter(nodes.values())).graph.nodes)}
    alike: dict[Any, list[tuple[InsertionPoint, BucketedAction]]] = defaultdict(list)
    for point, action in sorted(members, key=lambda member: order[nodes[member[0]]]):
        alike[action_key(action)].append((point, action))
    buckets = []
    for found in alike.values():
        points, action = [point for point, _ in found], found[0][1]
        values = [value_of(nodes[point]) for point in points]
        kinds = [(value.dtype, value.device) for value in values]
        sizes = [_bytes_of(value) for value in values]
        for positions in bucket_order(kinds, sizes, action.bucket_bytes):
            buckets.append((action, [points[n] for n in positions]))
    return sorted(buckets, key=lambda bucket: order[nodes[bucket[1][-1]]])


def _bytes_of(value: Tensor) -> int | None:
    numel = value.numel()
    return numel * value.element_size() if isinstance(numel, int) else None
