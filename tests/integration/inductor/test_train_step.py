"""Training steps as one graph equal two phases, both compiled."""

from __future__ import annotations

import pytest

from models.training_steps import OPTIMIZERS, POLICIES, train


@pytest.mark.sample(12)
@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_steps_equal_two_phases(optimizer: str, policy: str) -> None:
    train(optimizer, policy, compiled=True, near=1e-6)
