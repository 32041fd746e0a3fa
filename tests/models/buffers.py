"""Layers whose forward reads a buffer and writes it afterwards."""

from __future__ import annotations

from collections.abc import Callable, Mapping

import torch
from torch import Tensor, nn

WIDTH = 4


class Reading(nn.Module):
    """A linear layer in front of what reads and writes a buffer."""

    def __init__(self, *shape: int, value: float = 0.5) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)
        self.register_buffer("kept", torch.full(shape, value))
        self.kept: Tensor


class RunningMean(Reading):
    """A mean by hand, which is subtracted before it moves."""

    def __init__(self) -> None:
        super().__init__(WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        y = self.linear(x)
        h = (y - self.kept) * 1.1
        self.kept.lerp_(y.detach().mean(0), 0.5)
        return h


class MovingScale(Reading):
    """A moving average that scales."""

    def __init__(self) -> None:
        super().__init__(1)

    def forward(self, x: Tensor) -> Tensor:
        y = self.linear(x)
        h = y * self.kept.clone()
        with torch.no_grad():
            self.kept.mul_(0.5).add_(0.5 * y.abs().mean())
        return h


class Codebook(Reading):
    """Rows are drawn to the nearest of some codes, which follow them."""

    def __init__(self) -> None:
        super().__init__(3, WIDTH)
        self.kept.copy_(torch.randn(3, WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        y = self.linear(x)
        nearest = torch.cdist(y.detach(), self.kept).argmin(1)
        h = y + (y - self.kept[nearest]).square()
        with torch.no_grad():
            self.kept.index_add_(0, nearest, 0.1 * (y - self.kept[nearest]))
        return h


class Counted(Reading):
    """A warm-up by a counter of steps."""

    def __init__(self) -> None:
        super().__init__()
        self.kept = torch.zeros((), dtype=torch.long)

    def forward(self, x: Tensor) -> Tensor:
        h = self.linear(x) / (1 + self.kept)
        self.kept.add_(1)
        return h


class AmaxHistory(Reading):
    """Values are scaled by the largest of the last steps."""

    def __init__(self) -> None:
        super().__init__(3)

    def forward(self, x: Tensor) -> Tensor:
        y = self.linear(x)
        h = (y / self.kept.amax()).tanh()
        with torch.no_grad():
            self.kept.copy_(torch.cat([y.abs().amax().reshape(1), self.kept[:2]]))
        return h


class Cache(Reading):
    """One row of a cache is read, and written by an index."""

    def __init__(self) -> None:
        super().__init__(2, WIDTH)
        self.register_buffer("place", torch.zeros(1, dtype=torch.long))
        self.place: Tensor

    def forward(self, x: Tensor) -> Tensor:
        y = self.linear(x)
        h = (y + self.kept.sum(0)).square()
        self.kept.index_copy_(0, self.place, y.detach().mean(0, keepdim=True))
        self.place.add_(1).remainder_(2)
        return h


class Normalized(nn.Module):
    """Torch's own batch normalization."""

    def __init__(self) -> None:
        super().__init__()
        self.linear, self.norm = nn.Linear(WIDTH, WIDTH), nn.BatchNorm1d(WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        h: Tensor = self.norm(self.linear(x))
        return h


BUFFERS: Mapping[str, Callable[[], nn.Module]] = {
    "batch norm": Normalized,
    "running mean": RunningMean,
    "moving scale": MovingScale,
    "codebook": Codebook,
    "counter": Counted,
    "amax history": AmaxHistory,
    "cache": Cache,
}


class Net(nn.Module):
    """A layer with buffers, twice, and a head; the result is a loss."""

    def __init__(self, make: Callable[[], nn.Module]) -> None:
        super().__init__()
        self.first, self.second, self.head = make(), make(), nn.Linear(WIDTH, 1)

    def forward(self, x: Tensor) -> Tensor:
        h: Tensor = self.second(self.first(x).sin())
        loss: Tensor = self.head(h.sin().square().tanh()).square().mean()
        return loss


class All(nn.Module):
    """Layers with each kind of buffer, one behind the other."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(*(make() for make in BUFFERS.values()))
        self.head = nn.Linear(WIDTH, 1)

    def forward(self, x: Tensor) -> Tensor:
        loss: Tensor = self.head(self.layers(x).tanh()).square().mean()
        return loss
