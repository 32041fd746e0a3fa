from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
import torch
from torch import Tensor, fx

import gradrewrite.passes as P
from gradrewrite.errors import PolicyError
from gradrewrite.policy.rules import Answered
from gradrewrite.policy.sampling import Omitted, sampled
from gradrewrite.rewriting.insertion_points import InsertionPoint
from gradrewrite.rewriting.lowering import (
    Average,
    InsertionPlan,
    Measure,
    Replace,
    ReplaceGroup,
    ScaleGroup,
    ScaleParameter,
    WeighExamples,
    is_in_units,
    lower,
    lower_action,
    lower_single,
)
from gradrewrite.sites import Kind, Site

pytestmark = pytest.mark.pure

ERROR, GRADIENT, STEP = (
    Site(kind, "w", shape=(2, 3), dtype=torch.float32, device=torch.device("cpu"))
    for kind in ("error", "gradient", "step")
)


def halve(g: Tensor) -> Tensor:
    return g / 2


def add_weight(g: Tensor, weight: Tensor) -> Tensor:
    return g + weight


@pytest.mark.parametrize(
    ("action", "site", "wanted"),
    [
        (P.ClipByNorm(1.0), ERROR, Replace),
        (P.ClipByValue(1.0), GRADIENT, Replace),
        (halve, ERROR, Replace),
        (P.CheckFinite(), ERROR, Measure),
        (P.Observe("norm"), STEP, Measure),
        (P.Observe("norm", "noise_scale"), GRADIENT, Replace),
        (P.AllReduce(), GRADIENT, Average),
        (P.DecayWeights(0.1), STEP, ScaleParameter),
    ],
)
def test_insertion_of_an_action(action: Any, site: Site, wanted: type) -> None:
    found = lower_action(action, site)

    assert type(found) is wanted
    assert found.action is action  # as the policy answered it, for edits and messages


def test_further_arguments() -> None:
    of_weight, of_gradient = lower_action(add_weight, GRADIENT), lower_action(halve, GRADIENT)
    of_examples = lower_action(P.Keep("second_moment"), GRADIENT)

    assert isinstance(of_weight, Replace)
    assert of_weight.takes_value
    assert of_weight.examples is None
    assert isinstance(of_gradient, Replace)
    assert not of_gradient.takes_value
    assert of_gradient.examples is None
    assert isinstance(of_examples, Replace)
    assert not of_examples.takes_value
    assert of_examples.examples is not None


def test_statistics_and_consequence() -> None:
    check, observe = lower_action(P.CheckFinite(on_failure="skip"), ERROR), lower_action(P.Observe("norm"), ERROR)

    assert isinstance(check, Measure)
    assert check.fails == "skip"
    assert list(check.statistics.values()) == ["nonfinite"]
    assert isinstance(observe, Measure)
    assert observe.fails is None
    assert dict(observe.statistics) == {"norm": "norm"}


def test_equal_actions_have_one_key() -> None:
    keys = [lower_action(P.ClipByNorm(bound), ERROR).key for bound in (1.0, 1.0, 2.0)]

    assert keys[0] == keys[1] != keys[2]


def test_a_check_needs_no_unscaled_gradient() -> None:
    actions = [P.CheckFinite(), P.Observe("norm"), P.DecayWeights(0.1), halve]

    assert [is_in_units(lower_action(action, STEP)) for action in actions] == [False, True, False, True]
    assert [is_in_units(group) for group in _plan([P.ClipByGlobalNorm(1.0)]).groups] == [False]


def test_groups_follow_in_the_order_of_the_policy() -> None:
    first, second = P.ClipByGlobalNorm(1.0, group="a"), P.ClipPerExample(1.0, group="b")
    plan = _plan([second, halve], [first, second, P.Observe("norm")], positions={id(second): 1})

    points = list(plan.single)
    assert [[type(one) for one in own] for own in plan.single.values()] == [[Replace], [Measure]]
    assert [(type(group), group.action, list(group.points)) for group in plan.groups] == [
        (ScaleGroup, first, points[1:]),
        (WeighExamples, second, points),
    ]


