"""Averages over processes, in buckets of gradients."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from typing import Any, TypeAlias

from torch import fx

from gradrewrite.distributed.buckets import bucket_order
from gradrewrite.ir import editing
from gradrewrite.ir.markers import value_of
from gradrewrite.ir.values import num_bytes
from gradrewrite.policy.insertions import AverageOverRanks, Insertion
from gradrewrite.rewriting.action_tracing import check_dense
from gradrewrite.rewriting.canvas import Canvas
from gradrewrite.rewriting.inserters.group import insert_group
from gradrewrite.rewriting.inserters.single import insert
from gradrewrite.rewriting.insertion_points import InsertionPoint
from gradrewrite.rewriting.lowering import Group
from gradrewrite.rewriting.node_shares import share_nodes

_Averaged: TypeAlias = tuple[InsertionPoint, Insertion, AverageOverRanks]
_Round: TypeAlias = "tuple[list[Insertion], tuple[Insertion, AverageOverRanks] | None]"


def insert_averages(
    canvas: Canvas, members: Mapping[InsertionPoint, Sequence[Insertion]], early: Sequence[Group]
) -> None:
    """Insert at single sites that have averages among their insertions.

    What comes before the last of these is inserted right behind the gradient, so that their operations begin as
    soon as their gradients are there; what comes after it, at the end. Before the first bucket come ``early``
    groups, which act on the gradients of this process.
    """
    at_end = {point: point.before for point in members}
    rounds = {point: _rounds_of(insertions) for point, insertions in members.items()}
    while rounds:
        begun: list[_Averaged] = []
        for point, left in list(rounds.items()):
            single, average = left.pop(0)
            read = [canvas.current(point.node), *canvas.loss_rows.get(point.site, {}).values()]
            point.before = at_end[point] if average is None else behind(canvas.graph, read)
            insert(canvas, point, single)
            if average is None:
                del rounds[point]
            elif average[1].processes().size() == 1:
                canvas.note(point.site, average[0])
            else:
                begun.append((point, *average))
        for group in early:
            for point in group.points:
                point.before = at_end.get(point, point.before)
            insert_group(canvas, group)
        early = ()
        nodes = {point: canvas.current(point.node) for point, *_ in begun}
        for bucket in _buckets_of(begun, nodes) if begun else ():
            _insert_bucket(canvas, *bucket)


def _insert_bucket(
    canvas: Canvas, insertion: Insertion, average: AverageOverRanks, points: Sequence[InsertionPoint]
) -> None:
    points = points[::-1]  # nodes of all of them are listed at the first: the gradient behind which they are
    nodes = [canvas.current(point.node) for point in points]
    values = [value_of(node) for node in nodes]
    for point, value in zip(points, values, strict=True):
        check_dense(insertion.action, point.site, value)
    place = behind(canvas.graph, nodes)
    (begun,), new = editing.compute(
        canvas.graph, lambda *tensors: [average.begin(tensors)], nodes, place, "must_be_in_backward"
    )
    results, added = editing.compute(
        canvas.graph,
        lambda begun, *tensors: list(average.end(begun, tensors)),
        [begun, *nodes],
        canvas.graph.output_node(),
        is_pruned=True,
    )
    for point, names in zip(points, share_nodes([*new, *added], nodes, results), strict=True):
        canvas.note(point.site, insertion, names)
        canvas.averaged.update(names)
    for point, result in zip(points, results, strict=True):
        point.replicas *= average.processes().size()
        canvas.replace(point, result)


def behind(graph: fx.Graph, nodes: Sequence[fx.Node]) -> fx.Node:
    """Return the node right behind these nodes and all inputs."""
    last_input = graph.find_nodes(op="placeholder")[-1]
    last: fx.Node = max([last_input, *nodes])  # nodes compare by their position
    return last.next


def _rounds_of(insertions: Sequence[Insertion]) -> list[_Round]:
    """Split the insertions of a site: those before each average, with it; then the others, with None."""
    rounds: list[_Round] = []
    before: list[Insertion] = []
    for insertion in insertions:
        if isinstance(insertion.effect, AverageOverRanks):
            rounds.append((before, (insertion, insertion.effect)))
            before = []
        else:
            before.append(insertion)
    return [*rounds, (before, None)]


def _buckets_of(
    members: Sequence[_Averaged], nodes: Mapping[InsertionPoint, fx.Node]
) -> list[tuple[Insertion, AverageOverRanks, list[InsertionPoint]]]:
    """Sort gradients into buckets; these come in the order of completion by the graph, members likewise."""
    alike: dict[Any, list[_Averaged]] = defaultdict(list)
    for member in sorted(members, key=lambda member: nodes[member[0]]):  # nodes compare by their position
        alike[member[1].key].append(member)
    buckets = []
    for found in alike.values():
        points, (_, insertion, average) = [point for point, *_ in found], found[0]
        values = [value_of(nodes[point]) for point in points]
        kinds = [(value.dtype, value.device) for value in values]
        for positions in bucket_order(kinds, list(map(num_bytes, values)), average.bucket_bytes):
            buckets.append((insertion, average, [points[n] for n in positions]))
    return sorted(buckets, key=lambda bucket: nodes[bucket[2][-1]])
