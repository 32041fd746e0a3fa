"""Torch's OpInfo database: clips at the inputs and outputs of every differentiable op against hooks."""

from __future__ import annotations

import pytest

from conformance.op_db import DIFFERENTIABLE, samples_of
from conformance.outcomes import check_outcome
from conformance.reference import Comparison, check_samples

SUITE = "op_db"
CASES = list(DIFFERENTIABLE)


def check(name: str) -> None:
    samples = samples_of(DIFFERENTIABLE[name])
    check_samples(Comparison(lambda module=module: module, inputs) for module, inputs in samples)


@pytest.mark.slow
@pytest.mark.sample(12)
@pytest.mark.parametrize("name", CASES)
def test_clips_and_checks(name: str) -> None:
    check_outcome(SUITE, name, lambda: check(name))
