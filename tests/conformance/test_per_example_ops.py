"""Torch's OpInfo database, per example: of ``op(x * weight)`` the terms of a loop, or a ``PolicyError``."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from conformance.examples import Examples, check_first, find_examples
from conformance.op_db import DIFFERENTIABLE, Op, samples_of
from conformance.outcomes import check_outcome

SUITE = "per_example_ops"
# Raw kernels, which check no sizes: with the part of a batch they write where they must not.
RAW = ("torch.ops.", "_native_batch_norm_legit", "_batch_norm_with_update", "native_batch_norm", "lu_unpack")
# Ops that are told the number of examples: there is no loop over single ones to compare with.
TOLD = {"view", "view_copy", "reshape", "native_group_norm"}
CASES = [name for name in DIFFERENTIABLE if not name.startswith(RAW) and name not in TOLD]


class Scaled(nn.Module):
    """An op on an input that is multiplied by a parameter."""

    def __init__(self, op: nn.Module, place: int, size: torch.Size) -> None:
        super().__init__()
        self.op, self.place = op, place
        number = size.numel()
        self.weight = nn.Parameter(torch.linspace(0.9, 1.0, number, dtype=torch.float64).reshape(size))

    def forward(self, *inputs: Tensor) -> Any:
        given = list(inputs)
        given[self.place] = given[self.place] * self.weight
        return self.op(*given)


def examples_of(op: Op, inputs: list[Tensor]) -> Examples | None:
    """The op on the first input that may have examples; None if it has none."""
    candidates = (n for n, t in enumerate(inputs) if t.requires_grad and t.dim() and t.shape[0] > 1 and t.numel())
    place = next(candidates, None)
    if place is None:
        return None
    size = inputs[place].shape[1:]
    return find_examples(lambda: Scaled(op, place, size), inputs, place)


def check(name: str) -> None:
    found = (examples_of(op, inputs) for op, inputs in samples_of(DIFFERENTIABLE[name], 12))
    check_first(itertools.islice((e for e in found if e is not None), 6))


@pytest.mark.slow
@pytest.mark.sample(12)
@pytest.mark.parametrize("name", CASES)
def test_equal_to_a_loop_or_refused(name: str) -> None:
    check_outcome(SUITE, name, lambda: check(name))
