"""Insertion at the backwards of ops in the body of a loop."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import TypeAlias

from torch import fx

from gradrewrite._compat import operators
from gradrewrite.ir import editing
from gradrewrite.ir.marked_graph import MarkedJointGraph
from gradrewrite.ir.zero_cover import ZeroCover
from gradrewrite.policy.insertions import Insertion
from gradrewrite.policy.rules import Answered
from gradrewrite.policy.sampling import Measured
from gradrewrite.policy.scope import Context, refuse
from gradrewrite.rewriting.canvas import Canvas
from gradrewrite.rewriting.inserters.backwards import Ask, OpBackwards, parameters_of
from gradrewrite.rewriting.insertion_points import InsertionPoint
from gradrewrite.rewriting.loop_answers import IterationClass, classes_of
from gradrewrite.rewriting.loop_bodies import JointBody
from gradrewrite.sites import Site

Covers: TypeAlias = dict[Site, ZeroCover]
Insert: TypeAlias = Callable[[Canvas, InsertionPoint, Sequence[Insertion]], None]
InsertOfClass: TypeAlias = Callable[[IterationClass, InsertionPoint, Insert], fx.Node]


def insert_at_ops(
    canvas: Canvas,
    body: JointBody,
    marked: MarkedJointGraph,
    given: Sequence[fx.Node],
    ask: Ask,
    measured: Measured,
    insert: InsertOfClass,
    covers: Covers,
) -> dict[Site, tuple[Answered, ...]]:
    """Insert at the ops of an iteration, and return the answers: all iterations need equal ones.

    ``given`` are the arguments of the loop. ``insert`` inserts in a class of iterations, by a function of the canvas;
    the covers of zeros are added to ``covers``.
    """
    if not marked.ops:
        return {}
    ops = marked.ops
    loop = body.loop
    found: dict[Site, tuple[Answered, ...]] = {}
    inside, outside = body.graph.find_nodes(op="placeholder")[body.num_moving :], loop.split(given)[2]
    known = parameters_of(given[0].graph, marked)
    fixed = {node for node, outer in zip(inside, outside, strict=False) if operators.memory_of(outer) in known}
    backwards = OpBackwards(canvas, ops, fixed)
    names = {number: name for name, number in loop.numbers.items()}
    for number, point in backwards.points.items():
        own_names = (names[value] for value in ops[number].values)
        name = next((name for name in own_names if loop.has_site(name, "backward")), None)
        if name is None:
            continue
        sites = [loop.site(name, "backward", n) for n in range(loop.num_answered)]
        answers = {site: ask(site) for site in sites}
        found |= answers
        for own in classes_of(loop, answers, name, "backward", measured):
            if not own.is_all:
                refuse(own.insertions[0], Context(own.site, no_backward=_OTHER_ANSWERS))
            point.site = own.site
            insert(own, point, partial(_insert_at, backwards, number, sites, covers))
    editing.erase_op_markers(body.graph)
    return found


def _insert_at(
    backwards: OpBackwards,
    number: int,
    sites: Sequence[Site],
    covers: Covers,
    _: Canvas,
    __: InsertionPoint,
    insertions: Sequence[Insertion],
) -> None:
    cover = backwards.insert(number, insertions)
    if cover is not None:
        covers |= dict.fromkeys(sites, cover)


_OTHER_ANSWERS = (
    "is in a loop, and the policy has other answers in other iterations of it. Let it answer alike in all of them, or "
    'leave the loop unrolled (loops="unrolled")'
)
