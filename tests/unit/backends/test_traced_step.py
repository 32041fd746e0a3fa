"""The method that is the loss of a batch, and its arguments."""

from __future__ import annotations

import inspect
from collections import UserDict
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from gradrewrite.backends.traced_step import METHOD, TrainingStep, arguments_of


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(2, 2)

    def forward(self, x: Tensor, mask: Tensor | None = None) -> Tensor:
        return self.layer(x)


def loss(out: Tensor, batch: Any) -> Tensor:
    return out.sum() * batch[1]


def compute_loss(model: nn.Module, x: Tensor, *, y: Tensor) -> Tensor:
    return model(x).sum() * y


X, Y = torch.ones(1, 2), torch.tensor(3.0)


def call(step: TrainingStep, model: nn.Module, batch: Any) -> Tensor:
    args, kwargs = step.arguments(model, batch)
    return getattr(model, METHOD)(*args, **kwargs)


def test_a_loss_of_the_output_and_the_batch() -> None:
    model, step = Net(), TrainingStep(loss=loss)
    expected = model(X).sum() * 3
    step.add_to(model)

    assert torch.equal(call(step, model, [X, Y]), expected)
    assert list(inspect.signature(getattr(model, METHOD)).parameters) == ["x", "mask", "kwargs"]


def test_a_loss_of_the_model_and_the_parts_of_the_batch() -> None:
    model, step = Net(), TrainingStep(compute_loss=compute_loss)
    step.add_to(model)

    assert torch.equal(call(step, model, UserDict(x=X, y=Y)), model(X).sum() * 3)
    assert list(inspect.signature(getattr(model, METHOD)).parameters) == ["x", "y"]


def test_a_view_leaves_the_class_of_the_model_and_shares_its_parameters() -> None:
    model, step = Net(), TrainingStep(loss=loss)
    view = step.added_to(model)

    assert type(model) is Net
    assert isinstance(view, Net)
    assert view.layer is model.layer
    assert (type(view).__name__, type(view).__qualname__) == ("Net", "Net")


def test_a_step_that_is_added_twice_is_the_last_one() -> None:
    model = Net()
    TrainingStep(loss=loss).add_to(model)
    step = TrainingStep(compute_loss=compute_loss)
    step.add_to(model)

    assert torch.equal(call(step, model, {"x": X, "y": Y}), model(X).sum() * 3)


def test_a_class_that_lists_its_subclasses_is_not_told() -> None:
    class Listed(Net):
        def __init_subclass__(cls, **kwargs: Any) -> None:
            raise AssertionError

    TrainingStep(loss=loss).add_to(Listed())


def test_a_loss_may_take_parts_out_of_a_batch() -> None:
    model, batch = Net(), {"x": X, "y": Y}
    step = TrainingStep(loss=lambda out, given: out.sum() * given.pop("y"))
    step.add_to(model)
    call(step, model, batch)

    assert batch.keys() == {"x", "y"}


class TakesKwargs(Net):
    def forward(self, x: Tensor, kwargs: Tensor | None = None) -> Tensor:
        return self.layer(x)


def no_model() -> Tensor:
    return Y


@pytest.mark.parametrize("step", [TrainingStep(loss=loss), TrainingStep(compute_loss=no_model)])
def test_signatures_that_have_no_place_for_the_batch(step: TrainingStep) -> None:
    model = TakesKwargs()
    step.add_to(model)
    assert list(inspect.signature(getattr(model, METHOD)).parameters) == ["args", "kwargs"]


class TakesBatch(Net):
    def forward(self, batch: Tensor) -> Tensor:  # type: ignore[override]
        return self.layer(batch)


def test_a_forward_with_a_parameter_named_batch() -> None:
    model, step = TakesBatch(), TrainingStep(loss=lambda out, batch: out.sum() * batch["y"])
    step.add_to(model)

    assert torch.equal(call(step, model, {"batch": X, "y": Y}), model(X).sum() * 3)


@pytest.mark.parametrize(
    ("batch", "has_loss", "expected"),
    [
        (X, True, ((X,), {})),
        ((X, Y), True, ((X,), {})),
        ((X, Y), False, ((X, Y), {})),
        ({"x": X, "y": Y}, True, ((), {"x": X})),
        ({"x": X, "y": Y}, False, ((), {"x": X, "y": Y})),
    ],
)
def test_arguments(batch: Any, has_loss: bool, expected: Any) -> None:
    assert arguments_of(Net(), batch, has_loss=has_loss) == expected
