"""The strength of clips by value is measured by the kernels that measure what the log says, on the simulated GPU.

A tensor is read as before. The second stages of all sites of a large graph may need one combined launch more.
"""

from __future__ import annotations

import functools
from typing import Any

import pytest
import torch
from torch import Tensor

import gradrewrite as gr
from gradrewrite.numerics.stages import reduce_all
from gradrewrite.numerics.statistics import largest_of, mean_of, size_of
from gradrewrite.passes import ClipByGlobalNorm, ClipByValue

from gpu.launch_counts import MODELS
from gpu.log import Count


def without_strength(g: Tensor) -> Tensor:
    """A clip by value that records what the log line says, and no more."""
    clipped = torch.clamp(torch.clamp(g, min=-1e-3), max=1e-3)
    size, changed = size_of(g), (clipped != g) & (g == g)
    gr.record("max_abs", largest_of(size))
    gr.record("mean_abs", mean_of(size))
    gr.record("clipped", reduce_all(torch.any, changed).to(size.dtype))
    return clipped


@functools.cache
def step(name: str, pattern: str, action: Any) -> Count:
    from gpu.device import simulated_gpu  # imports triton

    make, inputs = MODELS[name]
    with simulated_gpu(90) as gpu:
        with torch.device("cuda"):
            net, args = make(), inputs()
        model = gr.transform(net, gr.on(pattern, action))
        model.compile()
        for _ in range(3):
            model.zero_grad()
            begin = gpu.count()
            model(*args).backward()
        return gpu.count() - begin


@pytest.mark.parametrize("pattern", ["error:*", "gradient:*"])
@pytest.mark.parametrize("name", ["mlp", "attention", "gpt"])
def test_strength_of_a_clip_by_value(name: str, pattern: str) -> None:
    plain, ours = step(name, pattern, without_strength), step(name, pattern, ClipByValue(1e-3, log=True))

    assert ours.launches <= plain.launches + (name == "gpt")
    assert ours.operations <= plain.operations
    assert ours.size <= 1.01 * plain.size


@pytest.mark.parametrize("name", ["mlp", "gpt"])
def test_shares_of_a_global_clip(name: str) -> None:
    plain, ours = (step(name, "gradient:*", ClipByGlobalNorm(1.0, log=log)) for log in (False, True))

    assert ours.launches <= plain.launches + 1
    assert ours.size <= 1.001 * plain.size
