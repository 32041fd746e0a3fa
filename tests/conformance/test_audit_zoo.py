"""``audit`` is silent on sound models: those of transformers, timm, diffusers and torch_geometric."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

import gradrewrite as gr
from gradrewrite.auditing.constants import vanishing_constants
from gradrewrite.auditing.step_graphs import trace_step
from gradrewrite.errors import TraceError

from conformance.outcomes import TorchRefusesError
from conformance.test_zoo import CASES, given, raise_if_torch_refuses

# Frozen and unused parts are these models' own; nothing of them is a fault.
TRAINED = ("trained", "frozen", "unused", "zero so far", "zero up to rounding")


@pytest.mark.filterwarnings("ignore")  # of the models
@pytest.mark.parametrize("name", CASES)
def test_a_sound_model_has_no_fault(name: str) -> None:
    case = given(name)
    loss = case.loss
    try:
        found = gr.audit(
            case.model, compute_loss=None if loss is None else lambda m, **kwargs: loss(m(**kwargs)), **case.inputs
        )
    except (TraceError, *torch_errors()) as err:
        try:
            raise_if_torch_refuses(case, err)
        except TorchRefusesError as refusal:
            pytest.skip(f"torch.compile refuses it: {refusal}")
        raise

    assert not found.causes, str(found)
    assert {row.verdict for row in found.rows} <= {*TRAINED}
    assert any(row.verdict == "trained" for row in found.rows)


@pytest.mark.filterwarnings("ignore")  # of the models
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("name", CASES)
def test_no_constant_of_a_sound_model_vanishes(name: str, dtype: torch.dtype) -> None:
    case = given(name)
    inputs = {n: t.to(dtype) if is_floating(t) else t for n, t in case.inputs.items()}
    try:
        step = trace_step(case.model.to(dtype), None, (), inputs)
    except (TraceError, RuntimeError, *torch_errors()) as err:
        pytest.skip(f"torch cannot trace it in {dtype}: {type(err).__name__}")

    assert vanishing_constants(graph.gm for graph in step.graphs) == []


def is_floating(value: Any) -> bool:
    return isinstance(value, Tensor) and value.is_floating_point()


def torch_errors() -> tuple[type[Exception], ...]:
    return (torch._dynamo.exc.TorchDynamoException,)
