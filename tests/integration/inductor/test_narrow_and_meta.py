"""Tensors of eight bits, for which torch has no arithmetic, and tensors without values."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor, nn

import gradrewrite as gr
from gradrewrite.passes import CheckFinite, ClipByNorm, Keep, Observe

from helpers import failure

EIGHT_BITS = (torch.float8_e4m3fn, torch.float8_e5m2, torch.float8_e8m0fnu)


class Quantized(nn.Module):
    """Reads a buffer of eight bits, or an argument."""

    def __init__(self, dtype: torch.dtype) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.fc = nn.Linear(4, 4)
        self.register_buffer("table", torch.rand(4, 4).to(dtype))

    def forward(self, x: Tensor, table: Tensor | None = None) -> Tensor:
        return (self.fc(x) @ (self.table if table is None else table).float()).square().sum()


class Narrowed(nn.Module):
    """Makes a value of eight bits."""

    def __init__(self, dtype: torch.dtype) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.fc, self.dtype = nn.Linear(4, 4), dtype

    def forward(self, x: Tensor) -> Tensor:
        h = self.fc(x)
        narrow = gr.tap(h.to(self.dtype), "narrow")
        return (narrow.float() + h).square().sum()


@pytest.fixture
def x() -> Tensor:
    return torch.randn(3, 4, generator=torch.Generator().manual_seed(1))


@pytest.mark.parametrize("dtype", EIGHT_BITS, ids=str)
@pytest.mark.parametrize("given", [False, True], ids=["buffer", "argument"])
def test_models_that_read_eight_bits(x: Tensor, dtype: torch.dtype, given: bool) -> None:
    plain = Quantized(dtype)
    plain(x).backward()
    wanted = plain.fc.weight.grad
    policies: list[gr.Policy] = [[], gr.on("gradient:*", CheckFinite()), gr.on("error:*", ClipByNorm(1e9))]
    for policy in policies:
        plain.zero_grad()
        rewritten = gr.transform(plain, policy)
        rewritten(x, plain.table if given else None).backward()
        torch.testing.assert_close(plain.fc.weight.grad, wanted)
        rewritten.trace(x)
        rewritten.memory(x)
    assert gr.locate(plain, x, loss_fn=lambda out: out) is None


def test_a_nan_of_eight_bits_is_named(x: Tensor) -> None:
    plain = Quantized(torch.float8_e4m3fn)
    plain.table.view(torch.uint8)[0, 0] = 0x7F
    err = failure(lambda: gr.transform(plain, gr.on("gradient:*", CheckFinite()))(x).backward())
    assert err.cause == "the buffer table was not finite already"


@pytest.mark.inductor
@pytest.mark.parametrize("compiled", [False, True], ids=["aot_eager", "inductor"])
def test_figures_of_eight_bits_are_those_of_float32(x: Tensor, compiled: bool) -> None:
    statistics = ("norm", "max_abs", "mean_abs", "min", "max", "zeros", "nan", "inf", "std")
    plain = Narrowed(torch.float8_e5m2)
    wide = plain.fc(x).detach().to(torch.float8_e5m2).float()
    rewritten = gr.transform(
        plain,
        [gr.on("activation:narrow", [Observe(*statistics), Keep()]), gr.on("activation:*", CheckFinite("record"))],
    )
    if compiled:
        rewritten.compile()
    rewritten(x).backward()
    found = rewritten.monitor.latest()
    wanted = {
        "norm": wide.norm(), "max_abs": wide.abs().max(), "mean_abs": wide.abs().mean(), "min": wide.min(),
        "max": wide.max(), "zeros": (wide == 0).float().mean(), "nan": 0.0, "inf": 0.0, "std": wide.std(correction=0),
    }  # fmt: skip
    for name, value in wanted.items():
        assert found[f"{name}@activation:narrow"] == pytest.approx(float(value), rel=1e-5), name
    assert found["nonfinite@activation:narrow"] == 0
    (kept,) = rewritten.monitor.kept().values()
    assert kept.dtype == torch.float8_e5m2
    assert torch.equal(kept.float(), wide)


def test_an_overflow_to_eight_bits_is_found(x: Tensor) -> None:
    rewritten = gr.transform(Narrowed(torch.float8_e5m2), gr.on("activation:narrow", CheckFinite()))
    err = failure(rewritten(1e6 * x).backward)
    assert str(err.site) == "activation:narrow"


@pytest.mark.parametrize("action", [ClipByNorm(1.0), Observe("norm"), CheckFinite(), Keep()], ids=str)
def test_models_without_values(action: object) -> None:
    with torch.device("meta"):
        plain, x = nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 1)), torch.randn(3, 4)
    rewritten = gr.transform(plain, gr.on("error:*", action))
    graph = rewritten.trace(x)
    assert len(graph.edits) == 3
    rewritten.memory(x)
    rewritten(x).sum().backward()
    assert plain[0].weight.grad.is_meta
    records = rewritten.monitor.latest()
    assert all(math.isnan(value) for name, value in records.items() if name.startswith(("norm", "nonfinite")))
