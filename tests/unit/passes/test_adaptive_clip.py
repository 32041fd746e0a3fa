"""AdaptiveClip against the formula of the paper, unit by unit."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import Tensor

import gradrewrite as gr
from gradrewrite.passes import AdaptiveClip

from models.small import Gradients

INF, NAN = math.inf, math.nan
SHAPES = {"linear": (5, 7), "conv": (4, 3, 2, 2), "bias": (6,), "gain": (), "one": (1, 9), "empty": (0, 3)}


def made(seed: int, dtype: torch.dtype = torch.float64, scale: float = 1.0) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return {n: (torch.randn(s, generator=generator, dtype=torch.float64) * scale).to(dtype) for n, s in SHAPES.items()}


def norm(values: list[float]) -> float:
    return math.sqrt(math.fsum(v * v for v in values))


def by_hand(gradient: Tensor, parameter: Tensor, clipping: float, eps: float) -> tuple[Tensor, float, float]:
    """The clipped gradient, the largest ratio, and the share of clipped units, in float64 by Python's numbers."""
    units = gradient.double().reshape(len(gradient) if gradient.dim() > 1 else 1, -1).tolist()
    weights = parameter.double().reshape(len(units), -1).tolist()
    out, ratios, clipped = [], [], 0
    for own, weight in zip(units, weights, strict=True):
        floor = max(norm(weight), eps)
        ratios.append(norm(own) / floor)
        acts = ratios[-1] > clipping
        clipped += acts
        out.append([v * clipping * floor / norm(own) for v in own] if acts else own)
    return torch.tensor(out, dtype=torch.float64).reshape(gradient.shape), max(ratios), clipped / len(ratios)


def step(model: gr.RewrittenModule, gradients: dict[str, Tensor], kind: str) -> dict[str, Tensor]:
    """The gradients after a backward, or those that an optimizer uses."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    if kind == "step":
        gr.guard(optimizer, model)
    model(*gradients.values()).backward()
    optimizer.step()
    return {name: p.grad for name, p in model.named_parameters() if p.grad is not None}


@pytest.mark.long
@pytest.mark.parametrize("kind", ["gradient", "step"])
@pytest.mark.parametrize(
    ("dtype", "rel"), [(torch.float64, 1e-14), (torch.float32, 1e-6), (torch.bfloat16, 1e-2)], ids=str
)
def test_units_are_clipped_by_the_norms_of_the_parameter(kind: str, dtype: torch.dtype, rel: float) -> None:
    parameters, gradients = made(0, dtype), made(1, dtype, 0.3)
    parameters["linear"][1] = 0.0  # its bound is that of eps
    gradients["linear"][2] = 0.0
    gradients["linear"][3] *= 1e-3
    model = gr.transform(Gradients(**parameters), gr.on(f"{kind}:*", AdaptiveClip(0.1, eps=0.01)))
    found = step(model, gradients, kind)
    records = model.monitor.latest()
    for name in set(SHAPES) - {"empty"}:
        wanted, ratio, share = by_hand(gradients[name], parameters[name], 0.1, 0.01)
        torch.testing.assert_close(found[name].double(), wanted, rtol=rel, atol=0)
        assert found[name].dtype == dtype
        assert records[f"unit_ratio@{kind}:{name}"] == pytest.approx(ratio, rel=max(rel, 1e-6))
        assert records[f"unit_share@{kind}:{name}"] == pytest.approx(share)
    assert 0 < records[f"unit_share@{kind}:linear"] < 1
    assert torch.equal(found["linear"][2:4], gradients["linear"][2:4])  # not a bit
    assert found["empty"].shape == SHAPES["empty"]
    assert math.isnan(records[f"unit_ratio@{kind}:empty"])
    assert records[f"unit_share@{kind}:empty"] == 0


@pytest.mark.long
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32], ids=str)
def test_units_that_are_not_finite_stay_as_they_are(dtype: torch.dtype) -> None:
    parameters, gradients = made(0, dtype), made(1, dtype)
    gradients["linear"][0, 0], gradients["linear"][1, 0] = NAN, -INF
    parameters["linear"][2, 0], parameters["linear"][3, 0] = INF, NAN
    model = gr.transform(Gradients(**parameters), gr.on("gradient:linear", AdaptiveClip(0.1)))
    found = step(model, gradients, "gradient")["linear"]
    wanted, *_ = by_hand(gradients["linear"][4:], parameters["linear"][4:], 0.1, 1e-3)
    assert torch.equal(found[:4].nan_to_num(7.0), gradients["linear"][:4].nan_to_num(7.0))
    torch.testing.assert_close(found[4:].double(), wanted, rtol=1e-6, atol=0)
    assert math.isnan(model.monitor.latest()["unit_ratio@gradient:linear"])
    assert model.monitor.latest()["unit_share@gradient:linear"] == pytest.approx(1 / 5)


@pytest.mark.broad
@pytest.mark.parametrize("unit", [1e30, 1e-30])
def test_norms_neither_overflow_nor_vanish(unit: float) -> None:
    parameters, gradients = made(0, torch.float32), made(1, torch.float32)
    given = {name: g * unit for name, g in gradients.items()}
    model = gr.transform(
        Gradients(**{name: p * unit for name, p in parameters.items()}),
        gr.on("gradient:conv", AdaptiveClip(0.1, eps=1e-38)),
    )
    found = step(model, given, "gradient")["conv"].double() / unit
    wanted, *_ = by_hand(gradients["conv"], parameters["conv"], 0.1, 1e-38)
    torch.testing.assert_close(found, wanted, rtol=1e-5, atol=0)


@pytest.mark.long
def test_the_bound_may_be_a_tensor() -> None:
    clipping = torch.tensor(1e9)
    gradients = made(1)
    model = gr.transform(Gradients(**made(0)), gr.on("gradient:*", AdaptiveClip(clipping)))
    assert torch.equal(step(model, gradients, "gradient")["conv"], gradients["conv"])
    clipping.fill_(0.1)
    model.zero_grad()
    wanted, *_ = by_hand(gradients["conv"], made(0)["conv"], float(clipping), 1e-3)
    torch.testing.assert_close(step(model, gradients, "gradient")["conv"], wanted, rtol=1e-7, atol=0)


@pytest.mark.pure
@pytest.mark.parametrize(
    ("settings", "error", "text"),
    [
        ({"clipping": 0.0}, ValueError, "clipping must be > 0, got 0.0"),
        ({"clipping": NAN}, ValueError, "clipping must not be NaN"),
        ({"clipping": "much"}, TypeError, "clipping is a number or a tensor"),
        ({"eps": 0.0}, ValueError, "eps must be > 0, got 0.0"),
        ({"eps": torch.ones(())}, TypeError, "eps is a number, got tensor"),
    ],
)
def test_settings_are_checked(settings: Any, error: type[Exception], text: str) -> None:
    with pytest.raises(error, match=text):
        AdaptiveClip(**settings)


@pytest.mark.inductor
def test_inductor() -> None:
    parameters, gradients = made(0, torch.float32), made(1, torch.float32)
    model = gr.transform(Gradients(**parameters), gr.on("gradient:*", AdaptiveClip(0.1)))
    model.compile()
    for name, found in step(model, gradients, "gradient").items():
        if found.numel():
            wanted, *_ = by_hand(gradients[name], parameters[name], 0.1, 1e-3)
            torch.testing.assert_close(found.double(), wanted, rtol=1e-5, atol=0)
