"""Launches of a training step on the simulated GPU, over those of plain torch.compile."""

from __future__ import annotations

import pytest

from gpu.launch_counts import DTYPES, MODELS, POLICIES, added

# What is more today.
MISSED: dict[tuple[str, str, str], int] = {
    ("attention", "float32", "three statistics"): 5,
    ("attention", "bfloat16", "three statistics"): 5,
    ("gpt", "float32", "three statistics"): 6,
}


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", MODELS)
def test_launches(name: str, dtype: str, policy: str) -> None:
    bound = POLICIES[policy][1]
    missed = MISSED.get((name, dtype, policy), 0)
    found = added(name, dtype, policy)

    assert found <= bound + missed
    if missed:
        assert found > bound, "the bound is held now: take it out of MISSED"
