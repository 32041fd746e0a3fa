"""Models with loops over time in Python, each with inputs for a number of iterations."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

Inputs = tuple[Tensor, ...]


def tokens(length: int, batch: int = 3) -> Inputs:
    return (torch.randint(16, (batch, length), generator=torch.Generator().manual_seed(1)),)


def values(length: int, batch: int = 3) -> Inputs:
    return (torch.randn(batch, length, 4, generator=torch.Generator().manual_seed(1), dtype=torch.float64),)


class Cell(nn.Module):
    """A cell over ``unbind``, all its states in one list."""

    inputs = staticmethod(tokens)

    def __init__(self, width: int = 6) -> None:
        super().__init__()
        self.embed, self.cell, self.head = nn.Embedding(16, 4), nn.GRUCell(4, width), nn.Linear(width, 16)

    def forward(self, x: Tensor) -> Tensor:
        h, states = x.new_zeros(len(x), self.cell.hidden_size, dtype=self.head.weight.dtype), []
        for e in self.embed(x).unbind(1):
            h = self.cell(e, h)
            states.append(h)
        return F.cross_entropy(self.head(torch.stack(states, 1)).flatten(0, 1), x.flatten())


class Plain(nn.Module):
    """A recurrent net without a cell: a nonlinearity of a linear layer."""

    inputs = staticmethod(tokens)

    def __init__(self, width: int = 6) -> None:
        super().__init__()
        self.embed, self.wh, self.head = nn.Embedding(16, width), nn.Linear(width, width), nn.Linear(width, 16)

    def forward(self, x: Tensor) -> Tensor:
        h, states = torch.zeros(len(x), self.wh.in_features, dtype=self.head.weight.dtype), []
        for e in self.embed(x[:, :-1]).unbind(1):
            h = torch.sin(self.wh(h) + e)
            states.append(h)
        return F.cross_entropy(self.head(torch.stack(states, 1)).mT, x[:, 1:])


class Decoder(nn.Module):
    """Two layers of cells with attention to embedded inputs; the loss is in the loop."""

    inputs = staticmethod(tokens)

    def __init__(self, width: int = 4) -> None:
        super().__init__()
        self.embed = nn.Embedding(16, width)
        self.first, self.second = nn.LSTMCell(2 * width, width), nn.LSTMCell(width, width)
        self.query, self.head = nn.Linear(width, width), nn.Linear(width, 16)

    def forward(self, x: Tensor) -> Tensor:
        encoded = self.embed(x)
        h1 = c1 = h2 = c2 = encoded.new_zeros(len(x), encoded.shape[-1])
        loss: Any = 0.0
        for t in range(x.shape[1] - 1):
            weights = torch.softmax((self.query(h2)[:, None] * encoded).sum(-1), -1)
            context = (weights[..., None] * encoded).sum(1)
            h1, c1 = self.first(torch.cat([encoded[:, t], context], -1), (h1, c1))
            h2, c2 = self.second(h1, (h2, c2))
            loss = loss + F.cross_entropy(self.head(h2), x[:, t + 1])
        return loss / (x.shape[1] - 1)


class Simulator(nn.Module):
    """A learned simulator: a state and its change, with a loss in each step."""

    inputs = staticmethod(values)

    def __init__(self, width: int = 8) -> None:
        super().__init__()
        self.change = nn.Sequential(nn.Linear(4, width), nn.Tanh(), nn.Linear(width, 4))

    def forward(self, target: Tensor) -> Tensor:
        x, loss = target[:, 0], torch.zeros((), dtype=target.dtype)
        for t in range(target.shape[1]):
            x = x + 0.1 * self.change(x)
            loss = loss + (x - target[:, t]).square().mean()
        return loss


class RungeKutta(nn.Module):
    """A differential equation, solved in steps that read nothing by time; the last state alone is read."""

    inputs = staticmethod(values)

    def __init__(self) -> None:
        super().__init__()
        self.field = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 4))

    def forward(self, x: Tensor) -> Tensor:
        y = x[:, 0]
        for _ in range(x.shape[1]):
            k1 = self.field(y)
            k2 = self.field(y + 0.05 * k1)
            y = y + 0.1 * k2
        return y.square().sum()


class Masked(nn.Module):
    """A mask by time, with a new dimension; two loops, the second over the states of the first, backward."""

    inputs = staticmethod(values)

    def __init__(self) -> None:
        super().__init__()
        self.there, self.back = nn.Linear(8, 4), nn.Linear(8, 4)

    def forward(self, x: Tensor) -> Tensor:
        mask, h, states = (x[..., 0] > -1).to(x.dtype), x.new_zeros(len(x), 4), []
        for t in range(x.shape[1]):
            new = self.there(torch.cat([x[:, t], h], -1)).tanh()
            h = mask[:, t, None] * new + (1 - mask[:, t, None]) * h
            states.append(h)
        g, total = x.new_zeros(len(x), 4), []
        for h in reversed(states):
            g = self.back(torch.cat([h, g], -1)).tanh()
            total.append(g)
        return torch.cat(total, -1).square().mean()


class Chunks(nn.Module):
    """Parts of a sequence by ``chunk``, a running sum, and a list of values that are joined."""

    inputs = staticmethod(values)

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        h, parts = x.new_zeros(len(x), 1, 4), []
        for part in x.chunk(x.shape[1], 1):
            h = 0.9 * h + self.layer(part).tanh()
            parts.append(h)
        return torch.cat(parts, 1).square().mean() + parts[2].mean()


ALL: tuple[Callable[[], nn.Module], ...] = (Cell, Plain, Decoder, Simulator, RungeKutta, Masked, Chunks)
