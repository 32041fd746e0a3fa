"""Gradients and records of compiled code on a GPU equal those of the rewritten graph op by op on the CPU."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import gradrewrite as gr
from gradrewrite.numerics.statistics import FINGERPRINT, fingerprint_of
from gradrewrite.passes import CheckFinite, ClipByGlobalNorm, ClipByNorm, ClipByValue, Keep, Observe

from helpers import assert_same_gradients, gradients_of
from models.gpt import Gpt, batch
from models.zoo import Cnn, Residual

KINDS = ("error", "activation", "gradient")
STATISTICS = ("norm", "max_abs", "mean_abs", "min", "max", "zeros", "nonfinite")
POLICIES: dict[str, Any] = {
    "value, log": gr.on("error:*", ClipByValue(1e-3, log=True)),
    "norms": [gr.on("error:*", ClipByNorm(1e-2, log=True)), gr.on("gradient:*", ClipByNorm(1e-2, norm_type=3.0))],
    "global norm": gr.on("gradient:*", ClipByGlobalNorm(1e-2)),
    "checks": [gr.on(f"{kind}:*", CheckFinite("warn")) for kind in KINDS],
    "statistics": [gr.on(f"{kind}:*", Observe(*STATISTICS)) for kind in KINDS],
    "all": [
        lambda site: Observe(*STATISTICS) if site.kind in KINDS else None,
        gr.on("error:*", [ClipByValue(1e-3, log=True), CheckFinite("skip")]),
        gr.on("gradient:*", [CheckFinite("skip"), ClipByGlobalNorm(1e-2)]),
    ],
}
MODELS: dict[str, tuple[Callable[[], nn.Module], Callable[[], tuple[Tensor, ...]]]] = {
    "mlp": (lambda: nn.Sequential(nn.Linear(80, 96), nn.GELU(), nn.Linear(96, 3)), lambda: (torch.randn(64, 80),)),
    "block": (lambda: Residual(dropout=0.0), lambda: (torch.randn(4, 20, 16, requires_grad=True),)),
    "cnn": (Cnn, lambda: (torch.randn(4, 3, 16, 16),)),
    "gpt": (lambda: Gpt(1, 16, 2, vocabulary=40, context=8), lambda: batch(2, 8, 40)),
}


def step(model: nn.Module, inputs: tuple[Tensor, ...]) -> None:
    model.zero_grad()
    out = model(*inputs)
    (out.square().sum() if out.dim() else out).backward()


CASES = [
    *(("mlp", policy) for policy in POLICIES),
    *(("block", policy) for policy in ("norms", "statistics")),
    *(("cnn", policy) for policy in ("global norm", "checks")),
    ("gpt", "global norm"),
]


@pytest.mark.parametrize(("name", "policy"), CASES)
def test_numbers(name: str, policy: str) -> None:
    make, inputs = MODELS[name]
    plain, args = make(), inputs()
    reference = gr.transform(copy.deepcopy(plain), POLICIES[policy])
    model = gr.transform(plain.cuda(), POLICIES[policy])
    model.compile()
    step(reference, args)
    step(model, tuple(t.detach().cuda().requires_grad_(t.requires_grad) for t in args))

    got = {name: None if g is None else g.cpu() for name, g in gradients_of(model).items()}
    assert_same_gradients(got, gradients_of(reference), rtol=1e-4)
    records, wanted = model.monitor.latest(), reference.monitor.latest()
    assert list(records) == list(wanted)
    for key in [key for key in wanted if "qkv" in key or "attn" in key]:
        if key.startswith("zeros"):  # gradients of keys that are 0 but for rounding
            del records[key], wanted[key]
    assert records == pytest.approx(wanted, rel=1e-4, abs=1e-6, nan_ok=True)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16], ids=str)
def test_fingerprints_are_those_of_the_values(dtype: torch.dtype) -> None:
    """Of kernels in one stage and in two."""
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(80, 96), nn.GELU(), nn.Linear(96, 3)).to("cuda", dtype)
    model = gr.transform(net, [gr.on(f"{kind}:*", [Observe("fingerprint", "norm"), Keep()]) for kind in KINDS])
    model.compile()
    model(torch.randn(64, 80, dtype=dtype).cuda()).square().sum().backward()

    records, kept = model.monitor.latest(), model.monitor.kept()
    assert len(kept) == 10
    for site, value in kept.items():
        wanted = [float(part) for part in fingerprint_of(value.cpu())]
        assert [records[f"{name}@{site}"] for name in FINGERPRINT] == wanted, site


@pytest.mark.parametrize("exponent", [-42, -30, 0, 30])
def test_norms_neither_overflow_nor_vanish(exponent: int) -> None:
    x = torch.randn(96, 80)
    model = gr.transform(nn.Linear(80, 96, bias=False).cuda(), gr.on("gradient:*", Observe("norm")))
    model.compile()
    (model(torch.eye(80, device="cuda")) * x.mT.cuda() * 10.0**exponent).sum().backward()

    wanted = (x * 10.0**exponent).double().norm().item()
    assert model.monitor.latest()["norm@gradient:weight"] == pytest.approx(wanted, rel=1e-5 if exponent > -40 else 0.1)
