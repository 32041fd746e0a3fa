"""Weightings of losses: settings, errors, the count of backwards; their numbers are tested in unit/ir."""

from __future__ import annotations

import math
import pickle
from dataclasses import FrozenInstanceError
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import gradrewrite as gr
from gradrewrite.errors import PolicyError
from gradrewrite.numerics import loss_weights
from gradrewrite.passes import MGDA, AlignedMTL, CAGrad, PCGrad, UPGrad

WEIGHTINGS = (PCGrad(), UPGrad(), MGDA(), CAGrad(), AlignedMTL())
ROWS = torch.tensor([[1.0, 2.0, 0.0], [-2.0, 1.0, 1.0], [0.5, -3.0, 1.0], [1.0, 0.0, -4.0]], dtype=torch.float64)
GRAMIAN = ROWS @ ROWS.T


@pytest.mark.pure
@pytest.mark.parametrize(
    ("weighting", "text"),
    [
        (PCGrad(), "PCGrad()"),
        (PCGrad(3), "PCGrad(seed=3)"),
        (UPGrad(reg_eps=1e-4), "UPGrad(reg_eps=0.0001)"),
        (MGDA(max_iters=20), "MGDA(max_iters=20)"),
        (CAGrad(0.4, norm_eps=1e-4), "CAGrad(c=0.4, norm_eps=0.0001)"),
        (AlignedMTL(scale_mode="rmse"), "AlignedMTL(scale_mode='rmse')"),
    ],
)
def test_weightings_are_values(weighting: Any, text: str) -> None:
    assert repr(weighting) == text
    assert eval(text) == weighting
    assert pickle.loads(pickle.dumps(weighting)) == weighting
    assert len({weighting, eval(text)}) == 1
    with pytest.raises((FrozenInstanceError, TypeError)):  # frozen; slots make it a TypeError in Python 3.10
        weighting.other = 1


@pytest.mark.pure
@pytest.mark.parametrize(
    ("make", "kind", "message"),
    [
        (lambda: PCGrad(-1), ValueError, "PCGrad: seed is in"),
        (lambda: PCGrad(2**63), ValueError, "PCGrad: seed is in"),
        (lambda: PCGrad(0.5), TypeError, "PCGrad: seed is a whole number, got 0.5"),
        (lambda: PCGrad(True), TypeError, "PCGrad: seed is a whole number, got True"),
        (lambda: UPGrad(norm_eps=-1e-9), ValueError, "UPGrad: norm_eps must be >= 0 and finite"),
        (lambda: UPGrad(reg_eps=math.nan), ValueError, "UPGrad: reg_eps must be >= 0 and finite"),
        (lambda: UPGrad(reg_eps="1"), TypeError, "UPGrad: reg_eps is a number, got '1'"),
        (lambda: MGDA(epsilon=0.0), ValueError, "MGDA: epsilon must be > 0"),
        (lambda: MGDA(max_iters=0), ValueError, "MGDA: max_iters must be >= 1"),
        (lambda: MGDA(max_iters=1.5), TypeError, "MGDA: max_iters is a whole number"),
        (lambda: CAGrad(-0.1), ValueError, "CAGrad: c must be >= 0 and finite"),
        (lambda: CAGrad(math.inf), ValueError, "CAGrad: c must be >= 0 and finite"),
        (lambda: CAGrad(torch.ones(())), TypeError, "CAGrad: c is a number"),
        (lambda: AlignedMTL(scale_mode="max"), ValueError, 'scale_mode is "min", "median" or "rmse", got \'max\''),
    ],
)
def test_wrong_settings_raise(make: Any, kind: type[Exception], message: str) -> None:
    with pytest.raises(kind, match=message):
        make()


@pytest.mark.pure
def test_numbers_of_numpy_are_settings() -> None:
    assert CAGrad(np.float32(0.5)) == CAGrad(0.5)
    assert type(PCGrad(np.int64(3)).seed) is int


