"""Torch's ModuleInfo database, per example: the terms of a loop over examples, or a ``PolicyError``."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from conformance.examples import Examples, check_first, find_examples
from conformance.outcomes import check_outcome
from conformance.test_module_db import MODULES, samples_of
from conformance.test_per_example_ops import Scaled

SUITE = "per_example_modules"
CASES = list(MODULES)


def examples_of(make: Any, inputs: list[Any]) -> Examples | None:
    """The module on its first tensor; one without parameters is given an input that is multiplied by one."""
    tensors = [n for n, t in enumerate(inputs) if isinstance(t, Tensor)]
    usable = [n for n in tensors if inputs[n].dim() and inputs[n].shape[0] > 1 and inputs[n].numel()]
    if not usable:
        return None
    has_parameters = any(p.requires_grad for p in make().parameters())
    if has_parameters:
        return find_examples(make, inputs, usable[0])
    place = next((n for n in usable if inputs[n].is_floating_point()), None)
    return None if place is None else find_examples(scaled(make, place, inputs[place].shape[1:]), inputs, place)


def scaled(make: Any, place: int, size: torch.Size) -> Any:
    return lambda: Scaled(make(), place, size)


def check(name: str) -> None:
    with torch._dynamo.config.patch(allow_rnn=True):
        found = (examples_of(make, inputs) for make, inputs in samples_of(MODULES[name], 6))
        check_first(e for e in found if e is not None)


@pytest.mark.slow
@pytest.mark.sample(12)
@pytest.mark.parametrize("name", CASES)
def test_equal_to_a_loop_or_refused(name: str) -> None:
    check_outcome(SUITE, name, lambda: check(name))
