from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, fx

import gradrewrite.passes as P
from gradrewrite.errors import PolicyError
from gradrewrite.policy.actions import insertion_at
from gradrewrite.policy.insertions import Insertion, MeasureTensor, ReplaceGroup, ReplaceTensor
from gradrewrite.policy.rules import Answered
from gradrewrite.rewriting.insertion_points import InsertionPoint
from gradrewrite.rewriting.lowering import InsertionPlan, is_in_units, lower
from gradrewrite.sites import Kind, Site

pytestmark = pytest.mark.pure

GRADIENT, STEP = (
    Site(kind, "w", shape=(2, 3), dtype=torch.float32, device=torch.device("cpu")) for kind in ("gradient", "step")
)


def halve(g: Tensor) -> Tensor:
    return g / 2


def test_a_check_needs_no_unscaled_gradient() -> None:
    actions = [P.CheckFinite(), P.Observe("norm"), P.DecayWeights(0.1), halve, P.ClipByGlobalNorm(1.0)]

    assert [is_in_units(insertion_at(action, STEP)) for action in actions] == [False, True, False, True, False]


def test_groups_follow_in_the_order_of_the_policy() -> None:
    first, second = P.ClipByGlobalNorm(1.0, group="a"), P.ClipPerExample(1.0, group="b")
    plan = _plan([second, halve], [first, second, P.Observe("norm")], positions={id(second): 1})

    points = list(plan.single)
    single = [[type(insertion.effect) for insertion in own] for own in plan.single.values()]
    assert single == [[ReplaceTensor], [MeasureTensor]]
    assert [(group.action, list(group.points)) for group in plan.groups] == [(first, points[1:]), (second, points)]


def test_any_other_group_is_replaced_as_a_whole() -> None:
    action = _Reversed()
    (group,) = _plan([action], [action]).groups

    assert isinstance(group.effect, ReplaceGroup)
    assert len(group.points) == 2


def test_changed_values() -> None:
    plan = _plan([P.Observe("norm")], [halve], [P.ClipByGlobalNorm(1.0)], [])

    assert plan.changed() == set(list(plan.single)[1:3])


def test_two_actions_in_one_group() -> None:
    with pytest.raises(PolicyError, match="one action with one setting"):
        _plan([P.ClipByGlobalNorm(1.0)], [P.ClipByGlobalNorm(2.0)])


class _Reversed:
    kinds: frozenset[Kind] = frozenset(("gradient",))

    def at(self, site: Site) -> Insertion:
        return Insertion(self, ReplaceGroup("all", lambda _, tensors, __: tensors[::-1]), self.kinds)


def _plan(*answers: list[Any], positions: dict[int, int] | None = None) -> InsertionPlan:
    """Lower answers at gradient sites; the position of an action in the policy is 0 unless given."""
    graph = fx.Graph()
    nodes = [graph.placeholder(f"g{n}") for n in range(len(answers))]
    output = graph.output(tuple(nodes))
    points = [InsertionPoint(GRADIENT, node, output, n, output=n) for n, node in enumerate(nodes)]
    known = positions or {}
    return lower(
        (point, [Answered((known.get(id(action), 0),), insertion_at(action, GRADIENT)) for action in own])
        for point, own in zip(points, answers, strict=True)
    )
