"""The gradients of several losses, weighed in one backward, are those of one backward a loss, weighed by TorchJD."""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torchjd.aggregation as jd
from torch import Tensor, nn

import gradrewrite as gr
from gradrewrite.passes import MGDA, AlignedMTL, CAGrad, PCGrad, UPGrad, WeighLosses

from helpers import mostly_slow
from models.architectures import ARCHITECTURES, FURTHER, Architecture, Loss
from models.several_losses import MODULES, assert_equal_gradients, eager_gradients, losses_of, make

CASES = [case for case in (*ARCHITECTURES, *FURTHER) if not case.obstacle]
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
    from gradrewrite.numerics.loss_weights import order_of_projections

    rows = iter(order_of_projections(torch.tensor(0), seed, number).unbind())
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch, "randperm", lambda _: next(rows))
        yield


def check(name: str, weighting: str) -> dict[str, float]:
    plain, x = make(name)
    ours, theirs, tolerance = WEIGHTINGS[weighting]
    number = len(losses_of(plain(x)))
    reference = copy.deepcopy(plain)
    with order_of(3, number):
        expected, weights = eager_gradients(reference, x, "trunk", theirs)
    model = gr.transform(copy.deepcopy(plain), gr.on("gradient:trunk*", WeighLosses(ours)))
    sum(losses_of(model(x)), torch.zeros(())).backward()
    found = model.monitor.latest()
    got = torch.tensor([found[f"loss_weight_{k}@group:default"] for k in range(number)], dtype=torch.float64)
    torch.testing.assert_close(got, weights, rtol=tolerance, atol=tolerance)
    assert_equal_gradients(model, expected, tolerance)
    return found


@pytest.mark.broad
@pytest.mark.parametrize("name", MODULES)
def test_pcgrad_equals_torchjd(name: str) -> None:
    check(name, "PCGrad")


@pytest.mark.long
@pytest.mark.parametrize("weighting", ["UPGrad", "MGDA", "CAGrad", "AlignedMTL"])
@pytest.mark.parametrize("name", mostly_slow(MODULES, 3))
def test_weightings_equal_torchjd(name: str, weighting: str) -> None:
    check(name, weighting)


class TwoLosses(nn.Module):
    """The loss of a library's model, and one of its largest output."""

    def __init__(self, trunk: nn.Module, loss: Loss) -> None:
        super().__init__()
        self.trunk, self.loss = trunk, loss

    def forward(self, **inputs: Any) -> tuple[Tensor, Tensor]:
        out = self.trunk(**inputs)
        largest = None
        for value in out.values():
            if isinstance(value, Tensor) and value.requires_grad and value.dim():
                largest = value if largest is None or value.numel() > largest.numel() else largest
        assert largest is not None
        return self.loss(out, inputs), largest.square().mean()


@pytest.mark.long
@pytest.mark.filterwarnings("ignore:Dynamo detected a call to a `functools.lru_cache`-wrapped:UserWarning")
@pytest.mark.filterwarnings("ignore::FutureWarning:transformers")
@pytest.mark.filterwarnings("ignore:Initializing zero-element tensors:UserWarning")
@pytest.mark.parametrize("case", mostly_slow(CASES, 4), ids=lambda case: f"{case.name}{case.variant}")
def test_architectures(case: Architecture) -> None:
    pytest.importorskip("transformers", reason="transformers is not installed")
    torch.manual_seed(0)
    plain, inputs = TwoLosses(case.make(), case.loss), case.make_inputs()
    if case.prepare is not None:
        case.prepare(plain.trunk, inputs)
    reference = copy.deepcopy(plain)
    torch.manual_seed(1)
    expected, _ = eager_gradients(reference, inputs, "trunk", inverse_norms)
    model = gr.transform(plain, gr.on("gradient:trunk*", WeighLosses(inverse_norms)))
    torch.manual_seed(1)
    sum(losses_of(model(**inputs)), torch.zeros(())).backward()

    assert_equal_gradients(model, expected, 1e-8 if case.dtype is torch.float64 else 1e-3)


def inverse_norms(gramian: Tensor) -> Tensor:
    return 1 / gramian.diagonal().sqrt()
