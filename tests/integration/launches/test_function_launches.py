"""Launches of actions at one use, and of functions that read other values, on a GPT with four layers."""

from __future__ import annotations

import torch
from torch import Tensor

import gradrewrite as gr
from gradrewrite.passes import ClipByValue

from gpu.launch_counts import launches_of_layers


def gate(g: Tensor, *, of: Tensor) -> Tensor:
    return torch.where(of > 0, g, 0.5 * g)


def add_part(g: Tensor, *, of: Tensor) -> Tensor:
    return g + 0.1 * of


def test_a_clip_of_one_use_has_no_launch() -> None:
    plain = launches_of_layers([])

    assert launches_of_layers(gr.on("error:blocks.*/add->blocks.*.norm2", ClipByValue(1e-3))) <= plain


def test_a_value_that_is_read_has_no_launch() -> None:
    alone = launches_of_layers(gr.on("error:blocks.*.mlp.up", lambda g: torch.where(g > 0, g, 0.5 * g)))
    of_activation = gr.on("error:blocks.*.mlp.up", gr.call(gate, reads={"of": "activation:{name}"}))
    of_parameter = gr.on("gradient:blocks.*.weight", gr.call(add_part, reads={"of": "param:{name}"}))

    assert launches_of_layers(of_activation) <= alone
    assert launches_of_layers(of_parameter) <= launches_of_layers(
        gr.on("gradient:blocks.*.weight", lambda g, p: g + 0.1 * p)
    )


def test_a_draw_has_the_launches_of_a_state() -> None:
    count = gr.State((2,), dtype=torch.int64)

    def counted(g: Tensor) -> Tensor:
        count.set(count.value + torch.arange(2, device=g.device))
        return torch.where(g > 0, g, 0.5 * g)

    drawn = launches_of_layers(gr.on("error:blocks.*.mlp.up", lambda g: g * gr.bernoulli(0.5, g)))
    assert drawn <= launches_of_layers(gr.on("error:blocks.*.mlp.up", counted))
