"""The graph after a rewrite: as if written by hand, untouched where nothing is asked, each insertion named once."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

import gradrewrite as gr
from gradrewrite.passes import ClipByGlobalNorm, ClipByValue, Scale
from gradrewrite.rewriting.joint import STAGES


def ops(graph: gr.JointGraph) -> list[str]:
    return [str(n.target) for n in graph.graph_module.graph.nodes if n.op == "call_function"]


def ops_nodes(graph: gr.JointGraph) -> list[Any]:
    return list(graph.graph_module.graph.nodes)


@pytest.mark.skipif(torch.__version__ < "2.13", reason="a hook inside a compiled model is applied elsewhere before")
def test_pair_rewritten_graph_is_that_of_the_model_written_by_hand() -> None:
    class ByHand(nn.Module):
        def __init__(self, plain: nn.Module) -> None:
            super().__init__()
            self.plain = plain

        def forward(self, x: Tensor) -> Tensor:
            h = self.plain[0](x)
            h.register_hook(lambda g: g.clamp_min(-0.5).clamp_max(0.5))
            return self.plain[2](self.plain[1](h))

    plain, x = nn.Sequential(nn.Linear(4, 3), nn.Tanh(), nn.Linear(3, 2)), torch.randn(2, 4)
    ours = gr.transform(plain, gr.on("error:0", ClipByValue(0.5))).trace(x)
    theirs = gr.transform(ByHand(plain), []).trace(x)

    assert ops(ours) == ops(theirs)
    assert ops(ours) != ops(ours.before)


@pytest.mark.long
def test_untouched_graph_is_that_without_probes() -> None:
    """A policy that never answers leaves the ops that torch itself traces."""
    from torch._dynamo.backends.common import aot_autograd
    from torch._functorch.aot_autograd import make_boxed_func  # type: ignore[attr-defined]
    from torch._functorch.partitioners import default_partition
    from torch._inductor.decomposition import select_decomp_table

    plain, x = nn.Sequential(nn.Linear(4, 3), nn.ReLU(inplace=True), nn.LayerNorm(3)), torch.randn(2, 4)
    joint: list[list[str]] = []

    def partition(gm: Any, *args: Any, **kwargs: Any) -> Any:
        joint.append([str(n.target) for n in gm.graph.nodes if n.op == "call_function"])
        return default_partition(gm, *args, **kwargs)

    backend = aot_autograd(
        fw_compiler=lambda g, _: make_boxed_func(g.forward),
        partition_fn=partition,
        decompositions=select_decomp_table(),
    )
    torch.compile(plain, backend=backend)(x).sum().backward()
    graph = gr.transform(plain, lambda site: None).trace(x)

    assert ops(graph) == joint[0]
    assert ops(graph.before) == joint[0]
    assert not graph.edits


def test_edits_name_inserted_nodes_once() -> None:
    policy = [
        gr.on("error:*", ClipByValue(1.0, log=True)),
        gr.on("gradient:*", [Scale(2.0), ClipByGlobalNorm(1.0)]),
        gr.on("error:0", lambda g: g),
    ]
    graph = gr.transform(nn.Sequential(nn.Linear(4, 3), nn.Tanh(), nn.Linear(3, 2)), policy).trace(torch.randn(2, 4))
    kinds = [f"{e.site.kind} {type(e.action).__name__}" for e in graph.edits]
    inserted = [n for e in graph.edits for n in e.nodes] + list(graph.record_nodes)
    names = {n.name for n in graph.graph_module.graph.nodes}

    assert {k: kinds.count(k) for k in kinds} == {
        "error ClipByValue": 3,
        "error function": 1,
        "gradient Scale": 4,
        "gradient ClipByGlobalNorm": 4,
    }
    assert len(inserted) == len(set(inserted))
    assert names - {n.name for n in graph.before.graph_module.graph.nodes} <= set(inserted)
    assert set(inserted) <= names
    assert len(names) == len(ops_nodes(graph.before)) + len(inserted)
    order = [n.name for n in graph.graph_module.graph.nodes]
    assert all(list(e.nodes) == sorted(e.nodes, key=order.index) for e in graph.edits)


def test_the_log_has_the_graph_after_each_stage(caplog: pytest.LogCaptureFixture) -> None:
    net = nn.Sequential(nn.Linear(2, 2), nn.Tanh())
    model = gr.transform(net, [gr.on("error:*", Scale(2.0)), gr.on("gradient:*", ClipByGlobalNorm(1.0))])
    with caplog.at_level("DEBUG", logger="gradrewrite.rewriting.joint"):
        model.trace(torch.zeros(1, 2))
    own = (r.args for r in caplog.records if r.name == "gradrewrite.rewriting.joint")
    texts = {str(args[0]): str(args[1]) for args in own if isinstance(args, tuple)}

    assert list(texts) == [name for name, _ in STAGES]
    assert "linalg_vector_norm" not in texts["singles"]
    assert texts["ask"] != texts["singles"] != texts["groups"] != texts["pack"]
    assert "mark_error" in texts["saved"]
    assert "mark_error" not in texts["pack"]
