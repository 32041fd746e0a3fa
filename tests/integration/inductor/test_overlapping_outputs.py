"""Outputs whose elements share memory: gradients are those of eager mode, however the model runs."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import gradrewrite as gr
from gradrewrite._compat.tangents import may_overlap
from gradrewrite.backends.backend import make_backend
from gradrewrite.backends.engines import AotEager
from gradrewrite.passes import Scale

VIEWS: Mapping[str, Callable[[Tensor], Any]] = {
    "windows": lambda h: h.unfold(1, 3, 1),
    "strides": lambda h: h.as_strided((3, 4, 3), (6, 1, 1)),
    "expanded": lambda h: h[:, None].expand(3, 2, 6),
    "two": lambda h: (h.unfold(1, 2, 1), h.unfold(1, 4, 2)),
    "apart": lambda h: h.unfold(1, 3, 3),
}


class Views(nn.Module):
    def __init__(self, view: Callable[[Tensor], Any]) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.fc, self.view = nn.Linear(6, 6).double(), view

    def forward(self, x: Tensor) -> Any:
        return self.view(self.fc(x).sin())


class Chained(nn.Module):
    """The windows of one layer are what the next one is given."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = Views(VIEWS["windows"]), nn.Linear(3, 2).double()

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.second(self.first(x))
        return y


def compiled(plain: nn.Module) -> Callable[..., Any]:
    rewritten: Any = gr.transform(plain, POLICY)
    rewritten.compile()
    return rewritten


POLICY = gr.on("gradient:*", Scale(2.0))
WAYS: Mapping[str, Callable[[nn.Module], Callable[..., Any]]] = {
    "op by op": lambda plain: gr.transform(plain, POLICY),
    "dynamic": lambda plain: gr.transform(plain, POLICY, dynamic=True),
    "parts": lambda plain: gr.transform(plain, POLICY, fullgraph=False),
    "backend": lambda plain: torch.compile(plain, backend=make_backend(POLICY, None, AotEager())),
    "compiled": compiled,
}


def gradients(plain: nn.Module, run: Callable[..., Any]) -> list[Tensor]:
    x = torch.randn(3, 6, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    found = run(x)
    for out in found if isinstance(found, tuple) else (found,):
        weights = torch.linspace(0, 1, out.numel(), dtype=out.dtype).reshape(out.shape)
        (out * weights).sum().backward(retain_graph=True)
    return [p.grad for p in plain.parameters()]


@pytest.mark.inductor
@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("view", VIEWS)
def test_gradients_are_those_of_eager(view: str, way: str) -> None:
    plain, own = Views(VIEWS[view]), Views(VIEWS[view])
    wanted = [2 * g for g in gradients(plain, plain)]
    torch.testing.assert_close(gradients(own, WAYS[way](own)), wanted)


def test_windows_between_regions() -> None:
    torch.manual_seed(0)
    plain = Chained()
    wanted = [2 * g for g in gradients(plain, plain)]
    plain.zero_grad()
    rewritten = gr.transform(plain, POLICY, regions=["first", "second"])
    torch.testing.assert_close(gradients(plain, rewritten), wanted)


@pytest.mark.pure
@pytest.mark.parametrize(
    ("size", "stride", "expected"),
    [
        ((3, 4), (4, 1), False),
        ((3, 4), (1, 3), False),
        ((3, 4), (5, 1), False),
        ((3, 4), (3, 1), True),
        ((3, 4), (0, 1), True),
        ((1, 4), (0, 1), False),
        ((3, 4, 3), (6, 1, 1), True),
        ((), (), False),
        ((0, 4), (1, 1), False),
    ],
)
def test_which_strides_may_overlap(size: tuple[int, ...], stride: tuple[int, ...], expected: bool) -> None:
    assert may_overlap(torch.empty(100).as_strided(size, stride)) is expected
