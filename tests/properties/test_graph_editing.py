"""The functions that edit a graph, on random small graphs: lint passes, values are right, inverses undo."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, fx

from gradrewrite._compat import make_fx
from gradrewrite.ir import editing, markers

from models.random_graphs import SIZE, Chain, chains, inputs_of

pytestmark = pytest.mark.pure

SEED = st.integers(0, 2**16)
FUNCTIONS: dict[str, Callable[[Tensor, Tensor], list[Tensor]]] = {
    "one": lambda a, b: [a * 2 - b],
    "two": lambda a, b: [a + b, (a * b).sum()],
    "clip": lambda a, b: [torch.where(b > 0.5, a.clamp(-1, 1), a)],
    "argument": lambda a, b: [b, a.neg()],
}


def run(gm: fx.GraphModule, inputs: Sequence[Tensor]) -> list[Tensor]:
    gm.graph.lint()
    gm.recompile()
    return list(gm(*inputs))


def assert_equal(got: Sequence[Tensor], wanted: Sequence[Tensor]) -> None:
    assert len(got) == len(wanted)
    for a, b in zip(got, wanted, strict=True):
        torch.testing.assert_close(a, b, rtol=0, atol=0, equal_nan=True)


def text_of(gm: fx.GraphModule) -> str:
    """The graph as text; the node that holds has a new number each time."""
    return re.sub(r"hold_default(_\d+)?", "hold_default", str(gm.graph))


def times(tensor: Tensor) -> Callable[[Tensor], list[Tensor]]:
    return lambda g: [g * tensor]


def two_of(data: st.DataObject, chain: Chain) -> tuple[int, int]:
    value = st.integers(0, chain.num_values - 1)
    return data.draw(value, label="first"), data.draw(value, label="second")


@given(chains(), SEED, st.sampled_from(sorted(FUNCTIONS)), st.data())
def test_splice_computes_the_function_and_changes_nothing_else(
    chain: Chain, seed: int, name: str, data: st.DataObject
) -> None:
    inputs, fn = inputs_of(chain, seed), FUNCTIONS[name]
    values = chain.values(inputs)
    gm, nodes = chain.graph()
    a, b = two_of(data, chain)
    position = data.draw(st.integers(0, len(chain.outputs) - 1), label="output")
    before = set(gm.graph.nodes)
    traced = make_fx.trace(fn, [nodes[a].meta["val"], nodes[b].meta["val"]])
    results, new = editing.splice(traced, gm.graph, [nodes[a], nodes[b]], gm.graph.output_node(), "is_backward")
    assert new == [node for node in gm.graph.nodes if node not in before]
    assert all(node.meta["partitioner_tag"] == "is_backward" for node in new)
    assert_equal(run(gm, inputs), [values[n] for n in chain.outputs])
    for result, wanted in zip(results, fn(values[a], values[b]), strict=True):
        assert result.meta["val"].shape == wanted.shape
        editing.replace_output(gm.graph, position, result)
        expected = [values[n] for n in chain.outputs]
        expected[position] = wanted
        assert_equal(run(gm, inputs), expected)


@given(chains(), SEED, st.lists(st.integers(0, 100), min_size=1, max_size=4))
def test_what_is_held_is_returned_last_and_hold_last_is_the_inverse_of_release(
    chain: Chain, seed: int, held: list[int]
) -> None:
    inputs = inputs_of(chain, seed)
    values, numbers = chain.values(inputs), [n % chain.num_values for n in held]
    gm, nodes = chain.graph()
    plain, released = str(gm.graph), set()
    editing.hold(gm.graph, [nodes[n] for n in numbers])
    holding = {text_of(gm)}
    for _ in range(2):
        assert_equal(run(gm, inputs), [values[n] for n in chain.outputs])
        assert editing.release(gm.graph) == len(numbers)
        released.add(text_of(gm))
        assert_equal(run(gm, inputs), [values[n] for n in (*chain.outputs, *numbers)])
        editing.hold_last(gm.graph, len(numbers))
        holding.add(text_of(gm))
    assert len(holding) == len(released) == 1
    assert editing.release(gm.graph) == len(numbers)
    assert editing.release(gm.graph) == 0
    assert str(gm.graph) != plain


@pytest.mark.long
@given(chains(), SEED, st.lists(st.sampled_from([0, 1, 2]), min_size=1, max_size=5), st.data())
def test_live_tensors_become_the_last_inputs(chain: Chain, seed: int, read: list[int], data: st.DataObject) -> None:
    inputs = inputs_of(chain, seed)
    live = [torch.full((SIZE,), 2.0), torch.tensor(-3.0), torch.arange(SIZE, dtype=torch.float32)]
    values = chain.values(inputs)
    gm, nodes = chain.graph()
    expected = [values[n] for n in chain.outputs]
    for which in read:
        position = data.draw(st.integers(0, len(chain.outputs) - 1), label="output")
        at = gm.graph.output_node().args[0][position]
        tensor = live[which]
        traced = make_fx.trace(times(tensor), [at.meta["val"]])
        (result,), _ = editing.splice(traced, gm.graph, [at], gm.graph.output_node(), "is_backward")  # type: ignore[list-item]
        editing.replace_output(gm.graph, position, result)
        expected[position] = expected[position] * tensor
    tensors = editing.live_tensors(gm.graph)
    assert [id(t) for t in tensors.values()] == [id(live[n]) for n in dict.fromkeys(read)]  # each is there once
    assert_equal(run(gm, inputs), expected)
    lifted = editing.lift_live(gm)
    assert not gm.graph.find_nodes(op="get_attr")
    assert [node.name for node in gm.graph.find_nodes(op="placeholder")][: chain.num_inputs] == [
        node.name for node in nodes[: chain.num_inputs]
    ]
    assert {name for name, _ in lifted} == set(tensors)
    assert all(fake.shape == tensors[name].shape for name, fake in lifted)
    # placeholders are put behind the last one, so in the order in which they were lifted
    assert_equal(run(gm, [*inputs, *(tensors[name] for name, _ in lifted)]), expected)


@given(chains(), SEED, st.lists(st.tuples(st.integers(0, 100), st.booleans()), max_size=6))
def test_erasing_markers_leaves_the_graph_as_it_was(chain: Chain, seed: int, marked: list[tuple[int, bool]]) -> None:
    inputs = inputs_of(chain, seed)
    gm, nodes = chain.graph()
    plain = str(gm.graph)
    for number, (at, is_error) in enumerate(marked):
        node = nodes[at % chain.num_values]
        last_input = nodes[chain.num_inputs - 1]
        with gm.graph.inserting_after(node if node.op != "placeholder" else last_input):
            marker = gm.graph.call_function(markers.mark_error if is_error else markers.mark_activation, (node, number))
        if is_error:
            node.replace_all_uses_with(marker, delete_user_cb=lambda user, m=marker: user is not m)
    gm.graph.lint()
    assert (str(gm.graph) != plain) == bool(marked)
    editing.erase_markers(gm.graph)
    assert str(gm.graph) == plain
    assert_equal(run(gm, inputs), [chain.values(inputs)[n] for n in chain.outputs])


@given(chains(), SEED)
def test_a_copy_is_not_reached_by_later_edits(chain: Chain, seed: int) -> None:
    inputs = inputs_of(chain, seed)
    gm, nodes = chain.graph()
    copy = editing.copy_of(gm)
    assert [n.name for n in copy.graph.nodes] == [n.name for n in gm.graph.nodes]
    editing.replace_output(gm.graph, 0, nodes[0])
    editing.hold(gm.graph, [nodes[0]])
    values = chain.values(inputs)
    assert_equal(run(copy, inputs), [values[n] for n in chain.outputs])
