"""The op behind a non-finite value in an eager step, against steps whose fault is known."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

from gradrewrite.replay.eager_search import EagerRoot, search_eagerly

pytestmark = pytest.mark.pure
X = torch.tensor([[1.0, 2.0, 3.0], [0.5, 0.0, 2.0]])


class Inner(nn.Module):
    def __init__(self, f: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.f, self.w = f, nn.Parameter(torch.ones(3))

    def forward(self, x: Tensor) -> Tensor:
        return self.f(self.w * x)


def searched(f: Callable[[Tensor], Tensor], x: Tensor = X) -> EagerRoot | None:
    model = nn.Sequential(Inner(f))
    return search_eagerly(model, lambda: model(x).sum(), lambda: None, [x])


def test_nothing_is_found_in_a_finite_step() -> None:
    assert searched(lambda h: torch.where(h > 0, h.clamp_min(1e-3).log(), 0.0)) is None


def test_op_of_the_forward() -> None:
    found = searched(lambda h: torch.log(h) + 1)
    assert found is not None
    assert (found.op, found.in_backward) == ("0/log", False)
    assert "lambda h: torch.log(h) + 1" in found.source
    assert (found.story.why, found.story.indices) == ("log of 0 for 1 of 6", "row 1, column 1")


def test_swapped_operands() -> None:
    found = searched(lambda h: 2 / h)
    assert found is not None
    assert found.story.why == "divisor 0 for 1 of 6"


def test_op_of_the_backward() -> None:
    found = searched(lambda h: torch.sqrt(h))
    assert found is not None
    assert (found.op, found.in_backward) == ("0/sqrt", True)
    assert found.story.why == "sqrt at 0 for 1 of 6, where its derivative is infinite"
    assert "inside of the root" in found.story.advice


def test_a_hidden_value_is_the_root() -> None:
    found = searched(lambda h: torch.where(h < 100, torch.exp(h), 0.0), X * 101)
    assert found is not None
    assert (found.op, found.in_backward, found.story.is_tried) == ("0/exp", False, True)
    assert found.story.why == "exp of up to 303, limit 88.7"
    assert "where" in found.story.cover[0]


def test_ctc_with_a_target_that_is_too_long() -> None:
    sizes, target = torch.tensor([2, 5]), torch.tensor([[1, 2, 0, 0, 0], [1, 2, 2, 1, 3]])

    def loss(h: Tensor) -> Tensor:
        logits = h[:, :, None].expand(2, 3, 4).transpose(0, 1).log_softmax(-1)
        return functional.ctc_loss(logits, target, torch.tensor([3, 3]), sizes)

    found = searched(loss)
    assert found is not None
    assert (found.op, found.story.rows, found.story.is_tried) == ("0/ctc_loss", (1,), True)
    assert found.story.why == "example 1 has 3 frames for 5 labels and 1 repeated label, which needs 6"


def test_state_is_the_one_before_each_run() -> None:
    calls: list[str] = []
    model = nn.Sequential(Inner(torch.log))
    search_eagerly(model, lambda: calls.append("run") or model(X).sum(), lambda: calls.append("begin"), [X])  # type: ignore[func-returns-value]
    assert calls == ["begin", "run", "begin", "run"]
    assert model[0].w.grad is None
