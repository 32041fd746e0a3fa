"""Training steps as one graph meet every kind of site and action: each equals two phases, and shows that it acts."""

from __future__ import annotations

import pytest

from models.training_meetings import MEETINGS, meet


@pytest.mark.sample(6)
@pytest.mark.parametrize("name", MEETINGS)
def test_a_meeting(name: str) -> None:
    meet(name)
