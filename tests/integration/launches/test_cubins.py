"""Every kernel of rewritten graphs compiles for A100 and H100."""

from __future__ import annotations

import pytest
import torch

import gradrewrite as gr
from gradrewrite.passes import CheckFinite, ClipByGlobalNorm, ClipByValue, Observe

from models.gpt import Attention, Mlp

POLICY = [
    gr.on("error:*", [ClipByValue(1e-3, log=True), CheckFinite("skip")]),
    gr.on("gradient:*", [Observe("norm", "zeros"), ClipByGlobalNorm(1.0)]),
]


@pytest.mark.parametrize("capability", [80, 90])
@pytest.mark.parametrize("make", [lambda: Mlp(256), lambda: Attention(256, 4)], ids=["mlp", "attention"])
def test_kernels_compile(make: type[torch.nn.Module], capability: int) -> None:
    from gpu.device import compile_to_cubins, simulated_gpu  # imports triton

    with simulated_gpu(capability) as gpu:
        model = gr.transform(make().cuda(), POLICY)
        model.compile()
        x = torch.randn(8, 128, 256, device="cuda", requires_grad=True)
        model(x).square().sum().backward()
        model.zero_grad()

    assert gpu.launches
    assert compile_to_cubins(gpu.kernels, capability) >= len(gpu.kernels) > 5
