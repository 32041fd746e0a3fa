"""Launches that KeepZeros adds to a step of a GPT with four layers, at ops by element and at all ops."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import gradrewrite as gr
from gradrewrite.passes import KeepZeros

from gpu.launch_counts import WIDTH
from models.gpt import Gpt, batch

LAYERS = 4
PRODUCTS = ("linear", "scaled_dot_product_attention")


def by_element(site: gr.Site) -> Any:
    return KeepZeros() if site.kind == "backward" and site.op not in PRODUCTS else None


def launches(policy: Any) -> int:
    """Return the launches and other operations of a forward and backward, after another one."""
    from gpu.device import simulated_gpu  # imports triton

    with simulated_gpu(90) as gpu:
        with torch.device("cuda"):
            model, args = Gpt(LAYERS, WIDTH, vocabulary=1000, context=128), batch(8, 128, 1000, "cuda")
        if policy is None:
            model.compile()
        else:
            model = gr.transform(model, policy).compile()
        for _ in range(2):
            model.zero_grad()
            begin = gpu.count()
            model(*args).backward()
        found = gpu.count() - begin
        return found.launches + found.operations


@pytest.mark.sample(3)
def test_launches_by_layer() -> None:
    plain = launches(None)

    assert launches(by_element) <= plain
    assert launches(gr.on("backward:*/*", KeepZeros())) <= plain + 3 * LAYERS
