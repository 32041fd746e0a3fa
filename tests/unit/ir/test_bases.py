"""Nodes whose values have the same elements."""

from __future__ import annotations

import pytest
import torch
from torch import fx
from torch._subclasses.fake_tensor import FakeTensorMode

from gradrewrite.ir import markers
from gradrewrite.ir.bases import base_of

pytestmark = pytest.mark.pure
aten = torch.ops.aten


def chain(*calls: tuple[object, ...]) -> list[fx.Node]:
    """The nodes of operations, each on the result of the one before, on a tensor ``[2, 3, 4]``."""
    graph, mode = fx.Graph(), FakeTensorMode()
    nodes = [graph.placeholder("x")]
    with mode:
        nodes[0].meta["val"] = torch.empty(2, 3, 4)
        for target, *args in calls:
            nodes.append(graph.call_function(target, (nodes[-1], *args)))
            nodes[-1].meta["val"] = target(nodes[-2].meta["val"], *args)
    return nodes


def test_views_have_the_elements_of_their_base() -> None:
    x, *_, last = chain(
        (aten.view.default, [6, 4]),
        (markers.mark_error, 0),
        (aten.t.default,),
        (aten.unsqueeze.default, 0),
        (aten.permute.default, [2, 0, 1]),
    )
    assert base_of(last, stop=()) is x


@pytest.mark.parametrize(
    "call",
    [
        (aten.expand.default, [5, 2, 3, 4]),
        (aten.select.int, 0, 0),
        (aten.slice.Tensor, 0, 0, 1),
        (aten.neg.default,),
        (aten.clone.default,),
        (aten._to_copy.default,),
    ],
)
def test_others_do_not(call: tuple[object, ...]) -> None:
    _, other, last = chain(call, (aten.unsqueeze.default, 0))
    assert base_of(last, stop=()) is other


def test_an_error_that_is_going_to_be_changed_is_a_base() -> None:
    x, view, marker, last = chain((aten.view.default, [6, 4]), (markers.mark_error, 0), (aten.t.default,))
    assert base_of(last, stop={marker}) is marker
    assert base_of(last, stop={view}) is view
    assert base_of(last, stop=()) is x
