"""``train_step`` in code compiled for a GPU: the numbers of two phases on the CPU, without a wait."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import gradrewrite as gr
from gradrewrite.passes import CheckFinite, ClipByGlobalNorm, ClipByNorm, Observe, SkipSpikes


class Net(nn.Module):
    """Two layers, a batch norm, and a loss."""

    def __init__(self) -> None:
        super().__init__()
        self.one, self.norm, self.two = nn.Linear(8, 16), nn.BatchNorm1d(16), nn.Linear(16, 2)

    def forward(self, x: Tensor) -> Tensor:
        loss: Tensor = self.two(self.norm(self.one(x)).tanh()).square().mean()
        return loss


POLICIES: dict[str, Callable[[], list[Any]]] = {
    "none": list,
    "clips": lambda: [
        gr.on("error:*", [ClipByNorm(0.05), Observe("norm")]),
        gr.on("gradient:*", ClipByGlobalNorm(0.1)),
    ],
    "skips": lambda: [
        gr.on("gradient:*", CheckFinite("skip")),
        gr.on("step:*", [SkipSpikes(3.0), ClipByGlobalNorm(0.1)]),
    ],
}


def batch(number: int, policy: str) -> Tensor:
    x = torch.randn(6, 8, dtype=torch.float64, generator=torch.Generator().manual_seed(number))
    if policy == "skips" and number == 3:
        x[0, 0] = torch.inf
    return x


def trained(
    policy: str, device: str, steps: int = 6, **options: Any
) -> tuple[dict[str, Tensor], dict[str, float], int]:
    torch.manual_seed(0)
    net = Net().double().to(device)
    model = gr.transform(net, POLICIES[policy]())
    fused = {"fused": True} if device == "cuda" else {}
    optimizer = gr.guard(torch.optim.AdamW(model.parameters(), lr=0.01, **fused), model)
    step = gr.train_step(model, optimizer) if device == "cuda" else None
    for number in range(steps):
        x = batch(number, policy).to(device)
        if step is None:
            model(x).backward()
            optimizer.step()
            optimizer.zero_grad()
            continue
        torch.cuda.set_sync_debug_mode("error" if number > 1 else "default")
        step(x)
        torch.cuda.set_sync_debug_mode("default")
    state = {name: t.detach().cpu() for name, t in net.state_dict().items()}
    return state, model.monitor.latest(), model.monitor.skipped


@pytest.mark.parametrize("policy", POLICIES)
def test_numbers_without_a_wait(policy: str) -> None:
    state, latest, skipped = trained(policy, "cuda")
    wanted, wanted_latest, wanted_skipped = trained(policy, "cpu")
    assert skipped == wanted_skipped == (policy == "skips")
    for name, t in wanted.items():
        if name != "one.bias":  # its gradient is a rounding error in front of a batch norm
            torch.testing.assert_close(state[name], t, rtol=1e-6, atol=1e-8)
    assert list(latest) == list(wanted_latest)
    finite = {key: value for key, value in wanted_latest.items() if "one.bias" not in key}
    assert {key: latest[key] for key in finite} == pytest.approx(finite, rel=1e-5, abs=1e-9, nan_ok=True)
