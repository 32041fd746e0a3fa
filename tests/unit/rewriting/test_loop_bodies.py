"""Bodies of loops, cut into forward, backward and what is computed behind the loop: against autograd."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, fx

from gradrewrite._compat import fake_tensors
from gradrewrite.ir import editing
from gradrewrite.ir.marked_loops import Loop, loop_backward, loop_forward
from gradrewrite.rewriting.loop_bodies import JointBody, LoopParts, partition, trace_body
from gradrewrite.rewriting.loop_calls import LoopCalls


def linear(h: Tensor, x: Tensor, w: Tensor, b: Tensor) -> tuple[Tensor, ...]:
    h = torch.tanh(h @ w.t() + x @ torch.relu(w) + b)
    return h, h


def gated(h: Tensor, c: Tensor, x: Tensor, w: Tensor, b: Tensor) -> tuple[Tensor, ...]:
    gate = torch.sigmoid(torch.addmm(b, x, w))
    c = gate * c + h.square().mean(-1, keepdim=True) * b.exp()
    return torch.sin(c * h), c, gate, c.sum(-1)


def unused(h: Tensor, x: Tensor, w: Tensor, b: Tensor) -> tuple[Tensor, ...]:
    return h * b, x * 2


def cut(body: JointBody) -> LoopParts:
    """Cut a body of a loop whose arguments are inputs of the graph."""
    return partition(body, body.graph.find_nodes(op="placeholder"), "aot_eager")


CASES: dict[str, tuple[Any, int]] = {"linear": (linear, 1), "gated": (gated, 2), "unused": (unused, 1)}


@pytest.mark.parametrize("is_reversed", [False, True])
@pytest.mark.parametrize("length", [1, 5])
@pytest.mark.parametrize("name", CASES)
def test_against_autograd(name: str, length: int, is_reversed: bool) -> None:
    cell, num_carries = CASES[name]
    loop = Loop(name, fx.symbolic_trace(cell), num_carries, 1, is_reversed, length)
    carries = [torch.randn(3, 4, dtype=torch.float64) for _ in range(num_carries)]
    tensors = [
        *carries,
        *(torch.randn(*s, dtype=torch.float64) for s in ((length, 3, 4), (4, 4), (4,))),
    ]
    wanted = list(range(len(tensors)))
    results = loop_forward(tensors, loop.key)
    tangents = [torch.randn_like(r) for r in results]
    gradients = loop_backward(tensors, tangents, wanted, loop.key)

    body = trace_body(loop, fake_tensors.fakes_of(tensors), wanted)
    editing.erase_markers(body.graph)
    calls = LoopCalls(cut(body))
    own, further, made = calls.split_forward(calls.forward(*tensors))
    found = calls.backward(*tangents, *tensors, *made)

    assert not further
    assert body.wanted == wanted
    for a, b in zip((*own, *found), (*results, *gradients), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-12, atol=1e-12)


def test_values_of_weights_alone_are_computed_once() -> None:
    loop = Loop("linear", fx.symbolic_trace(linear), 1, 1, False, 5)
    tensors = [torch.randn(*s) for s in ((3, 4), (5, 3, 4), (4, 4), (4,))]
    parts = cut(trace_body(loop, fake_tensors.fakes_of(tensors), range(4)))
    inside = {str(node.target) for node in parts.forward.body.graph.nodes}

    assert {str(node.target) for node in parts.hoisted.graph.nodes} >= {"aten.relu.default"}
    assert inside >= {"aten.tanh.default"}
    assert "aten.relu.default" not in inside


def test_gradients_of_weights_are_formed_behind_the_loop() -> None:
    loop = Loop("linear", fx.symbolic_trace(linear), 1, 1, False, 5)
    tensors = [torch.randn(*s) for s in ((3, 4), (5, 3, 4), (4, 4), (4,))]
    parts = cut(trace_body(loop, fake_tensors.fakes_of(tensors), range(4)))
    assert parts.backward is not None
    products = parts.backward.body.graph.find_nodes(op="call_function", target=torch.ops.aten.mm.default)

    assert len(products) == 2  # the errors of h and of x
