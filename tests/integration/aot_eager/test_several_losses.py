"""The gradients of several losses, weighed in one backward, are those of one backward a loss, weighed by TorchJD."""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torchjd.aggregation as jd

import gradrewrite as gr
from gradrewrite.passes import MGDA, AlignedMTL, CAGrad, PCGrad, UPGrad, WeighLosses

from helpers import mostly_slow
from models.several_losses import MODULES, assert_equal_gradients, eager_gradients, losses_of, make

# ours, TorchJD's, and the largest difference relative to the largest element
WEIGHTINGS: dict[str, tuple[Any, Any, float]] = {
    "PCGrad": (PCGrad(seed=3), jd.PCGradWeighting(), 1e-8),
    "UPGrad": (UPGrad(norm_eps=1e-4, reg_eps=1e-4), jd.UPGradWeighting(), 1e-6),
    "MGDA": (MGDA(), jd.MGDAWeighting(), 1e-8),
    "CAGrad": (CAGrad(c=0.5, norm_eps=1e-4), jd.CAGradWeighting(c=0.5), 1e-4),
    "AlignedMTL": (AlignedMTL(), jd.AlignedMTLWeighting(), 1e-8),
}


@contextlib.contextmanager
def order_of(seed: int, number: int) -> Iterator[None]:
    """Let TorchJD's PCGrad take our order of the first backward."""
    from gradrewrite.ir.loss_weights import order_of_projections

    rows = iter(order_of_projections(torch.tensor(0), seed, number).unbind())
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch, "randperm", lambda _: next(rows))
        yield


def check(name: str, weighting: str) -> dict[str, float]:
    plain, x = make(name)
    ours, theirs, tolerance = WEIGHTINGS[weighting]
    number = len(losses_of(plain(x)))
    with order_of(3, number):
        expected, weights = eager_gradients(copy.deepcopy(plain), x, "trunk", theirs)
    model = gr.transform(copy.deepcopy(plain), gr.on("gradient:trunk*", WeighLosses(ours)))
    sum(losses_of(model(x)), torch.zeros(())).backward()
    found = model.monitor.latest()
    got = torch.tensor([found[f"loss_weight_{k}@group:default"] for k in range(number)], dtype=torch.float64)
    torch.testing.assert_close(got, weights, rtol=tolerance, atol=tolerance)
    assert_equal_gradients(model, expected, tolerance)
    return found


@pytest.mark.parametrize("name", MODULES)
def test_pcgrad_equals_torchjd(name: str) -> None:
    check(name, "PCGrad")


@pytest.mark.long
@pytest.mark.parametrize("weighting", ["UPGrad", "MGDA", "CAGrad", "AlignedMTL"])
@pytest.mark.parametrize("name", mostly_slow(MODULES, 3))
def test_weightings_equal_torchjd(name: str, weighting: str) -> None:
    check(name, weighting)
