"""accelerate: the recipe of the guide, with mixed precision, accumulation, a GradScaler and saved states."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import gradrewrite as gr
from gradrewrite.passes import ClipByGlobalNorm

accelerate = pytest.importorskip("accelerate", reason="accelerate is not installed")

pytestmark = [
    pytest.mark.slow,
    pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning", "ignore::UserWarning"),
    pytest.mark.filterwarnings("error::gradrewrite.RewriteWarning"),
]
BOUND = 0.1


def train(
    kind: str, folder: Path | None = None, precision: str = "no", accumulated: int = 1, fused: bool = False
) -> Any:
    """Train for 20 batches: ``"own"`` clips with accelerate, ``"ours"`` with a policy, ``"free"`` not at all."""
    accelerate.state.AcceleratorState._reset_state(True)
    torch.manual_seed(0)
    model: nn.Module = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 1))
    x = torch.randn(80, 4, generator=torch.Generator().manual_seed(0))
    loader = DataLoader(TensorDataset(x, 10 * x[:, :1]), batch_size=4)
    accelerator = accelerate.Accelerator(cpu=True, mixed_precision=precision, gradient_accumulation_steps=accumulated)
    if kind == "ours":
        model = gr.transform(model, gr.on("step:*", ClipByGlobalNorm(BOUND)))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, fused=fused)
    prepared, optimizer, loader = accelerator.prepare(model, optimizer, loader)
    if kind == "ours":
        gr.guard(optimizer, model)
    for inputs, targets in loader:
        with accelerator.accumulate(prepared):
            accelerator.backward((prepared(inputs) - targets).square().mean())
            if kind == "own" and accelerator.sync_gradients:
                accelerator.clip_grad_norm_(prepared.parameters(), BOUND)
            optimizer.step()
            optimizer.zero_grad()
    assert accelerator.unwrap_model(prepared) is model
    if folder is not None:
        accelerator.save_state(str(folder))
        saved = [p.clone() for p in model.parameters()]
        nn.init.zeros_(next(model.parameters()))
        accelerator.load_state(str(folder))
        assert all(map(torch.equal, saved, model.parameters()))
    return model


def difference(one: nn.Module, other: nn.Module) -> float:
    pairs = zip(one.parameters(), other.parameters(), strict=True)
    return max((a - b).abs().max().item() for a, b in pairs)


@pytest.mark.parametrize(
    "settings", [{}, {"precision": "bf16"}, {"accumulated": 3}, {"accumulated": 2, "fused": True}], ids=str
)
def test_step_clip_equals_accelerates_own(settings: dict[str, Any]) -> None:
    own, free, ours = (train(kind, **settings) for kind in ("own", "free", "ours"))

    assert difference(ours, own) < 1e-5
    assert difference(free, own) > 1e-3
    steps = -(-20 // settings.get("accumulated", 1))
    assert len(ours.monitor.history("total_norm@step:group:default")) == steps


def test_saved_state(tmp_path: Path) -> None:
    assert difference(train("ours", tmp_path), train("own")) < 1e-5


@pytest.mark.parametrize("guards_first", [False, True])
@pytest.mark.parametrize("fused", [False, True])
def test_scaler_of_the_prepared_optimizer(guards_first: bool, fused: bool) -> None:
    """accelerate keeps ``step`` in two versions beside a GradScaler, read when it prepares the optimizer."""
    from accelerate.optimizer import AcceleratedOptimizer

    accelerate.state.AcceleratorState._reset_state(True)
    accelerate.Accelerator(cpu=True)
    x = torch.randn(8, 4, generator=torch.Generator().manual_seed(0))

    def run(scaler: torch.amp.GradScaler | None) -> nn.Module:
        torch.manual_seed(0)
        model = gr.transform(nn.Linear(4, 1), gr.on("step:*", ClipByGlobalNorm(BOUND)))
        optimizer: torch.optim.Optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, fused=fused)
        if scaler is None:
            prepared = gr.guard(optimizer, model)
        elif guards_first:
            prepared = AcceleratedOptimizer(gr.guard(optimizer, model), scaler=scaler)
        else:
            prepared = gr.guard(AcceleratedOptimizer(optimizer, scaler=scaler), model)
        for _ in range(5):
            loss = model(x).square().mean() * 10
            (loss if scaler is None else scaler.scale(loss)).backward()
            prepared.step()
            prepared.zero_grad()
        assert model.monitor.latest()["bound@step:group:default"] == pytest.approx(BOUND)
        return model

    plain, scaled = run(None), run(torch.amp.GradScaler("cpu", init_scale=2.0**10))
    assert difference(plain, scaled) < 1e-6
