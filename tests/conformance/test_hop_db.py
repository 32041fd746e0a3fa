"""Torch's databases of higher-order ops and of custom autograd functions: clips at inputs and outputs against hooks."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from unittest import mock

import pytest
from torch.autograd import Function
from torch.testing._internal import autograd_function_db as functions
from torch.testing._internal.hop_db import hop_db

from conformance.op_db import name_of, samples_of
from conformance.outcomes import check_outcome
from conformance.reference import Comparison, check_samples

SUITE = "hop_db"
LEFT_OUT = {"invoke_quant.simple"}  # torch cannot cut its graph in two, and writes files that say so
OPS = {name_of(op): op for op in (*hop_db, *functions.autograd_function_db) if op.supports_autograd}
CASES = [name for name in OPS if name not in LEFT_OUT]


@contextlib.contextmanager
def without_jvp() -> Iterator[None]:
    """Let the custom functions have no formula for the forward mode, with which Dynamo takes none of them."""
    with contextlib.ExitStack() as stack:
        for value in vars(functions).values():
            if isinstance(value, type) and issubclass(value, Function) and value.jvp is not Function.jvp:
                stack.enter_context(mock.patch.object(value, "jvp", Function.jvp))
        yield


def check(name: str) -> None:
    samples = samples_of(OPS[name])
    with without_jvp():
        check_samples(Comparison(lambda module=module: module, inputs) for module, inputs in samples)


@pytest.mark.slow
@pytest.mark.sample(8)
@pytest.mark.parametrize("name", CASES)
def test_clips_and_checks(name: str) -> None:
    check_outcome(SUITE, name, lambda: check(name))
