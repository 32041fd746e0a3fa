"""Training steps as one graph equal two phases, both compiled."""

from __future__ import annotations

import pytest

from models.training_meetings import MEETINGS, meet
from models.training_steps import OPTIMIZERS, POLICIES, train


@pytest.mark.sample(12)
@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_steps_equal_two_phases(optimizer: str, policy: str) -> None:
    train(optimizer, policy, compiled=True, near=1e-6)


@pytest.mark.sample(12)
@pytest.mark.parametrize("name", MEETINGS)
def test_a_meeting(name: str) -> None:
    meet(name, compiled=True, near=1e-6)
