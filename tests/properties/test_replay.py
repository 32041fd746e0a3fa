"""Replay of a graph: the values of eager execution, and the ops that made the first values that are not finite."""

from __future__ import annotations

import pytest
import torch
from hypothesis import event, given
from hypothesis import strategies as st
from torch import Tensor, fx

from gradrewrite.ir import markers
from gradrewrite.ir.replay_graph import ReplayGraph
from gradrewrite.replay.interpreter import replay
from gradrewrite.replay.step_snapshot import StepSnapshot
from gradrewrite.sites import Site

from models.random_graphs import Chain, chains, inputs_of

pytestmark = pytest.mark.pure


def marked(chain: Chain) -> tuple[ReplayGraph, list[fx.Node]]:
    """The graph of a chain with a marker behind each operation, whose number is that of the value."""
    gm, nodes = chain.graph()
    sites = {}
    for number in range(chain.num_inputs, chain.num_values):
        op = chain.ops[number - chain.num_inputs]
        sites[number] = Site("activation", f"/{op.name}", op=op.name, source=str(number))
        with gm.graph.inserting_after(nodes[number]):
            gm.graph.call_function(markers.mark_activation, (nodes[number], number))
    gm.recompile()
    return ReplayGraph(gm, sites, {}, {}, {}, {}, (), frozenset(), is_random=False), nodes


def is_finite(value: Tensor) -> bool:
    return bool(torch.isfinite(value).all())


def leads_out(chain: Chain, bad: set[int]) -> set[int]:
    """The bad values from which an unbroken chain of bad values leads to what is returned."""
    found = {n for n in chain.outputs if n in bad}
    for number in reversed(range(chain.num_inputs, chain.num_values)):
        if number in found:
            found |= {n for n in chain.ops[number - chain.num_inputs].operands if n in bad}
    return found


@given(chains(max_ops=12), st.integers(0, 2**16))
def test_values_and_roots_are_those_of_eager_execution(chain: Chain, seed: int) -> None:
    inputs = inputs_of(chain, seed)
    values = chain.values(inputs)
    replay_graph, _ = marked(chain)
    state = torch.get_rng_state()
    result = replay(StepSnapshot(replay_graph, inputs, [t._version for t in inputs]), {})

    assert torch.equal(torch.get_rng_state(), state)
    assert [int(seen.site.source) for seen in result.seen] == list(range(chain.num_inputs, chain.num_values))
    for seen in result.seen:
        value = values[int(seen.site.source)]
        finite = value[value.isfinite()].abs()
        assert seen.percent == pytest.approx(100.0 * (~value.isfinite()).sum().item() / value.numel())
        wanted = (float(finite.min()), float(finite.max())) if finite.numel() else (float("nan"), float("nan"))
        assert (seen.smallest, seen.largest) == pytest.approx(wanted, rel=0, abs=0, nan_ok=True)
    bad = {n for n, value in enumerate(values) if not is_finite(value)}
    roots = {
        n for n in leads_out(chain, bad) if not any(read in bad for read in chain.ops[n - chain.num_inputs].operands)
    }
    event(f"{min(len(roots), 3)} roots")
    assert [(root.op, root.source) for root in result.roots] == [
        (f"/{chain.ops[n - chain.num_inputs].name}", str(n)) for n in sorted(roots)
    ]
