"""Measuring in batches: several values by one operation, each as it was when it was made."""

from __future__ import annotations

import math
from collections import Counter

import pytest
import torch
from torch import Tensor, nn

import gradrewrite as gr
from gradrewrite.passes import CheckFinite, ClipByNorm, Observe
from gradrewrite.rewriting import record_packing

from models.small import Sines

EVERYWHERE = [gr.on("*", [Observe("norm", "zeros"), CheckFinite("record")])]


def targets(graph: gr.JointGraph) -> Counter[str]:
    return Counter(str(node.target) for node in graph.graph_module.graph.nodes)


@pytest.mark.long
@pytest.mark.parametrize(("size", "operations"), [(1 << 20, 0), (1200, 3), (400, 11), (1, 13)])
def test_a_batch_has_as_many_bytes_as_it_may_have(size: int, operations: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """12 values and a gradient of 400 bytes; those of the last batches are measured where records are packed."""
    policy = [gr.on("*", Observe("norm", "zeros"))]
    wanted = gr.transform(Sines(6, 100), policy)
    wanted().backward()
    monkeypatch.setattr(record_packing, "BATCH", size)
    model = gr.transform(Sines(6, 100), policy)
    graph = model.trace()
    model().backward()

    counts = targets(graph)
    assert counts["gradrewrite.pack.default"] == 2  # of the forward and of the backward
    assert counts["gradrewrite.measure.default"] == operations
    assert list(model.monitor.latest()) == list(wanted.monitor.latest())
    assert model.monitor.latest() == wanted.monitor.latest()


def test_records_come_in_the_order_of_the_sites(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(record_packing, "BATCH", 800)
    model = gr.transform(Sines(3, 100), gr.on("*", Observe("norm")))
    model().backward()
    sites = [site for site in map(str, model.explain().graphs[0].sites) if not site.endswith(("/sin", "/mul"))]
    wanted = [site for site in sites if f"norm@{site}" in model.monitor.latest()]

    assert [name.partition("@")[2] for name in model.monitor.latest()] == wanted
    assert len(wanted) == 7


def test_checks_that_skip_have_a_verdict(monkeypatch: pytest.MonkeyPatch) -> None:
    for size in (1, 1 << 20):
        monkeypatch.setattr(record_packing, "BATCH", size)
        model = gr.transform(nn.Linear(3, 2), gr.on("*", [CheckFinite("skip"), Observe("norm")]))
        optimizer = gr.guard(torch.optim.SGD(model.parameters(), lr=0.1), model)
        before = model.weight.detach().clone()
        model(torch.tensor([[1.0, math.inf, 1.0]])).sum().backward()
        optimizer.step()
        assert torch.equal(model.weight, before)
        optimizer.zero_grad()
        model(torch.ones(1, 3)).sum().backward()
        optimizer.step()
        assert not torch.equal(model.weight, before)
        assert model.monitor.skipped == 1


def test_what_an_input_was_before_the_forward_writes_to_it() -> None:
    class Writing(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.w = nn.Parameter(torch.ones(3))
            self.register_buffer("total", torch.zeros(3))

        def forward(self, x: Tensor) -> Tensor:
            h = gr.tap(self.w + x + self.total, "h")
            self.total.add_(torch.nan)
            x.mul_(torch.nan)
            return h.sum()

    model = gr.transform(Writing(), EVERYWHERE)
    model(torch.tensor([1.0, 0.0, 2.0])).backward()
    latest = model.monitor.latest()

    assert latest["nonfinite@data:x"] == 0.0
    assert latest["nonfinite@activation:h"] == 0.0
    assert latest["norm@activation:h"] == pytest.approx(math.sqrt(14.0))


def test_only_last_measurements_are_put_off() -> None:
    """The value that a clip reads and the value that it makes are measured apart."""
    model = gr.transform(Sines(1, 100), gr.on("error:h0", [Observe("max_abs"), ClipByNorm(0.5), Observe("max_abs")]))
    model().backward()
    latest = model.monitor.latest()

    assert latest["max_abs@error:h0"] == pytest.approx(1.0)
    assert latest["norm@error:h0"] == pytest.approx(10.0)
    assert latest["max_abs.2@error:h0"] == pytest.approx(0.05)
