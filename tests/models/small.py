"""Small nets for many tests."""

from __future__ import annotations

from torch import Tensor, nn


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
