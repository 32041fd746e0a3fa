"""What nodes of a joint graph belong to: lanes, ops, modules; where sites stand."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable

import pytest
import torch
from torch import nn

import gradrewrite as gr
from gradrewrite.ir.joint_graph import JointGraph
from gradrewrite.passes import CheckFinite, ClipByGlobalNorm, ClipByValue

from models.graphs import EACH, Three, live_thresholds, recurrent, three_layers, transformer

Make = Callable[[], JointGraph]


def names(graph: JointGraph) -> list[str]:
    return [node.name for node in graph.graph_module.graph.nodes if node.op != "output"]


@pytest.mark.long
@EACH
def test_every_node_belongs_somewhere(make: Make) -> None:
    graph = make()
    origins = graph.provenance.origins

    assert set(names(graph)) <= set(origins)
    assert all(origins[name].order >= 0 for name in names(graph) if name not in graph.record_nodes)
    assert {origins[name].op for name in graph.record_nodes} <= {"records"}


@pytest.mark.long
@EACH
def test_what_was_inserted_is_what_the_edits_and_carriers_say(make: Make) -> None:
    graph = make()
    assert graph.before is not None

    inserted = Counter(names(graph)) - Counter(names(graph.before))
    assert inserted == Counter([name for edit in graph.edits for name in edit.nodes] + list(graph.record_nodes))


@pytest.mark.broad
@EACH
def test_the_forward_is_in_order_and_keeps_torch_s_modules(make: Make) -> None:
    graph = make().before
    assert graph is not None
    origins = graph.provenance.origins
    calls = [n for n in graph.graph_module.graph.nodes if n.op == "call_function"]
    forward = [n for n in calls if origins[n.name].lane == "forward" and not n.name.startswith("copy_")]

    orders = [origins[n.name].order for n in forward]
    assert orders == sorted(orders)
    stacks = [n.meta["nn_module_stack"] for n in forward]
    depths = [len([path for path, _ in stack.values() if "." in path or "_modules" in path]) for stack in stacks]
    assert [len(origins[n.name].calls) for n in forward] == depths
    assert all("fwd_nn_module_stack" not in n.meta for n in forward)


@EACH
def test_a_parameter_s_gradient_is_made_by_its_module(make: Make) -> None:
    graph = make().before
    assert graph is not None
    origins = graph.provenance.origins
    returned = graph.graph_module.graph.output_node().args[0]
    assert isinstance(returned, tuple | list)
    pairs = [(label, node) for label, node in zip(graph.provenance.outputs, returned, strict=True) if node is not None]

    assert pairs[0][0] == "output:0"
    for label, node in pairs[1:]:
        kind, _, name = label.partition(":")
        assert kind == "gradient"
        assert origins[node.name].module == name.rpartition(".")[0]
        assert origins[node.name].lane == "backward"


def test_errors_stand_beside_the_op_that_made_the_value() -> None:
    graph = three_layers()
    anchors = {str(site): anchor for site, anchor in graph.provenance.anchors.items()}
    op_at = {o.order: (o.module, o.op) for o in graph.provenance.origins.values() if o.lane == "forward" and not o.name}

    assert op_at[anchors["error:second"].order] == ("second", "linear")
    assert op_at[anchors["activation:second"].order] == ("second", "linear")
    assert op_at[anchors["error:/tanh"].order] == ("", "tanh")
    assert anchors["error:/tanh"].order < anchors["error:second"].order < anchors["error:/tanh#1"].order
    # the node that holds the error is of the backward of what reads the value
    assert graph.provenance.origins[anchors["error:second"].node].op == "tanh"
    assert graph.provenance.origins[anchors["gradient:second.weight"].node].module == "second"


def test_a_sum_of_errors_belongs_to_the_one_that_comes_last() -> None:
    class Residual(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.lin = nn.Linear(3, 3)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            h = self.lin(x)
            return (h + torch.sigmoid(h)).sum()

    graph = gr.transform(Residual(), []).trace(torch.ones(2, 3))
    (anchor,) = [a for s, a in graph.provenance.anchors.items() if str(s) == "error:lin"]
    (node,) = [n for n in graph.graph_module.graph.nodes if n.name == anchor.node]

    assert str(node.target) == "aten.add.Tensor"
    assert graph.provenance.origins[node.name].op == "sigmoid"


@pytest.mark.slow
def test_runs_of_one_module_are_counted() -> None:
    origins = recurrent().provenance.origins.values()

    assert {call for o in origins for call in o.calls if call[0] == "step"} == {("step", n) for n in range(40)}
    assert {o.calls for o in origins if ("step.read", 7) in o.calls} == {(("step", 7), ("step.read", 7))}


def test_placeholders_say_what_they_are() -> None:
    origins = three_layers().provenance.origins
    comes_in = {(o.op, o.name) for o in origins.values() if o.op in ("parameter", "input", "outside")}

    assert ("parameter", "second.bias") in comes_in
    assert ("input", "x") in comes_in
    assert ("outside", "") in comes_in
    first = next(o for o in origins.values() if o.name == "third.weight")
    assert first.calls == (("third", 0),)


def test_buffers_checkpoints_and_checks() -> None:
    class Normed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner, self.norm = Three(), nn.BatchNorm1d(4)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            x = self.norm(x)
            loss: torch.Tensor = torch.utils.checkpoint.checkpoint(self.inner, x, use_reentrant=False)
            return loss

    policy = [gr.on("error:inner.*", ClipByValue(1.0)), gr.on("gradient:*", CheckFinite())]
    graph = gr.transform(Normed(), policy).trace(torch.ones(2, 4))
    origins = graph.provenance.origins

    assert ("buffer", "norm.running_mean") in {(o.op, o.name) for o in origins.values()}
    assert ("inner", 0) in {call for o in origins.values() for call in o.calls}
    counters = [name for name in graph.record_nodes if name.startswith("measure")]
    assert len(counters) == 2  # what comes in and goes out, before the buffers are written; gradients are in the pack
    assert set(counters) <= set(names(graph))


def test_constants_and_updates_of_buffers_stand_where_they_are_used() -> None:
    origins = live_thresholds().provenance.origins
    constants = {o.op for name, o in origins.items() if name.startswith("_tensor_constant")}
    updates = [o for name, o in origins.items() if name.startswith("copy_")]

    assert constants
    assert "square" not in constants  # not the last op
    assert "sum" not in constants
    assert updates
    assert {(o.lane, o.module) for o in updates} == {("forward", "norm")}


def test_shares_of_a_global_clip() -> None:
    graph = gr.transform(Three(), gr.on("gradient:*", ClipByGlobalNorm(1.0))).trace(torch.ones(2, 4))
    sizes = [len(edit.nodes) for edit in graph.edits]

    assert len(sizes) == 6
    assert len(set(sizes[1:])) == 1
    assert sizes[0] > sizes[1]  # the total norm stands with the first
    targets = {node.name: str(node.target) for node in graph.graph_module.graph.nodes}
    for edit in graph.edits:  # each member has its own norm and scaling
        own = Counter(targets[name] for name in edit.nodes)
        assert own["aten.sum.default"] >= 1
        assert own["aten.where.self"] >= 1
    assert sum(targets[name] == "aten.sum.default" for name in graph.edits[0].nodes) == 2


def test_a_graph_without_edits_means_the_same_before_and_after() -> None:
    graph = transformer()
    assert graph.before is not None

    assert graph.before.provenance is graph.provenance
    assert gr.transform(Three(), []).trace(torch.ones(2, 4)).diff() == "no edits: the graph is as it was"
