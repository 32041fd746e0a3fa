"""Small nets for many tests."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

import gradrewrite as gr


class Lambda(nn.Module):
    """A module around a function of itself and an input, with the submodules and tensors that it reads."""

    def __init__(self, function: Callable[..., Any], **parts: nn.Module | Tensor) -> None:
        super().__init__()
        self.function = function
        for name, part in parts.items():
            setattr(self, name, part)

    def forward(self, x: Tensor) -> Any:
        return self.function(self, x)


class CellLoop(nn.Module):
    """A GRU cell in a Python loop over ``[T, B, 3]``, in float64."""

    def __init__(self) -> None:
        super().__init__()
        self.cell = nn.GRUCell(3, 4).double()

    def forward(self, x: Tensor) -> Tensor:
        h = x.new_zeros(x.shape[1], 4)
        for row in x.unbind(0):
            h = self.cell(row, h)
        return h.square().sum()


class TwoLayers(nn.Module):
    """``two(tanh(one(x)))``.

    Args:
        sizes: Widths of the input, between the layers, and of the output.
        bias: Whether the second layer has a bias.
    """

    def __init__(self, *sizes: int, bias: bool = True) -> None:
        super().__init__()
        inner, hidden, outer = sizes or (4, 3, 2)
        self.one, self.two = nn.Linear(inner, hidden), nn.Linear(hidden, outer, bias=bias)

    def forward(self, x: Tensor) -> Tensor:
        return self.two(self.one(x).tanh())


class SquaredTwoLayers(TwoLayers):
    """The sum of squares of ``TwoLayers``, a loss."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x).square().sum()


class Broken(TwoLayers):
    """``TwoLayers`` with a graph break between the layers."""

    def forward(self, x: Tensor) -> Tensor:
        h = self.one(x)
        torch._dynamo.graph_break()
        return self.two(h.tanh())


class Layers(nn.Module):
    """Equal layers, each with a tanh behind it."""

    def __init__(self, number: int, width: int) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(width, width) for _ in range(number))

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x).tanh()
        return x


class Block(nn.Module):
    """A residual block: ``x + out(tanh(fc(norm(x))))``."""

    def __init__(self, width: int, hidden: int) -> None:
        super().__init__()
        self.norm, self.fc, self.out = nn.LayerNorm(width), nn.Linear(width, hidden), nn.Linear(hidden, width)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.out(self.fc(self.norm(x)).tanh())


class Gradients(nn.Module):
    """Parameters whose gradients are the inputs, in their order."""

    def __init__(self, **parameters: Tensor) -> None:
        super().__init__()
        for name, value in parameters.items():
            self.register_parameter(name, nn.Parameter(value.clone()))

    def forward(self, *gradients: Tensor) -> Tensor:
        pairs = zip(self.parameters(), gradients, strict=True)
        return torch.stack([(p * gradient).sum() for p, gradient in pairs]).sum()


class Sines(nn.Module):
    """Sines of sines of a parameter, each of which is a site."""

    def __init__(self, count: int, size: int) -> None:
        super().__init__()
        self.count = count
        self.w = nn.Parameter(torch.linspace(-1, 1, size))

    def forward(self) -> Tensor:
        x = self.w
        for number in range(self.count):
            x = gr.tap(torch.sin(x * 1.1), f"h{number}")
        return x.sum()
