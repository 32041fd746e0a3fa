"""Forty cuts of ten kinds in twenty architectures: ``audit`` names parameters, op and line."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

import gradrewrite as gr

from conformance.test_zoo import Given, given
from models.cuts import KINDS, choose, gradient_sizes, modules_to_cut, planted, without_gradient

ARCHITECTURES = (
    "BertForMaskedLM", "GPT2LMHeadModel", "T5ForConditionalGeneration", "LlamaForCausalLM", "GraniteForCausalLM",
    "PoolFormerForImageClassification", "ViTForImageClassification", "ResNetForImageClassification",
    "ConvNextForImageClassification",
    "BartForConditionalGeneration", "OPTForCausalLM", "BloomForCausalLM", "GPTNeoXForCausalLM", "AlbertForMaskedLM",
    "ElectraForMaskedLM", "DistilBertForSequenceClassification", "SiglipModel", "PhiForCausalLM", "Qwen2ForCausalLM",
    "SwinForImageClassification",
)  # fmt: skip
CASES = [(name, kind, n) for n, kind in enumerate(2 * [*KINDS, *KINDS]) for name in [ARCHITECTURES[n // 2]]]


@pytest.mark.parametrize(("name", "kind", "seed"), CASES, ids=[f"{name}-{kind}" for name, kind, _ in CASES])
def test_parameters_op_and_line_of_a_planted_cut_are_named(name: str, kind: str, seed: int) -> None:
    case = given(f"transformers.{name}")
    model, cut = case.model.to(torch.float64), KINDS[kind]
    inputs = {n: t.to(torch.float64) if _is_floating(t) else t for n, t in case.inputs.items()}

    def run() -> Tensor:
        return loss_of(case, model(**inputs))

    module = choose(modules_to_cut(model, run), seed)
    before = gradient_sizes(model, run)
    with planted(model.get_submodule(module), cut):
        expected = without_gradient(model, run, before)
        model.zero_grad()
        found = gr.audit(model, compute_loss=lambda m, **kwargs: loss_of(case, m(**kwargs)), **inputs)

    assert expected
    assert {row.name for row in found.rows if row.verdict == "no gradient"} == expected
    rows = [row for row in found.rows if row.name in expected]
    assert {row.op for row in rows} == {cut.op}
    assert all(cut.line in row.line and "cuts.py" in row.line for row in rows)
    (cause,) = found.causes
    assert (cause.kind, cause.source) == ("no gradient", rows[0].line)


def loss_of(case: Given, output: Any) -> Tensor:
    assert case.loss is not None
    return case.loss(output)


def _is_floating(value: Any) -> bool:
    return isinstance(value, Tensor) and value.is_floating_point()