def test_any_other_group_is_replaced_as_a_whole() -> None:
    action = _Reversed()
    (group,) = _plan([action], [action]).groups

    assert isinstance(group, ReplaceGroup)
    assert len(group.points) == 2


def test_changed_values() -> None:
    plan = _plan([P.Observe("norm")], [halve], [P.ClipByGlobalNorm(1.0)], [])

    assert plan.changed() == set(list(plan.single)[1:3])


def test_two_actions_in_one_group() -> None:
    with pytest.raises(PolicyError, match="one bound, one norm type and one log"):
        _plan([P.ClipByGlobalNorm(1.0)], [P.ClipByGlobalNorm(2.0)])


class _Reversed:
    kinds: frozenset[Kind] = frozenset(("gradient",))
    has_units = False
    group = "all"

    def apply_group(self, tensors: list[Tensor]) -> list[Tensor]:
        return tensors[::-1]


def _plan(*answers: list[Any], positions: dict[int, int] | None = None) -> InsertionPlan:
    """Lower answers at gradient sites; the position of an action in the policy is 0 unless given."""
    graph = fx.Graph()
    nodes = [graph.placeholder(f"g{n}") for n in range(len(answers))]
    output = graph.output(tuple(nodes))
    points = [InsertionPoint(GRADIENT, node, output, n, output=n) for n, node in enumerate(nodes)]
    known = positions or {}
    return lower(
        (point, [Answered((known.get(id(action), 0),), action, "*") for action in own])
        for point, own in zip(points, answers, strict=True)
    )


@pytest.mark.parametrize(
    ("actions", "wanted"),
    [
        ([P.Observe("norm", "zeros"), P.ClipByNorm(1.0)], [["zeros"]]),
        ([P.Observe("norm", every=5), P.ClipByNorm(1.0)], [[]]),
        ([P.Observe("norm"), P.Observe("norm", "max_abs"), P.ClipByNorm(1.0, log=True)], [[], []]),
        ([P.Observe("max_abs", "min"), P.ClipByValue(1.0, log=True)], [["min"]]),
        ([P.Observe("max_abs", "min"), P.ClipByValue(1.0)], [["max_abs", "min"]]),
        ([P.Observe("nonfinite", "nan"), P.CheckFinite("record")], [["nan"], ["nonfinite"]]),
        ([P.Observe("norm", every=5), P.Observe("norm")], [[], ["norm"]]),
        ([P.Observe("norm"), P.Observe("norm", every=5)], [["norm"], ["norm"]]),
        ([P.Observe("norm"), P.ClipByNorm(1.0, norm_type=1)], [["norm"]]),
        ([P.Observe("norm"), P.NanToNum(), P.ClipByNorm(1.0)], [["norm"]]),
        ([P.ClipByNorm(1.0), P.Observe("norm")], [["norm"]]),
    ],
)
@pytest.mark.parametrize("is_left_out", [False, True])
def test_what_is_recorded_twice_is_measured_once(
    actions: Sequence[Any], wanted: list[list[str]], is_left_out: bool
) -> None:
    answers = tuple(Answered((0,), action, "error:*") for action in actions)
    if is_left_out:  # names of records do not depend on what a step measures
        answers = sampled(answers, ERROR, "nothing") or answers
    insertions = lower_single(answers, ERROR)
    found = [
        list(one.names if isinstance(one, Omitted) else one.statistics)
        for one in insertions
        if isinstance(one, Measure | Omitted)
    ]

    assert found == wanted
    given = {name for a in actions if isinstance(a, P.Observe) for name in a.statistics}
    if isinstance(last := insertions[-1], Replace):
        assert last.observed == given.difference(*found)
