"""Statistics and counts: against plain torch, traced and opaque."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import gradrewrite as gr
from gradrewrite.numerics import measuring
from gradrewrite.passes import CheckFinite, Observe
from gradrewrite.rewriting import canvas

from helpers import mostly_slow
from models.small import Sines

KNOWN = ("max_abs", "mean_abs", "norm", "min", "max", "nan", "inf", "nonfinite", "zeros")
DTYPES = (torch.float16, torch.bfloat16, torch.float32, torch.float64)


class Probe(nn.Module):
    """Its error at ``h`` and its activation at ``h`` are exactly the arguments."""

    def __init__(self, size: int, dtype: torch.dtype = torch.float32) -> None:
        super().__init__()
        self.w = nn.Parameter(torch.zeros(size, dtype=dtype))

    def forward(self, value: Tensor, error: Tensor) -> Tensor:
        return (gr.tap(self.w + value, "h") * error).sum()


def reference(x: Tensor) -> dict[str, float]:
    wide = x.double()
    empty = x.numel() == 0
    nan = math.nan
    return {
        "max_abs": nan if empty else float(wide.abs().amax()),
        "mean_abs": nan if empty else float(wide.abs().mean()),
        "norm": float(torch.linalg.vector_norm(wide)),
        "min": nan if empty else float(wide.amin()),
        "max": nan if empty else float(wide.amax()),
        "nan": float(wide.isnan().sum()),
        "inf": float(wide.isinf().sum()),
        "nonfinite": float((~wide.isfinite()).sum()),
        "zeros": 0.0 if empty else float((wide == 0).double().mean()),
    }


VALUES = {
    "plain": [3.0, -4.0, 0.0, 1.5],
    "zeros": [0.0, -0.0, 0.0, 0.0],
    "nan": [1.0, math.nan, 0.0, math.nan],
    "infinite": [1.0, -math.inf, 2.0, math.inf],
    "one": [7.0],
    "empty": [],
}


@pytest.mark.parametrize("is_opaque", [False, True])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("name", VALUES)
def test_statistics_are_those_of_torch(name: str, dtype: torch.dtype, is_opaque: bool) -> None:
    x = torch.tensor(VALUES[name], dtype=dtype)
    got = measuring.measure(x, KNOWN, is_opaque=is_opaque)

    assert got.dtype == (torch.float64 if dtype == torch.float64 else torch.float32)
    assert got.tolist() == pytest.approx(list(reference(x).values()), rel=1e-6, nan_ok=True)


def test_norm_does_not_overflow() -> None:
    x = torch.full((4,), 2e38)
    assert measuring.measure(x, ["norm"], is_opaque=True).item() == math.inf  # 4e38 is none of float32
    assert measuring.measure(x / 2, ["norm"], is_opaque=True).item() == pytest.approx(2e38)
    assert measuring.measure(torch.full((4,), 3e4, dtype=torch.float16), ["norm"], is_opaque=False).item() == 6e4


@pytest.mark.broad
@pytest.mark.parametrize("kind", ["error", "activation"])
@pytest.mark.parametrize("name", mostly_slow(["plain", "nan", "infinite", "one", "empty"], 2))
def test_records_of_observe(kind: str, name: str) -> None:
    x = torch.tensor(VALUES[name])
    model = gr.transform(Probe(x.numel()), gr.on(f"{kind}:h", Observe(*KNOWN)))
    other = torch.ones_like(x)
    model(*((x, other) if kind == "activation" else (other, x))).backward()

    wanted = {f"{n}@{kind}:h": value for n, value in reference(x).items()}
    assert model.monitor.latest() == pytest.approx(wanted, rel=1e-6, nan_ok=True)


@pytest.mark.slow
def test_many_sites_are_measured_alike(monkeypatch: pytest.MonkeyPatch) -> None:
    """On the CPU statistics are always opaque, elsewhere from ``canvas.MANY`` sites on; the figures are the same."""

    figures = []
    for patterns in (["error:h*", "activation:h*"], ["error:h0", "activation:h0"]):
        model = gr.transform(Sines(40, 8), [gr.on(p, Observe("max_abs", "norm", "zeros")) for p in patterns])
        model().backward()
        figures.append(model.monitor.latest())
        assert "aten.amax" not in str(model.trace())
    monkeypatch.setattr(canvas, "MEASURED_APART", frozenset())
    for count in (2, 40):
        policy = gr.on("error:h*", Observe("max_abs")), gr.on("activation:h*", Observe("max_abs"))
        assert ("aten.amax" in str(gr.transform(Sines(count, 8), list(policy)).trace())) == (count == 2)
    assert {name: figures[0][name] for name in figures[1]} == pytest.approx(figures[1], rel=1e-6)


def test_saturated_is_recorded_at_tanh_and_sigmoid_alone() -> None:
    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.w = nn.Parameter(torch.ones(4))

        def forward(self, x: Tensor) -> Tensor:
            h = self.w * x
            return (torch.tanh(h) + torch.sigmoid(h) + torch.relu(h)).sum()

    model = gr.transform(Net(), gr.on("activation:*/*", Observe("saturated")))
    model(torch.tensor([0.0, 3.0, -3.0, 10.0])).backward()

    assert model.monitor.latest() == {"saturated@activation:/tanh": 0.75, "saturated@activation:/sigmoid": 0.25}


def test_zeros_show_dead_units() -> None:
    model = gr.transform(nn.Sequential(nn.Linear(2, 4), nn.ReLU()), gr.on("activation:1", Observe("zeros")))
    with torch.no_grad():
        model.original[0].bias.copy_(torch.tensor([-9.0, -9.0, -9.0, 9.0]))
    model(torch.zeros(3, 2)).sum().backward()
    assert model.monitor.latest() == {"zeros@activation:1": 0.75}


@pytest.mark.parametrize(
    ("make", "error"),
    [
        (lambda: Observe(), ValueError),
        (lambda: Observe("mean"), ValueError),
        (lambda: CheckFinite("stop"), ValueError),
    ],
)
def test_wrong_settings_raise_at_construction(make: Any, error: type[Exception]) -> None:
    with pytest.raises(error, match="one of"):
        make()


def test_complex_values_have_no_smallest() -> None:
    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.w = nn.Parameter(torch.ones(2, dtype=torch.complex64))

        def forward(self) -> Tensor:
            return gr.tap(self.w * 1j, "h").abs().sum()

    model = gr.transform(Net(), gr.on("error:h", Observe("max_abs", "norm", "nonfinite")))
    model().backward()
    assert model.monitor.latest()["norm@error:h"] == pytest.approx(math.sqrt(2.0))
    with pytest.raises(TypeError, match=r"error:h.*Observe\('min'\) needs real numbers"):
        gr.transform(Net(), gr.on("error:h", Observe("min")))()


def test_nothing_is_changed_by_observing() -> None:
    torch.manual_seed(0)
    plain = nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 1))
    x = torch.randn(3, 4)
    plain(x).sum().backward()
    wanted = [p.grad.clone() for p in plain.parameters()]
    policy = [
        gr.on("*", Observe("norm", "zeros")),
        gr.on("*", CheckFinite("record")),
        gr.on("activation:*", Observe("max")),
    ]
    plain.zero_grad()
    gr.transform(plain, policy)(x).sum().backward()

    assert all(torch.equal(p.grad, w) for p, w in zip(plain.parameters(), wanted, strict=True))


def test_symbolic_shapes() -> None:
    model = gr.transform(nn.Linear(2, 2), gr.on("error:*/*", [Observe("norm"), CheckFinite("warn")]), dynamic=True)
    for rows in (3, 5, 7):
        model(torch.ones(rows, 2)).sum().backward()
        assert model.monitor.latest()["norm@error:/linear"] == pytest.approx(math.sqrt(2 * rows))
    assert len(model.explain().graphs) <= 2
    model(torch.full((4, 2), torch.nan)).sum().backward()
    err = model.monitor.failure()
    assert err is None  # the gradient of a sum is one, whatever the input
