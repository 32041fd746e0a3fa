"""A recurrence in a loop of Python: one cell, called again and again, whose hidden state is carried."""

from __future__ import annotations

from typing import Literal

import torch
from torch import Tensor, nn

Ending = Literal["last", "summed", "written", "stacked"]


class Cell(nn.Module):
    def __init__(self, size: int) -> None:
        super().__init__()
        self.linear = nn.Linear(2 * size, size)

    def forward(self, x: Tensor, h: Tensor) -> Tensor:
        return torch.tanh(self.linear(torch.cat([x, h], -1)))


class Recurrence(nn.Module):
    """The head reads the last hidden state, the running sum of all, a buffer that they are written into, or a stack."""

    def __init__(self, steps: int, ending: Ending = "last", size: int = 8) -> None:
        super().__init__()
        self.cell, self.head = Cell(size), nn.Linear(size, 1)
        self.steps, self.ending = steps, ending

    def forward(self, x: Tensor) -> Tensor:
        h = total = torch.zeros_like(x)
        states = torch.zeros(self.steps, *x.shape)
        found = []
        for step in range(self.steps):
            h = self.cell(x, h)
            if self.ending == "summed":
                total = total + h
            elif self.ending == "written":
                states[step] = h
            elif self.ending == "stacked":
                found.append(h)
        read = {"last": h, "summed": total, "written": states}
        return self.head(torch.stack(found) if found else read[self.ending]).sum()
