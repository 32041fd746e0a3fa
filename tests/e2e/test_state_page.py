"""The functions of docs/state.md against the formulas of their papers."""

from __future__ import annotations

import math
import re
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import gradrewrite as gr
from gradrewrite import passes

from helpers import ROOT

BLOCKS = re.findall(r"```python\n(.*?)```", (ROOT / "docs" / "state.md").read_text(), re.DOTALL)


def net() -> nn.Module:
    torch.manual_seed(0)
    return nn.Linear(3, 2).double()


def names(**further: Any) -> dict[str, Any]:
    """The names that the code of the page defines."""
    known = {"gr": gr, "torch": torch, "math": math, **{name: getattr(passes, name) for name in passes.__all__}}
    known |= further
    for block in BLOCKS[:2] + [b for b in BLOCKS if b.startswith("def ")]:
        exec(block, known)
    return known


def train(policy: Any, scales: list[float]) -> list[list[Tensor]]:
    """The gradients that the optimizer uses in each step."""
    model = gr.transform(net(), policy)
    optimizer = gr.guard(torch.optim.SGD(model.parameters(), lr=0.0), model)
    found = []
    for scale in scales:
        optimizer.zero_grad()
        (model(torch.ones(1, 3).double()).sum() * scale).backward()
        optimizer.step()
        found.append([p.grad.clone() for p in model.parameters()])
    return found


def test_the_page_has_the_code() -> None:
    assert len(BLOCKS) == 6


def test_the_state_that_is_carried(capsys: pytest.CaptureFixture[str]) -> None:
    (block,) = (b for b in BLOCKS if 'over="iterations"' in b)
    exec(block, {})
    output = capsys.readouterr().out
    assert output.startswith("{'error:l0/h/mean'")
    assert f"```text\n{output}```" in (ROOT / "docs" / "state.md").read_text()


@pytest.mark.broad
@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_adagc(bad: float) -> None:
    scales = [1.0, 3.0, 2.0, bad, 2.5, 9.0, 2.0, 2.1]
    found = train(gr.on("step:*", names(net=net())["adagc"](warmup=3)), scales)
    for position, size in enumerate((6, 2)):  # numbers of elements, all equal
        mean = math.inf
        for step, (scale, gradients) in enumerate(zip(scales, found, strict=True)):
            norm = scale * math.sqrt(size)
            factor = 1.0
            if math.isfinite(norm):
                if step >= 3 and norm > 1.05 * mean:
                    factor = 1.05 * mean / norm
                mean = min(mean, norm) if step < 3 else 0.98 * mean + 0.02 * norm * factor
            wanted = torch.full_like(gradients[position], scale) * factor
            torch.testing.assert_close(gradients[position], wanted, rtol=1e-6, atol=0, equal_nan=True)
        assert 1.0 < mean / math.sqrt(size) < 2.0


def test_the_policy_of_adagc_clips_globally_in_the_warmup() -> None:
    found = train(names(net=net())["adagc_policy"], [5.0, 7.0])
    for gradients in found:
        assert math.sqrt(sum(float(g.square().sum()) for g in gradients)) == pytest.approx(1.0)


def test_gradient_noise() -> None:
    known = names(net=net())
    found, noise = (train(policy, [1.0, 1.0, 1.0]) for policy in (known["noise_policy"], gr.on("step:*", gr.normal)))
    for step, pairs in enumerate(map(zip, found, noise)):
        for gradient, drawn in pairs:
            torch.testing.assert_close(gradient, 1 + math.sqrt(0.01 / (1 + step) ** 0.55) * drawn, rtol=1e-6, atol=0)