@pytest.mark.pure
@pytest.mark.parametrize("weighting", WEIGHTINGS, ids=repr)
def test_a_matrix_that_is_no_gramian_raises(weighting: Any) -> None:
    for shape in ((3,), (2, 3), (0, 0), (1, 2, 2)):
        with pytest.raises(ValueError, match=rf"a Gram matrix is \[K, K\] with K >= 1, got shape \({shape[0]},"):
            weighting.weights(torch.ones(shape, dtype=torch.float64))


@pytest.mark.pure
@pytest.mark.parametrize("weighting", [UPGrad(), CAGrad()], ids=repr)
def test_ten_losses_are_the_most_of_those_that_look_at_all_sets(weighting: Any) -> None:
    assert weighting.weights(torch.eye(10, dtype=torch.float64)).isfinite().all()
    with pytest.raises(PolicyError, match="got 11 losses, and it looks at all sets of at most 10"):
        weighting.weights(torch.eye(11, dtype=torch.float64))


@pytest.mark.pure
@pytest.mark.parametrize("weighting", WEIGHTINGS, ids=repr)
def test_weights_are_of_float64_and_as_many_as_losses(weighting: Any) -> None:
    weights = weighting.weights(GRAMIAN)

    assert (weights.shape, weights.dtype) == ((4,), torch.float64)
    assert weights.isfinite().all()


@pytest.mark.pure
def test_settings_reach_the_algorithms() -> None:
    def differ(one: Any, other: Any, gramian: Tensor = GRAMIAN) -> bool:
        return not torch.allclose(one.weights(gramian), other.weights(gramian))

    small = GRAMIAN * 1e-6
    assert differ(UPGrad(), UPGrad(reg_eps=0.1))
    assert differ(UPGrad(), UPGrad(norm_eps=1e-4), small)
    assert differ(MGDA(), MGDA(max_iters=1))
    assert differ(MGDA(), MGDA(epsilon=0.9))
    assert differ(CAGrad(), CAGrad(0.4))
    assert differ(CAGrad(), CAGrad(norm_eps=1e-4), small)
    assert differ(AlignedMTL(), AlignedMTL(scale_mode="median"))
    assert differ(AlignedMTL(), AlignedMTL(scale_mode="rmse"))
    assert len({tuple(PCGrad(seed).weights(GRAMIAN).tolist()) for seed in range(20)}) > 3


def trained(steps: int, state: Any = None) -> tuple[list[list[float]], Any]:
    """Weights of steps in which a function at one site weighs, and the state after them."""
    weighting = PCGrad(seed=4)

    def weigh(g: Tensor) -> Tensor:
        weights = weighting.weights(GRAMIAN.to(g.device) + 0 * g.sum().double())
        for number, weight in enumerate(weights.unbind()):
            gr.record(f"loss_weight_{number}", weight)
        return g

    model = gr.transform(nn.Linear(2, 2), gr.on("gradient:weight", weigh))
    if state is not None:
        gr.load_state_dict(model, state)
    for _ in range(steps):
        model(torch.ones(1, 2)).sum().backward()
    histories = [model.monitor.history(f"loss_weight_{number}@gradient:weight") for number in range(4)]
    return [list(step) for step in zip(*histories, strict=True)], gr.state_dict(model)


@pytest.mark.broad
def test_the_order_follows_from_seed_and_backward_and_is_saved() -> None:
    counts = range(6)
    wanted = [loss_weights.OP_PCGRAD(GRAMIAN, torch.tensor(count), 4).tolist() for count in counts]
    whole, _ = trained(6)
    first, state = trained(3)
    rest, _ = trained(3, state)

    assert state["states"]["gradient:weight/PCGrad.count"].item() == 3
    assert len({tuple(one) for one in wanted}) > 3  # the order matters
    torch.testing.assert_close(torch.tensor(whole), torch.tensor(wanted), rtol=1e-6, atol=1e-6)
    assert first + rest == whole
