"""Rolled Python loops, compiled: against the unrolled loop op by op, and the size of what is compiled."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import gradrewrite as gr
from gradrewrite.passes import CheckFinite, ClipByNorm, Observe

from models.python_loops import Cell, Decoder, Masked, RungeKutta, Simulator

pytestmark = pytest.mark.inductor
POLICY = [
    gr.on("error:*", ClipByNorm(1e-3)),
    gr.on("activation:*/*", Observe("norm")),
    gr.on("error:*/*", CheckFinite("record")),
]


def ran(cls: Any, dtype: torch.dtype, *, loops: Any, compiled: bool) -> tuple[Any, ...]:
    torch.manual_seed(0)
    torch.set_default_dtype(dtype)
    try:
        model = gr.transform(cls(), POLICY, loops=loops)
        if compiled:
            model.compile()
        loss = model(*(x.to(dtype) if x.is_floating_point() else x for x in cls.inputs(8)))
        loss.backward()
        assert not loops or not any(loop.reason for loop in model.explain().graphs[0].loops)
        return loss.detach(), [p.grad for p in model.parameters()], model.monitor.latest()
    finally:
        torch.set_default_dtype(torch.float32)


@pytest.mark.parametrize(
    ("cls", "dtype"),
    [
        (Cell, torch.float64),
        pytest.param(Decoder, torch.float32, marks=pytest.mark.slow),
        pytest.param(Simulator, torch.float32, marks=pytest.mark.slow),
        pytest.param(Masked, torch.float64, marks=pytest.mark.slow),
    ],
)
def test_compiled_loops(cls: Any, dtype: torch.dtype) -> None:
    tolerance = 1e-10 if dtype == torch.float64 else 1e-6
    loss, gradients, records = ran(cls, dtype, loops="rolled", compiled=True)
    loss2, gradients2, records2 = ran(cls, dtype, loops=None, compiled=False)

    torch.testing.assert_close(loss, loss2, rtol=tolerance, atol=tolerance)
    torch.testing.assert_close(gradients, gradients2, rtol=tolerance, atol=tolerance)
    assert set(records) == set(records2)
    for name in records:
        if not name.startswith("clipped@"):  # a norm may be a bound but for rounding
            assert records[name] == pytest.approx(records2[name], rel=1e-5, abs=1e-8), name


@pytest.mark.parametrize("cls", [Cell, Decoder, Simulator, RungeKutta], ids=lambda cls: cls.__name__)
def test_graphs_do_not_grow_with_the_number_of_iterations(cls: Any) -> None:
    torch.set_default_dtype(torch.float64)
    try:
        model = gr.transform(cls(), gr.on("error:*", ClipByNorm(1e-3)), loops="rolled")
        sizes = [len(model.trace(*cls.inputs(length)).graph_module.graph.nodes) for length in (12, 20)]
    finally:
        torch.set_default_dtype(torch.float32)
    assert sizes[0] == sizes[1]
