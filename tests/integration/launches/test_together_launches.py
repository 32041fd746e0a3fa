"""Launches of one function for the gradients of a GPT with four layers, beside those of ClipByGlobalNorm."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

import gradrewrite as gr
from gradrewrite.passes import ClipByGlobalNorm

from gpu.launch_counts import launches_of_layers

ARITHMETIC = 2  # on scalars: the norm of the norms, and the factor


def by_total(gradients: Mapping[str, Tensor]) -> dict[str, Tensor]:
    total = torch.stack([torch.linalg.vector_norm(g, dtype=torch.float64) for g in gradients.values()]).norm()
    factor = (1.0 / total).clamp(max=1.0)
    return {name: (g * factor).to(g.dtype) for name, g in gradients.items()}


def test_a_global_figure_costs_what_the_global_clip_does() -> None:
    clip = launches_of_layers(gr.on("gradient:*", ClipByGlobalNorm(1.0)))

    assert launches_of_layers(gr.together("gradient:*", by_total)) <= clip + ARITHMETIC
