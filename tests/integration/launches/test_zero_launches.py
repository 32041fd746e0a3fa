"""Launches that KeepZeros adds to a step of a GPT with four layers, at ops by element and at all ops."""

from __future__ import annotations

from typing import Any

import pytest

import gradrewrite as gr
from gradrewrite.passes import KeepZeros

from gpu.launch_counts import LAYERS, launches_of_layers

PRODUCTS = ("linear", "scaled_dot_product_attention")


def by_element(site: gr.Site) -> Any:
    return KeepZeros() if site.kind == "backward" and site.op not in PRODUCTS else None


@pytest.mark.sample(3)
def test_launches_by_layer() -> None:
    plain = launches_of_layers(None)

    assert launches_of_layers(by_element) <= plain
    assert launches_of_layers(gr.on("backward:*/*", KeepZeros())) <= plain + 3 * LAYERS
