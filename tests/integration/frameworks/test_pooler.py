"""BERT with a pooler that the loss does not use: half precision, a GradScaler, and the pooler in the optimizer."""

from __future__ import annotations

import importlib
import itertools
import sys
from typing import Any

import pytest
import torch

import gradrewrite as gr
from gradrewrite.passes import CheckFinite, ClipByGlobalNorm

from helpers import ROOT

pytest.importorskip("transformers", reason="transformers is not installed")
pytestmark = [pytest.mark.slow, pytest.mark.filterwarnings("ignore::FutureWarning", "ignore::DeprecationWarning")]


@pytest.fixture
def example(monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.syspath_prepend(str(ROOT / "examples"))
    yield importlib.import_module("unused_pooler")
    del sys.modules["unused_pooler"]


def by_hand(example: Any, steps: int, monkeypatch: pytest.MonkeyPatch) -> tuple[Any, list[float], int]:
    """The same training in plain PyTorch; with the number of updates that the GradScaler skipped."""
    scales: list[float] = []

    class Scaler(torch.amp.GradScaler):
        def update(self, new_scale: Any = None) -> None:
            scales.append(self.get_scale())
            super().update(new_scale)

        def step(self, optimizer: Any, *args: Any, **kwargs: Any) -> Any:
            self.unscale_(optimizer)
            parameters = [p for group in optimizer.param_groups for p in group["params"]]
            grads = [p.grad for p in parameters if p.grad is not None]
            total = torch.stack([g.double().norm() for g in grads]).norm()
            if total.isfinite() and total > 1:
                for g in grads:
                    g.mul_(1 / total.float())
            return super().step(optimizer, *args, **kwargs)

    monkeypatch.setattr(torch.amp, "GradScaler", Scaler)
    monkeypatch.setattr(gr, "transform", lambda model, policy, **_: model)
    monkeypatch.setattr(gr, "guard", lambda optimizer, model: optimizer)
    model, losses = example.train(steps)
    monkeypatch.undo()
    return model, losses, sum(later < before for before, later in itertools.pairwise(scales))


def test_missing_gradients_do_no_harm(example: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    train = example.train
    plain, wanted, skips = by_hand(example, 40, monkeypatch)
    model, losses = train(40)
    pooler = [p for name, p in model.named_parameters() if "pooler" in name]

    assert losses == pytest.approx(
        wanted, abs=0.05
    )  # float16: torch's kernels and the decomposed ones round differently
    assert losses[-1] < losses[0] - 1
    assert model.monitor.skipped == skips > 5
    assert all(p.grad is None for p in pooler)
    assert all(torch.equal(a, b) for a, b in zip(pooler, plain.bert.pooler.parameters(), strict=True))
    assert not any(map(torch.isnan, (p.sum() for p in model.parameters())))


def test_saturation_of_its_tanh_is_reported(example: Any) -> None:
    model, _ = example.train(40)
    found = {finding.kind: finding for finding in model.monitor.diagnose()}

    assert found["saturated"].site == "activation:bert.pooler.activation/tanh"
    assert model.monitor.latest()[example.SATURATED] > 0.9


def test_pooled_output_that_the_loss_ignores_has_zeros(example: Any) -> None:
    """If the model returns it, torch.compile makes gradients of zeros; checks and clips take them."""

    class Returns(example.MaskedCharacters):
        def forward(self, masked: torch.Tensor, characters: torch.Tensor) -> Any:
            return super().forward(masked, characters), self.bert(masked).pooler_output

    policy = [gr.on("gradient:*", CheckFinite("skip")), gr.on("step:*", ClipByGlobalNorm(1.0))]
    torch.manual_seed(0)
    model = gr.transform(Returns(), policy)
    optimizer = gr.guard(torch.optim.AdamW(model.parameters()), model)
    characters = torch.randint(1, 128, (2, 32))
    loss, _ = model(characters.masked_fill(torch.arange(32) % 6 == 0, 0), characters)
    loss.backward()
    optimizer.step()

    assert not model.bert.pooler.dense.weight.grad.any()
    assert model.monitor.skipped == 0
