"""Rules at the backward of every differentiable op of torch's OpInfo database."""

from __future__ import annotations

import pytest

from conformance.op_backwards import RULES, NotCoveredError, check_planted, gradients, is_same, planted
from conformance.op_db import DIFFERENTIABLE, samples_of

# Entries that the tracer refuses, or that have no op of their own.
REFUSED = {"cov", "corrcoef", "pca_lowrank", "nn.functional.ctc_loss", "linalg.lstsq", "nn.functional.dropout"}
CASES = [name for name in DIFFERENTIABLE if name not in REFUSED]


@pytest.mark.slow
@pytest.mark.sample(12)
@pytest.mark.parametrize("name", CASES)
def test_finite_gradients_keep_their_bits(name: str) -> None:
    for module, inputs in samples_of(DIFFERENTIABLE[name], 1):
        plain, _ = gradients(module, inputs, [])
        for rule in RULES.values():
            found, _ = gradients(module, inputs, rule)
            assert all(map(is_same, found, plain))
            assert len(found) == len(plain)


# Weights that a mask makes 0 meet the infinity in the backward of the op itself: its errors are not 0.
BY_CANCELLATION = {"nn.functional.scaled_dot_product_attention"}


@pytest.mark.slow
@pytest.mark.sample(12)
@pytest.mark.parametrize("name", [name for name in CASES if name not in BY_CANCELLATION])
def test_infinities_with_errors_of_zero(name: str) -> None:
    for case in planted(name):
        try:
            check_planted(case)
        except NotCoveredError:  # explain() says so
            continue
