"""Norms, second moments and clipped sums of per-example gradients against ``torch.func.grad`` of each example."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

import gradrewrite as gr
from gradrewrite.passes import ClipPerExample, Keep

from models.per_example import MODELS, example_gradients, make

EXACT: dict[str, Any] = {"rtol": 1e-10, "atol": 1e-13}


def names(model: torch.nn.Module) -> list[str]:
    return [name for name, p in model.named_parameters() if p.requires_grad]


def norms_of(terms: dict[str, Tensor]) -> Tensor:
    """The norms of the examples over all parameters."""
    return torch.stack([t.flatten(1).square().sum(1) for t in terms.values()]).sum(0).sqrt()


@pytest.mark.parametrize("name", MODELS)
def test_norms_and_second_moments(name: str) -> None:
    model, inputs = make(name)
    wanted = example_gradients(model, *inputs)
    policy = [gr.on("gradient:*", [Keep("example_norms"), Keep("second_moment")])]
    rewritten = gr.transform(model, policy)
    rewritten(*inputs).backward()
    norms = {site.name: t for site, t in rewritten.monitor.kept("example_norms").items()}
    moments = {site.name: t for site, t in rewritten.monitor.kept("second_moment").items()}
    for parameter, terms in wanted.items():
        torch.testing.assert_close(norms[parameter], terms.flatten(1).norm(dim=1), **EXACT)
        torch.testing.assert_close(moments[parameter], terms.square().mean(0), **EXACT)
        torch.testing.assert_close(model.get_parameter(parameter).grad, terms.mean(0), **EXACT)


@pytest.mark.parametrize("name", MODELS)
def test_clipped_sums(name: str) -> None:
    model, inputs = make(name)
    terms = example_gradients(model, *inputs)
    norms = norms_of(terms)
    bound = float(norms.median()) * 0.99
    rewritten = gr.transform(model, gr.on("gradient:*", ClipPerExample(bound)))
    rewritten(*inputs).backward()
    factors = (bound / norms).clamp(max=1)
    for parameter, own in terms.items():
        wanted = torch.einsum("b,b...->...", factors, own) / len(norms)
        torch.testing.assert_close(model.get_parameter(parameter).grad, wanted, **EXACT)
    records = rewritten.monitor.latest()
    assert records["clipped_share@group:default"] == pytest.approx(float((norms > bound).double().mean()))
    assert records["example_norm_max@group:default"] == pytest.approx(float(norms.max()))
    assert records["example_norm_mean@group:default"] == pytest.approx(float(norms.mean()))
