"""Thresholds and records in units of the unscaled loss, however the scale moves."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import gradrewrite as gr
from gradrewrite.passes import (
    CheckFinite,
    ClipByGlobalNorm,
    ClipByNorm,
    ClipByValue,
    Keep,
    NanToNum,
    Observe,
    Scale,
    Zero,
)

from helpers import mostly_slow
from models.small import Lambda


def make_net() -> Lambda:
    return Lambda(
        lambda net, x: net.two(torch.tanh(net.one(x))).square().mean(), one=nn.Linear(4, 8), two=nn.Linear(8, 2)
    )


def soften(g: Tensor) -> Tensor:
    gr.record("largest", g.abs().amax())
    return g / (1 + g.norm())


POLICIES: dict[str, Any] = {
    "value": gr.on("error:one", ClipByValue(1e-3, log=True)),
    "norm": gr.on("error:*", ClipByNorm(1e-2)),
    "global": gr.on("gradient:*", ClipByGlobalNorm(0.05)),
    "function": gr.on("error:one", soften),
    "simple": [gr.on("error:one", [Scale(-0.5), NanToNum()]), gr.on("gradient:two.bias", Zero())],
    "observe": gr.on("*", Observe("max_abs", "mean_abs", "norm", "min", "max", "zeros", "nonfinite")),
    "tensor": gr.on("gradient:*", ClipByNorm(torch.tensor(0.01))),
}


@pytest.mark.long
@pytest.mark.parametrize("name", mostly_slow(POLICIES, 2))
def test_scaled_and_unscaled_runs_agree(name: str) -> None:
    torch.manual_seed(0)
    plain, x = make_net().double(), torch.randn(3, 4, dtype=torch.float64)
    scale = torch.tensor(1.0)
    wanted = gr.transform(copy.deepcopy(plain), POLICIES[name])
    scaled = gr.transform(copy.deepcopy(plain), POLICIES[name], loss_scale=scale)
    wanted(x).backward()
    for factor in (65536.0, 3.0, 0.1):
        scale.fill_(factor)
        scaled.zero_grad()
        (scaled(x) * scale).backward()
        for got, want in zip(scaled.parameters(), wanted.parameters(), strict=True):
            torch.testing.assert_close(got.grad / factor, want.grad, rtol=1e-6, atol=1e-12)
        assert scaled.monitor.latest() == pytest.approx(wanted.monitor.latest(), rel=1e-5, abs=1e-12)
    assert len(scaled.explain().graphs) == 1


@pytest.mark.long
@pytest.mark.parametrize("action", [ClipByValue(100.0), ClipByNorm(100.0)])
@pytest.mark.parametrize("factor", [65536.0, 3.0])
@pytest.mark.parametrize("dtype", mostly_slow([torch.float16, torch.bfloat16, torch.float32]))
def test_below_the_bound_not_a_bit_changes(action: Any, factor: float, dtype: torch.dtype) -> None:

    scale = torch.tensor(factor)
    net = Lambda(lambda net, error: (net.w * error).sum(), w=nn.Parameter(torch.zeros(64, dtype=dtype)))
    model = gr.transform(net, gr.on("gradient:w", action), loss_scale=scale)
    error = torch.randn(64).to(dtype)
    model(error).backward()
    assert model.w.grad is not None
    assert torch.equal(model.w.grad, error)


def test_a_grad_scaler_is_followed_without_recompilation() -> None:
    scaler = torch.amp.GradScaler("cpu", init_scale=4.0, growth_factor=2.0, growth_interval=1)
    model = gr.transform(make_net(), gr.on("gradient:*", ClipByGlobalNorm(1e-3)), loss_scale=scaler)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    x = torch.ones(3, 4)
    model(x).backward()  # the scaler has not been used: no scale yet
    first = model.monitor.latest()["total_norm@group:default"]
    for _ in range(4):
        optimizer.zero_grad()
        scaler.scale(model(x)).backward()
        scaler.unscale_(optimizer)
        norm = torch.nn.utils.get_total_norm([p.grad for p in model.parameters() if p.grad is not None])
        assert float(norm) == pytest.approx(1e-3, rel=1e-5)
        assert model.monitor.latest()["total_norm@group:default"] == pytest.approx(first, rel=1e-5)
        scaler.step(optimizer)
        scaler.update()
    assert scaler.get_scale() == 64.0
    assert len(model.explain().graphs) == 1


def test_disabled_scaler_scales_by_one() -> None:
    scaler = torch.amp.GradScaler("cpu", enabled=False)
    model = gr.transform(make_net(), gr.on("error:one", Observe("norm")), loss_scale=scaler)
    plain = gr.transform(model.original, gr.on("error:one", Observe("norm")))
    for m in (model, plain):
        scaler.scale(m(torch.ones(3, 4))).backward()
    assert model.monitor.latest() == plain.monitor.latest()


def test_kept_tensors_and_checks_are_as_they_were() -> None:
    scale = torch.tensor(1024.0)
    model = gr.transform(make_net(), gr.on("error:two", [Keep(), CheckFinite("record")]), loss_scale=scale)
    plain = gr.transform(model.original, gr.on("error:two", Keep()))
    (model(torch.ones(3, 4)) * scale).backward()
    plain(torch.ones(3, 4)).backward()
    (kept,), (wanted,) = model.monitor.kept().values(), plain.monitor.kept().values()
    assert torch.equal(kept, wanted * 1024.0)
    assert model.monitor.latest()["nonfinite@error:two"] == 0.0


@pytest.mark.pure
def test_what_is_no_scale() -> None:
    with pytest.raises(TypeError, match="GradScaler or a tensor, got float"):
        gr.transform(make_net(), [], loss_scale=2.0)
    with pytest.raises(ValueError, match="one real element"):
        gr.transform(make_net(), [], loss_scale=torch.ones(2))


@pytest.mark.inductor
def test_compiled() -> None:
    torch.manual_seed(0)
    plain, x, scale = make_net(), torch.randn(3, 4), torch.tensor(8.0)
    policy = [POLICIES[n] for n in ("value", "norm", "function", "observe", "global")]
    models = [gr.transform(copy.deepcopy(plain), policy, loss_scale=scale) for _ in range(2)]
    models[1].compile()
    for factor in (8.0, 1000.0):
        scale.fill_(factor)
        for model in models:
            model.zero_grad()
            (model(x) * scale).backward()
        for got, want in zip(models[1].parameters(), models[0].parameters(), strict=True):
            torch.testing.assert_close(got.grad, want.grad, rtol=1e-4, atol=1e-6)
        assert models[1].monitor.latest() == pytest.approx(models[0].monitor.latest(), rel=1e-4, abs=1e-6)
