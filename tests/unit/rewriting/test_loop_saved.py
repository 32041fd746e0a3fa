"""Saved values of one iteration, in pairs of graphs made by hand."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, fx

from gradrewrite.rewriting.loop_saved import save_less, saved_nodes

pytestmark = pytest.mark.pure
aten = torch.ops.aten
Made = dict[str, fx.Node]


def graph_of(inputs: list[str], ops: list[tuple[str, Any, tuple[Any, ...]]], outputs: list[str]) -> fx.GraphModule:
    """Return a graph; in the arguments, names stand for nodes."""
    graph, made = fx.Graph(), {}
    for name in inputs:
        made[name] = graph.placeholder(name)
    for name, target, args in ops:
        given = tuple(made[arg] if isinstance(arg, str) else arg for arg in args)
        made[name] = graph.create_node("call_function", target, given, name=name)
    graph.output(tuple(made[name] for name in outputs))
    for node in graph.nodes:
        node.meta["val"] = torch.zeros(2, 3)
    return fx.GraphModule({}, graph)


def names(nodes: list[fx.Node]) -> list[str]:
    return [node.name for node in nodes]


def run_both(forward: fx.GraphModule, backward: fx.GraphModule, saved: list[str], num_tangents: int) -> Any:
    """Run a forward, then the backward on what is saved."""
    values: dict[str, Tensor] = {}
    generator = torch.Generator().manual_seed(0)
    inputs = [torch.rand(2, 3, generator=generator) for _ in forward.graph.find_nodes(op="placeholder")]

    class Run(fx.Interpreter):
        def run_node(self, n: fx.Node) -> Any:
            values[n.name] = super().run_node(n)
            return values[n.name]

    Run(forward).run(*inputs)
    tangents = [torch.rand(2, 3, generator=generator) for _ in range(num_tangents)]
    backward.graph.lint()
    backward.recompile()
    return backward(*(values[name] for name in saved), *tangents)


def less(forward: fx.GraphModule, backward: fx.GraphModule, num_results: int, num_carries: int = 1) -> list[str]:
    """Save less; return the names of what is saved then. The results of the backward stay as they are."""
    before = saved_nodes(forward, backward, 1)
    wanted = run_both(forward, backward, names(before), 1)
    placeholders = forward.graph.find_nodes(op="placeholder")
    results = list(forward.graph.output_node().args[0])[:num_results]
    carried = list(zip(placeholders[:num_carries], results, strict=False))
    after = save_less(forward, backward, before, carried, results, placeholders[num_carries:])

    found = run_both(forward, backward, names(after), 1)
    assert all(map(torch.equal, found, wanted))
    return names(after)


@pytest.mark.parametrize("reads_x", [False, True])
def test_a_result_that_the_backward_computes_again_is_read_from_the_stack(reads_x: bool) -> None:
    forward = graph_of(
        ["x", "w"],
        [("tanh", aten.tanh.default, ("x",)), ("mul", aten.mul.Tensor, ("tanh", "w"))],
        ["tanh", "x", "mul"],
    )
    backward = graph_of(
        ["x", "mul", "tangent"],
        [
            ("tanh", aten.tanh.default, ("x",)),
            ("first", aten.mul.Tensor, ("mul", "tanh")),
            ("second", aten.mul.Tensor, ("first", "tangent")),
            ("third", aten.add.Tensor, ("second", "x" if reads_x else "tangent")),
        ],
        ["third"],
    )

    assert less(forward, backward, 1) == ["x"] * reads_x + ["tanh", "w"]
    assert next(n.name for n in backward.graph.nodes if n.op == "call_function") == "mul_computed_again"


def test_names_of_copies_are_like_no_others() -> None:
    """The forward has ``tanh`` and ``tanh_1``; a copy of the first one is none of the second."""
    forward = graph_of(
        ["x", "w"],
        [
            ("tanh", aten.tanh.default, ("w",)),
            ("tanh_1", aten.sin.default, ("x",)),
            ("mul_1", aten.mul.Tensor, ("tanh_1", "tanh")),
        ],
        ["tanh_1", "x", "tanh", "mul_1"],
    )
    backward = graph_of(
        ["x", "tanh", "mul_1", "tangent"],
        [
            ("first", aten.mul.Tensor, ("mul_1", "tanh")),
            ("second", aten.add.Tensor, ("first", "tangent")),
            ("third", aten.add.Tensor, ("second", "x")),
        ],
        ["third"],
    )

    assert less(forward, backward, 1) == ["x", "w", "tanh_1"]


def test_a_stack_that_nothing_else_needs_is_not_made_for_a_small_value() -> None:
    forward = graph_of(["x", "y"], [("ne", aten.ne.Scalar, ("x", 0.0))], ["y", "ne"])
    (ne,) = forward.graph.find_nodes(op="call_function", target=aten.ne.Scalar)
    ne.meta["val"] = torch.zeros(2, 3, dtype=torch.bool)
    backward = graph_of(["ne", "tangent"], [("mul", aten.mul.Tensor, ("ne", "tangent"))], ["mul"])

    assert less(forward, backward, 1) == ["ne"]


@pytest.mark.parametrize(
    ("target", "args"),
    [(aten.mm.default, ("w", "x")), (aten.as_strided.default, ("w", [2, 3], [3, 1])), (aten.cumsum.default, ("w", 0))],
)
def test_other_ops_are_saved(target: Callable[..., Tensor], args: tuple[Any, ...]) -> None:
    forward = graph_of(["x", "w"], [("made", target, args)], ["x", "made"])
    backward = graph_of(["made", "tangent"], [("mul", aten.mul.Tensor, ("made", "tangent"))], ["mul"])
    before = saved_nodes(forward, backward, 1)
    placeholders = forward.graph.find_nodes(op="placeholder")

    assert names(save_less(forward, backward, before, [(placeholders[0], placeholders[0])], [], placeholders)) == [
        "made"
    ]
