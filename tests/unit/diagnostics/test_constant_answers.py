"""The loss of the best constant answer, of targets that are seen, and of batches that are counted."""

from __future__ import annotations

import math
from collections.abc import Callable

import pytest
import torch
from torch import Tensor
from torch.nn import functional

from gradrewrite.diagnostics.constant_answers import Classes, Targets

FIRST, LAST = torch.tensor([0, 0, 0, 1]), torch.tensor([1, 1, 1, -100])
HALF = math.log(2.0)


def seen(target: Tensor) -> Targets:
    targets = Targets()
    with targets:
        functional.cross_entropy(torch.zeros(target.numel(), 2), target)
    return targets


@pytest.mark.parametrize("form", [lambda y: y, lambda y: y.view(-1), torch.clone, lambda y: y.view(2, 2).flatten()])
def test_targets_are_counted_in_all_batches(form: Callable[[Tensor], Tensor]) -> None:
    classes = Classes()
    for y in (FIRST, LAST[:3], FIRST.flip(0)[:1].repeat(0), LAST):
        classes.count({"x": torch.zeros(2), "ids": torch.arange(5), "y": y})
    batch = {"x": torch.zeros(2), "ids": torch.arange(5), "y": LAST}
    share = 3 / 10

    assert seen(FIRST).constant_loss == pytest.approx(-(0.75 * math.log(0.75) + 0.25 * math.log(0.25)))
    found = seen(form(LAST)).constant_loss_over(classes, batch)
    assert found == pytest.approx(-(share * math.log(share) + (1 - share) * math.log(1 - share)))


def test_a_target_that_is_computed_is_not_known() -> None:
    classes = Classes()
    classes.count((FIRST,))
    assert math.isnan(seen(1 - FIRST).constant_loss_over(classes, (FIRST,)))
    assert math.isnan(Targets().constant_loss_over(classes, (FIRST,)))
