"""Saved tensors in code compiled for a GPU: narrower forms, and host memory."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

import gradrewrite as gr
from gradrewrite.passes import Offload, Store

from gpu.log import SimulatedGpu
from helpers import gradients_of


def mlp() -> tuple[nn.Module, Tensor]:
    torch.manual_seed(0)
    layers = [nn.Linear(64, 64), nn.Tanh(), nn.Linear(64, 64), nn.GELU(), nn.Linear(64, 64), nn.Tanh()]
    return nn.Sequential(*layers), torch.randn(32, 64)


def assert_close(model: nn.Module, other: nn.Module, *, rtol: float, atol: float) -> None:
    wanted = gradients_of(other)
    for name, got in gradients_of(model).items():
        want = wanted[name]
        assert got is not None
        assert want is not None
        torch.testing.assert_close(got.cpu(), want.cpu(), rtol=rtol, atol=atol)


def on_gpu(policy: Any) -> tuple[gr.RewrittenModule, Tensor]:
    plain, x = mlp()
    model = gr.transform(plain.cuda(), policy)
    model.compile()
    return model, x.cuda()


@pytest.mark.parametrize(("form", "share"), [("int8", 1e-4), ("bfloat16", 1e-2), ("float8_e4m3fn", 0.15)])
def test_forms(form: Any, share: float) -> None:
    """Gradients are those of the CPU, op by op; the simulated device truncates where the CPU rounds."""
    plain, x = mlp()
    reference = gr.transform(plain, gr.on("saved:*", Store(form)))
    model, x_there = on_gpu(gr.on("saved:*", Store(form)))
    reference(x).square().sum().backward()
    model(x_there).square().sum().backward()

    wanted = gradients_of(reference)
    for name, got in gradients_of(model).items():
        want = wanted[name]
        assert got is not None
        assert want is not None
        assert (got.cpu() - want).norm() <= share * want.norm()


def test_offload_keeps_gradients() -> None:
    """In pinned host memory nothing changes but the order of sums: other kernels are fused."""
    model, x = on_gpu(gr.on("saved:*", Offload()))
    other, _ = on_gpu([])
    for run in (model, other):
        run(x).square().sum().backward()
    assert {edit.action for edit in model.explain().graphs[0].edits} == {Offload()}
    assert_close(model, other, rtol=1e-5, atol=1e-6)


def test_offload_of_a_narrower_form() -> None:
    model, x = on_gpu(gr.on("saved:*", [Store("int8"), Offload()]))
    other, _ = on_gpu(gr.on("saved:*", Store("int8")))
    for run in (model, other):
        run(x).square().sum().backward()

    assert_close(model, other, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("action", [Store("int8"), Offload()], ids=repr)
def test_nothing_waits(action: Any, simulation: SimulatedGpu | None) -> None:
    model, x = on_gpu(gr.on("saved:*", action))
    for step in range(5):
        begin = simulation.count() if simulation is not None else None
        torch.cuda.set_sync_debug_mode("error" if step >= 3 else "default")
        try:
            model(x).square().sum().backward()
        finally:
            torch.cuda.set_sync_debug_mode("default")
        if step >= 3 and simulation is not None and begin is not None:
            assert (simulation.count() - begin).waits == 0
