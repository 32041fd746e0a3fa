"""Functions that call composite operators, which work in place inside: equal as hooks, op by op and compiled."""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping

import pytest
import torch
from torch import Tensor, nn

import gradrewrite as gr

KNOWN = torch.linspace(-1.0, 1.0, 9, dtype=torch.float64)


def clip_at_quantile(g: Tensor) -> Tensor:
    bound = torch.quantile(g.abs().flatten(), 0.9)
    return g.clamp(-bound, bound)


def clip_at_known_quantile(g: Tensor) -> Tensor:
    bound = torch.quantile(KNOWN, 0.7)  # written in place: what is computed from a closed-over tensor alone
    return g.clamp(-bound, bound)


def write_in_place(g: Tensor) -> Tensor:
    h = g.clone()
    h[..., 0] = 0.0
    return h.lerp_(g, 0.25).mul_(2.0)


FUNCTIONS: Mapping[str, Callable[[Tensor], Tensor]] = {
    "quantile": clip_at_quantile,
    "known quantile": clip_at_known_quantile,
    "nanquantile": lambda g: g.clamp(max=torch.nanquantile(g.flatten(), 0.6)),
    "nanmean": lambda g: g - g.nanmean(),
    "cosine": lambda g: g * nn.functional.cosine_similarity(g.flatten(), g.flatten().sin(), dim=0),
    "rms_norm": lambda g: nn.functional.rms_norm(g, g.shape[-1:]),
    "isclose": lambda g: torch.where(torch.isclose(g, g.mean(), rtol=0.5), torch.zeros_like(g), g),
    "own writes": write_in_place,
    "circular padding": lambda g: nn.functional.pad(g.reshape(1, 1, -1), (1, 0), mode="circular")[0, 0, 1:].view_as(g),
    "hinge": lambda g: g * nn.functional.hinge_embedding_loss(g, torch.ones_like(g)),
}


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleDict({name.replace(" ", "_"): nn.Linear(4, 4) for name in FUNCTIONS})

    def forward(self, x: Tensor) -> Tensor:
        return torch.stack([layer(x).sin().square().sum() for layer in self.layers.values()]).sum()


@pytest.fixture(scope="module")
def gradients() -> dict[str, dict[str, Tensor | None]]:
    """By the way of running: as hooks, op by op, compiled; each function acts in a layer of its own."""
    torch.manual_seed(0)
    plain, x = Net().double(), torch.randn(5, 4, dtype=torch.float64)
    policy = [
        gr.on(f"{kind}:layers.{name.replace(' ', '_')}{end}", f)
        for name, f in FUNCTIONS.items()
        for kind, end in (("error", ""), ("gradient", ".weight"))
    ]
    found = {}
    for way in ("hooks", "op by op", "compiled"):
        model = copy.deepcopy(plain)
        run: nn.Module = model
        if way == "hooks":
            for name, f in FUNCTIONS.items():
                layer = model.layers[name.replace(" ", "_")]
                layer.register_forward_hook(lambda _m, _a, y, f=f: [y.register_hook(f), y][1])
                layer.weight.register_hook(f)
        else:
            run = gr.transform(model, policy)
        if way == "compiled":
            run.compile()
        run(x).backward()
        found[way] = {name: p.grad for name, p in model.named_parameters()}
    return found


@pytest.mark.parametrize("way", ["op by op", "compiled"])
@pytest.mark.parametrize("name", FUNCTIONS)
def test_composites(name: str, way: str, gradients: dict[str, dict[str, Tensor | None]]) -> None:
    for part in ("weight", "bias"):
        key = f"layers.{name.replace(' ', '_')}.{part}"
        torch.testing.assert_close(gradients[way][key], gradients["hooks"][key], rtol=1e-9, atol=1e-12)
