"""The oracle for users: what it finds, what it leaves alone, and what it compares."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

import gradrewrite as gr
from gradrewrite.passes import ClipByGlobalNorm, ClipByNorm, ClipByValue
from gradrewrite.testing import assert_inert, assert_matches_eager

from models.small import Lambda


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


def test_an_action_sees_a_value_as_it_was_made() -> None:
    """A later op writes into the output of the first layer."""
    net = nn.Sequential(nn.Linear(3, 3), nn.LeakyReLU(0.1, inplace=True), nn.Linear(3, 3)).double()
    policy = gr.on("error:*", lambda g, value: g + 0.1 * value)
    assert_matches_eager(net, policy, torch.randn(5, 3, dtype=torch.float64), compiled=False)


@pytest.mark.slow
def test_what_actions_changed_is_told_from_where_they_stood(x: Tensor) -> None:
    policy = [gr.on("error:up", ClipByNorm(1e-3)), gr.on("error:drop", ClipByNorm(1e6))]
    found = assert_matches_eager(Net(), policy, x, compiled=False)
    assert set(found.acted) == {"error:up", "error:drop"}
    assert found.changed == ("error:up",)


@pytest.mark.long
@pytest.mark.parametrize(("bound", "is_changed"), [(1e-3, True), (1e6, False)])
def test_a_group_changed_the_gradients_that_it_scaled(x: Tensor, bound: float, is_changed: bool) -> None:
    found = assert_matches_eager(Net(), gr.on("gradient:*", ClipByGlobalNorm(bound)), x, compiled=False)
    assert found.changed == (found.acted if is_changed else ())
    assert set(found.acted) == {f"gradient:{name}" for name in ("up.weight", "up.bias", "down.weight", "down.bias")}


@pytest.mark.long
def test_what_the_host_computes_from_records(x: Tensor) -> None:
    bound = torch.tensor(1e-3, dtype=torch.float64)
    policy = [
        gr.on("error:up", ClipByNorm(bound)),
        gr.on("error:up", ClipByValue(1e-6, log=True)),
        gr.on("error:up", ClipByNorm(1e6)),
        gr.on("gradient:*", ClipByGlobalNorm(1e-3, log=True)),
    ]
    found = assert_matches_eager(Net(), policy, x, compiled=False)
    wanted = ("factor@error:up", "factor.2@error:up", "factor.3@error:up", "factor@group:default")
    assert set(wanted) | {"norm_share@gradient:up.weight"} <= set(found.records)


@pytest.mark.long
def test_functions_of_a_gradient_and_its_value(x: Tensor) -> None:
    policy = [
        gr.on("gradient:*", lambda g, w: g + 0.1 * w),
        gr.on("error:up", lambda e, h: e * (1 + h * h)),
        gr.on("input:*", lambda g, value: g - value),
    ]
    found = assert_matches_eager(Net(), policy, x.requires_grad_(), compiled=False)
    assert {"error:up", "gradient:up.weight", "input:x"} <= set(found.changed)


class AnotherWhereTraced(nn.Module):
    """Computes another function where it is traced, so that no policy agrees with hooks."""

    def __init__(self) -> None:
        super().__init__()
        self.fc = nn.Linear(3, 3).double()

    def forward(self, x: Tensor) -> Tensor:
        h = self.fc(x)
        return h.sin() if torch.compiler.is_compiling() else h


@pytest.mark.slow
@pytest.mark.inductor
def test_what_the_compiler_rounds_otherwise_is_not_blamed_on_the_rewrite() -> None:
    torch.manual_seed(0)
    x = torch.randn(50, 64, dtype=torch.float64)
    # A float64 model with a softmax in float32, which compiled code sums up in another order.
    net = Lambda(
        lambda net, x: net.out(net.fc(x).float().softmax(-1).double()),
        fc=nn.Linear(64, 300).double(),
        out=nn.Linear(300, 4).double(),
    )
    found = assert_matches_eager(net, gr.on("error:fc", ClipByNorm(1e-3)), x, steps=2)
    assert found.changed == ("error:fc",)
    assert 1e-10 < found.plain_error < 1e-6


@pytest.mark.long
def test_a_difference_of_the_rewrite_is_blamed_on_it(x: Tensor, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ClipByNorm, "apply", lambda self, g: g * (1.0 + 1e-3 * torch.compiler.is_compiling()))
    with pytest.raises(AssertionError, match=r"plain torch.compile agrees with the eager model.*the rewrite"):
        assert_matches_eager(Net(), gr.on("error:up", ClipByNorm(1.0)), x, compiled=False)


def test_a_model_that_is_traced_otherwise_is_said_to_be() -> None:
    torch.manual_seed(0)
    x = torch.randn(5, 3, dtype=torch.float64)
    with pytest.raises(AssertionError, match="the model computes otherwise where it is traced"):
        assert_matches_eager(AnotherWhereTraced(), gr.on("gradient:*", ClipByValue(1e6)), x, compiled=False)


class HandsOn(nn.Module):
    """Returns ``contiguous`` of a contiguous value, which is that value, to an ``nn.Identity``."""

    def __init__(self) -> None:
        super().__init__()
        self.inner, self.name, self.head = Lambda(lambda _, h: h.square().contiguous()), nn.Identity(), nn.Linear(3, 1)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.name(self.inner(x)))


def test_an_op_that_hands_its_input_on_is_no_use_of_it() -> None:
    x = torch.randn(2, 3, requires_grad=True)
    found = assert_matches_eager(HandsOn(), gr.on("error:*", lambda g: 0.5 * g), x, compiled=False)
    assert found.acted == ("error:head", "error:name")
