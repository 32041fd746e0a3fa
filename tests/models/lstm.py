"""An LSTM cell that a Python loop calls at each time step, with the loss inside."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional


class LstmLoop(nn.Module):
    """``nn.LSTMCell``, called once a time step; ``forward(inputs, targets)`` is the mean squared error of a head.

    The head reads both states: a hook on one that nobody reads is called with None, which torch.compile cannot trace.
    """

    def __init__(self, width: int = 64) -> None:
        super().__init__()
        self.cell, self.head = nn.LSTMCell(width, width), nn.Linear(width, 1)

    def forward(self, inputs: Tensor, targets: Tensor) -> Tensor:
        rows, steps, width = inputs.shape
        h = c = inputs.new_zeros(rows, width)
        for time in range(steps):
            h, c = self.cell(inputs[:, time], (h, c))
        return functional.mse_loss(self.head(h + c), targets)


def sequences(rows: int = 16, steps: int = 4, width: int = 64, device: str = "cpu") -> tuple[Tensor, Tensor]:
    """Random sequences ``[rows, steps, width]`` and targets ``[rows, 1]``."""
    return torch.randn(rows, steps, width, device=device), torch.randn(rows, 1, device=device)
