"""Rules at the backward of every differentiable op of torch's OpInfo database."""

from __future__ import annotations

import pytest
from torch.testing._internal.opinfo.core import BinaryUfuncInfo, ReductionOpInfo, UnaryUfuncInfo

from conformance.op_backwards import RULES, NotCoveredError, check_planted, gradients, is_same, planted
from conformance.op_db import DIFFERENTIABLE, samples_of

pytestmark = pytest.mark.filterwarnings("ignore")  # of ops that are deprecated, or in beta
# The tracer refuses them, they read a sparse tensor, or (dropout of probability 0) have no op of their own.
REFUSED = {
    "cov", "corrcoef", "pca_lowrank", "nn.functional.ctc_loss", "linalg.lstsq", "nn.functional.dropout",
    "sparse.sampled_addmm", "svd_lowrank", "to_sparse", "nn.functional.gaussian_nll_loss", "linalg.lstsq.grad_oriented",
}  # fmt: skip
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


KINDS = (UnaryUfuncInfo, BinaryUfuncInfo, ReductionOpInfo)
PRODUCTS = (
    "mm", "bmm", "matmul", "mv", "dot", "vdot", "inner", "outer", "einsum", "tensordot", "addmm", "addbmm", "baddbmm",
    "addmv", "addr", "kron", "nn.functional.linear", "linalg.vecdot", "linalg.multi_dot", "__rmatmul__",
)  # fmt: skip
FOLLOWED = [
    name
    for name, op in DIFFERENTIABLE.items()
    if isinstance(op, KINDS) or name.partition(".decomposed")[0] in PRODUCTS or "softmax" in name or "norm" in name
]


@pytest.mark.slow
@pytest.mark.sample(12)
@pytest.mark.parametrize("name", [name for name in FOLLOWED if name not in {*REFUSED, "chalf"}])
def test_infinities_with_errors_of_zero(name: str) -> None:
    for case in planted(name):
        try:
            check_planted(case)
        except NotCoveredError:  # explain() says so
            continue
