"""Plain clips, policies and comparisons that the oracle tests share."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

import gradrewrite as gr


def clip_value(g: Tensor) -> Tensor:
    return g.clamp(-0.05, 0.05)


def clip_norm(g: Tensor) -> Tensor:
    norm = g.norm()
    return torch.where(norm > 0.1, g * (0.1 / norm), g)


def policy_at(hooked: tuple[str, ...], action: Any) -> gr.Policy:
    return lambda site: action if site.kind == "error" and site.name in hooked else None


def assert_same_gradients(got: dict[str, Tensor | None], expected: dict[str, Tensor | None], rtol: float) -> None:
    assert got.keys() == expected.keys()
    # A gradient that is zero but for rounding (a bias before BatchNorm) is compared with the size of the others.
    scale = max(float(g.abs().max()) for g in expected.values() if g is not None)
    for name, gradient in got.items():
        wanted = expected[name]
        if wanted is None or gradient is None:
            # torch.compile gives zeros where a parameter reaches only outputs that the loss ignores.
            left = gradient if wanted is None else wanted
            assert left is None or not left.any(), name
            continue
        torch.testing.assert_close(gradient, wanted, rtol=rtol, atol=rtol * scale, msg=lambda m, n=name: f"{n}: {m}")
