"""Launches of factors of examples on a GPT with four layers, beside those of a clip of each."""

from __future__ import annotations

import gradrewrite as gr
from gradrewrite.passes import ClipPerExample, WeighExamples

from gpu.launch_counts import launches_of_layers


def test_factors_of_a_function_cost_what_a_clip_does() -> None:
    clip = launches_of_layers(gr.on("gradient:*", ClipPerExample(1.0)))

    assert launches_of_layers(gr.on("gradient:*", WeighExamples(lambda n: (1.0 / n).clamp(max=1)))) <= clip
