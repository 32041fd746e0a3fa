"""One use of a value, against hooks of eager autograd on ``value * 1``."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from models.uses import CASES, build, inputs


def train(model: Any, steps: int) -> list[Tensor]:
    """Return all gradients of some steps, with an accumulation and two forwards before a backward in each."""
    optimizer, found = torch.optim.SGD(model.parameters(), lr=0.1), []
    for step in range(steps):
        optimizer.zero_grad()
        model(inputs(3 * step)).backward()
        first, second = model(inputs(3 * step + 1)), model(inputs(3 * step + 2))
        first.backward()
        second.backward()
        found += [p.grad.clone() for p in model.parameters()]
        optimizer.step()
    return found


@pytest.mark.parametrize("name", CASES)
def test_equals_hooks_on_one_use(name: str) -> None:
    case = CASES[name]
    wanted, got = (train(build(case, is_by_hand=by_hand), 6) for by_hand in (True, False))
    plain = train(build(replace(case, hooks={}), is_by_hand=True), 1)

    largest = max(float(g.abs().max()) for g in wanted)
    for one, other in zip(got, wanted, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-10, atol=1e-10 * largest)
    assert not all(map(torch.allclose, got, plain))
