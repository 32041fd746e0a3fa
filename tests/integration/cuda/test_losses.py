"""Weighed losses in code compiled for a GPU: the gradients and records of the CPU, without a wait."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

import gradrewrite as gr
from gradrewrite.passes import MGDA, AlignedMTL, CAGrad, ClipByNorm, Observe, PCGrad, UPGrad, WeighLosses

from gpu.log import SimulatedGpu
from helpers import assert_same_gradients, gradients_of
from models.several_losses import (
    eager_gradients,
    eager_gradients_by_error,
    losses_of,
    make,
)


def total(output: Any) -> Tensor:
    return torch.stack(losses_of(output)).sum()


def uneven(gramian: Tensor) -> Tensor:
    """Weights by the gradients, with a constant that is made on their device."""
    return torch.arange(1, len(gramian) + 1, device=gramian.device) / gramian.diagonal().sqrt().sum()


def with_memory() -> Callable[[Tensor, Tensor], Tensor]:
    mean = gr.State((3,), dtype=torch.float64, name="mean")

    def weigh(gramian: Tensor, losses: Tensor) -> Tensor:
        found = 0.5 * mean.value + losses
        mean.set(found)
        return found / (1 + gramian.trace())

    return weigh


OBSERVE = Observe("loss_norms", "loss_cosine", "norm")
POLICIES: dict[str, Callable[[], Any]] = {
    "UPGrad": lambda: gr.on("gradient:trunk.*", [OBSERVE, WeighLosses(UPGrad())]),
    "PCGrad": lambda: gr.on("gradient:trunk.*", [ClipByNorm(0.5), WeighLosses(PCGrad()), ClipByNorm(0.5)]),
    "MGDA": lambda: gr.on("gradient:trunk.*", WeighLosses(MGDA())),
    "CAGrad": lambda: gr.on("gradient:trunk.*", WeighLosses(CAGrad())),
    "AlignedMTL": lambda: gr.on("gradient:trunk.*", WeighLosses(AlignedMTL())),
    "function": lambda: gr.on("gradient:trunk.*", [OBSERVE, WeighLosses(uneven)]),
    "function of losses": lambda: gr.on("gradient:trunk.*", WeighLosses(with_memory())),
    "error, UPGrad": lambda: [gr.on("error:trunk.?", OBSERVE), gr.on("error:trunk.2", WeighLosses(UPGrad()))],
    "error, function": lambda: gr.on("error:trunk.2", [WeighLosses(uneven), ClipByNorm(0.1)]),
    "observed": lambda: [gr.on("error:trunk.2", OBSERVE), gr.on("gradient:*.weight", OBSERVE)],
}


def on_gpu(name: str, policy: Any, dtype: torch.dtype = torch.float64, **options: Any) -> Any:
    plain, x = make(name, dtype=dtype)
    model = gr.transform(plain.cuda(), policy, **options)
    model.compile()
    return model, x.cuda()


@pytest.mark.parametrize("policy", POLICIES)
def test_numbers(policy: str) -> None:
    """Those of the rewritten graph on the CPU, op by op, for two steps."""
    model, x_there = on_gpu("mlp", POLICIES[policy]())
    plain, x = make("mlp")
    reference = gr.transform(plain, POLICIES[policy]())
    for step in range(2):
        for run, given in ((model, x_there), (reference, x)):
            run.zero_grad()
            total(run(given * (1 + step))).backward()
        got = {name: None if g is None else g.cpu() for name, g in gradients_of(model).items()}
        assert_same_gradients(got, gradients_of(reference), rtol=1e-8)
        records, wanted = model.monitor.latest(), reference.monitor.latest()
        assert list(records) == list(wanted)
        assert records == pytest.approx(wanted, rel=1e-6, abs=1e-12, nan_ok=True)


@pytest.mark.parametrize("name", ["mlp", "Early", "Vector", "conv and batch norm"])
def test_gradients_equal_eager(name: str) -> None:
    plain, x = make(name)
    expected, weights = eager_gradients(plain, x, "trunk", UPGrad().weights)
    model, x_there = on_gpu(name, gr.on("gradient:trunk*", WeighLosses(UPGrad())))
    total(model(x_there)).backward()
    found = model.monitor.latest()

    assert [found[f"loss_weight_{k}@group:default"] for k in range(len(weights))] == pytest.approx(weights.tolist())
    got = {n: p.grad.cpu() for n, p in model.named_parameters() if p.grad is not None}
    assert got.keys() == expected.keys()
    for key, gradient in got.items():
        torch.testing.assert_close(gradient, expected[key], rtol=1e-8, atol=1e-10)


def test_error_site_equals_eager() -> None:
    plain, x = make("mlp")
    eager_gradients_by_error(plain, x, "trunk.2", UPGrad().weights)
    model, x_there = on_gpu("mlp", gr.on("error:trunk.2", WeighLosses(UPGrad())))
    total(model(x_there)).backward()

    for parameter, other in zip(model.parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(parameter.grad.cpu(), other.grad, rtol=1e-8, atol=1e-10)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_narrow_gradients(dtype: torch.dtype) -> None:
    """Inner products are those of the gradients of this dtype, in float32."""
    model, x = on_gpu("mlp", gr.on("gradient:trunk.*", WeighLosses(UPGrad())), dtype)
    total(model(x)).backward()
    found = model.monitor.latest()
    plain, given = make("mlp", dtype=dtype)
    parameters = [p for n, p in plain.named_parameters() if n.startswith("trunk")]
    for k, loss in enumerate(losses_of(plain(given))):
        rows = torch.autograd.grad(loss, parameters, retain_graph=True)
        norm = torch.cat([row.double().flatten() for row in rows]).norm()
        bound = 1e-5 if dtype == torch.float32 else 2e-2
        assert found[f"loss_norm_{k}@group:default"] == pytest.approx(float(norm), rel=bound)


@pytest.mark.parametrize(
    ("policy", "scale"),
    [
        *((policy, "") for policy in POLICIES if policy not in ("MGDA", "CAGrad", "AlignedMTL")),
        ("UPGrad", "cuda"),
        ("PCGrad", "scaler"),
        ("error, UPGrad", "scaler"),
    ],
)
def test_nothing_waits(policy: str, scale: str, simulation: SimulatedGpu | None) -> None:
    scaler = torch.amp.GradScaler("cuda", init_scale=8.0) if scale == "scaler" else None
    loss_scale = torch.full((), 8.0, device="cuda") if scale == "cuda" else scaler
    model, x = on_gpu("mlp", POLICIES[policy](), torch.float32, loss_scale=loss_scale)
    optimizer = torch.optim.AdamW(model.parameters(), fused=True)
    for step in range(6):
        begin = simulation.count() if simulation is not None else None
        torch.cuda.set_sync_debug_mode("error" if step >= 3 else "default")
        optimizer.zero_grad()
        loss = total(model(x))
        (loss if scaler is None else scaler.scale(loss)).backward()
        if scaler is None:
            optimizer.step()
        else:
            scaler.step(optimizer)
            scaler.update()
        torch.cuda.set_sync_debug_mode("default")
        if simulation is not None and begin is not None and step >= 3:
            done = simulation.count() - begin
            assert (done.waits, done.blocking) == (0, 0), simulation.waits
    assert all(p.grad is not None and p.grad.isfinite().all() for p in model.parameters())
