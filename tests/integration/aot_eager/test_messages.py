"""Errors: the model's own stay as they are; ours appear where torch has none."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import gradrewrite as gr
from gradrewrite.passes import Scale

from helpers import gradient

DOUBLE = gr.on("gradient:*", Scale(2.0))


class Strict(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.fc = nn.Linear(4, 2)

    def forward(self, x: Tensor, *, scale: float = 1.0) -> Tensor:
        return (self.fc(x) * scale).sum()


def transformed(plain: nn.Module) -> Callable[..., Any]:
    return gr.transform(plain, DOUBLE)


def traced(plain: nn.Module) -> Callable[..., Any]:
    return gr.transform(plain, DOUBLE).trace


def located(plain: nn.Module) -> Callable[..., Any]:
    return lambda *args, **kwargs: gr.locate(plain, *args, **kwargs)


def loosely(plain: nn.Module) -> Callable[..., Any]:
    return gr.transform(plain, DOUBLE, fullgraph=False)


@pytest.mark.parametrize("way", [transformed, traced, located, loosely])
@pytest.mark.parametrize(
    ("number", "named"),
    [(0, {}), (2, {}), (1, {"nonsense": 1}), (1, {"x": 1})],
    ids=["few", "many", "unknown", "twice"],
)
def test_wrong_arguments(
    x: Tensor, way: Callable[[nn.Module], Callable[..., Any]], number: int, named: dict[str, Any]
) -> None:
    plain = Strict()
    with pytest.raises(TypeError) as wanted:
        plain(*[x] * number, **named)
    with pytest.raises(TypeError) as got:
        way(plain)(*[x] * number, **named)

    assert str(got.value) == str(wanted.value)
    with torch.no_grad(), pytest.raises(TypeError, match="nonsense"):
        gr.transform(plain, DOUBLE)(x, nonsense=1)


def test_arguments_that_a_hook_changes(x: Tensor) -> None:
    plain = Strict()
    plain.register_forward_pre_hook(lambda _, args: (args[0],))
    model = gr.transform(plain, DOUBLE)

    assert torch.equal(model(x, "dropped by the hook"), plain(x))


class Sharing(nn.Module):
    """A buffer in the memory of a parameter."""

    def __init__(self, view: Callable[[Tensor], Tensor], *, writes: bool = True) -> None:
        super().__init__()
        self.w = nn.Parameter(torch.ones(4))
        self.register_buffer("top", view(self.w))
        self.writes = writes

    def forward(self, x: Tensor) -> Tensor:
        if self.writes:
            self.top.add_(1.0)
        return (self.w * x).sum() + self.top.sum()


@pytest.mark.parametrize("view", [lambda w: w.detach()[:2], lambda w: w.data, lambda w: w.data[2:]])
def test_buffer_in_the_memory_of_a_parameter(x: Tensor, view: Callable[[Tensor], Tensor]) -> None:
    plain = Sharing(view)
    model = gr.transform(plain, DOUBLE)

    for run in (model, model.trace):
        with pytest.raises(gr.TraceError, match=r"buffer 'top' .* parameter 'w'.*w\.detach\(\)\.clone\(\)"):
            run(x)
    assert torch.equal(plain.w, torch.ones(4))
    assert plain.w.grad is None


def test_buffer_in_the_memory_of_a_parameter_may_be_read(x: Tensor) -> None:
    plain = Sharing(lambda w: w.detach()[:2], writes=False)

    torch.testing.assert_close(gradient(gr.transform(plain, DOUBLE), x), 2 * gradient(plain, x))
