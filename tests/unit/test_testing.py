"""The oracle for users: what it finds, what it leaves alone, and what it compares."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

import gradrewrite as gr
from gradrewrite.passes import ClipByGlobalNorm, ClipByNorm
from gradrewrite.testing import assert_inert, assert_matches_eager


class Net(nn.Module):
    """Two layers, a buffer that every call changes, and dropout."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.drop, self.down = nn.Linear(3, 4), nn.Dropout(0.3), nn.Linear(4, 2)
        self.register_buffer("calls", torch.zeros(()))
        self.double()

    def forward(self, x: Tensor, scale: float = 1.0) -> Tensor:
        self.calls += 1
        return self.down(self.drop(self.up(x).tanh())) * scale


@pytest.fixture
def x() -> Tensor:
    return torch.randn(5, 3, dtype=torch.float64)


class TracedOtherwise(nn.Module):
    """Rounds in another way where it is traced, as models do that have a compiled and an eager algorithm."""

    def __init__(self) -> None:
        super().__init__()
        self.fc = nn.Linear(3, 3)

    def forward(self, x: Tensor) -> Tensor:
        h = self.fc(x)
        return h / 3 * 3 + h / 7 * 7 if torch.compiler.is_compiling() else h * 2


def test_the_empty_policy_is_inert_on_a_model_that_computes_otherwise_where_it_is_traced() -> None:
    assert_inert(TracedOtherwise(), torch.randn(64, 3), compiled=False)


@pytest.mark.slow
def test_what_actions_changed_is_told_from_where_they_stood(x: Tensor) -> None:
    policy = [gr.on("error:up", ClipByNorm(1e-3)), gr.on("error:drop", ClipByNorm(1e6))]
    found = assert_matches_eager(Net(), policy, x, compiled=False)
    assert set(found.acted) == {"error:up", "error:drop"}
    assert found.changed == ("error:up",)


@pytest.mark.parametrize(("bound", "is_changed"), [(1e-3, True), (1e6, False)])
def test_a_group_changed_the_gradients_that_it_scaled(x: Tensor, bound: float, is_changed: bool) -> None:
    found = assert_matches_eager(Net(), gr.on("gradient:*", ClipByGlobalNorm(bound)), x, compiled=False)
    assert found.changed == (found.acted if is_changed else ())
    assert set(found.acted) == {f"gradient:{name}" for name in ("up.weight", "up.bias", "down.weight", "down.bias")}
