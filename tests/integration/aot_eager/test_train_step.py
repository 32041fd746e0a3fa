"""Training steps as one graph equal two phases, op by op: every optimizer with the kinds of policies, 20 steps."""

from __future__ import annotations

import pytest

from models.training_steps import OPTIMIZERS, POLICIES, train


@pytest.mark.sample(6)
@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_steps_equal_two_phases(optimizer: str, policy: str) -> None:
    pair = train(optimizer, policy)

    assert policy != "plain" or pair.losses[-1] < pair.losses[0]
