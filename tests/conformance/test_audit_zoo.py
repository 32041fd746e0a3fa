"""``audit`` is silent on sound models: those of transformers, timm, diffusers and torch_geometric."""

from __future__ import annotations

import pytest
import torch

import gradrewrite as gr
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


def torch_errors() -> tuple[type[Exception], ...]:
    return (torch._dynamo.exc.TorchDynamoException,)
