"""Models whose rows act on each other, and language models by token, with batches of which one part is bad."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

ROWS, LENGTH, WORDS, WIDTH = 6, 7, 13, 10
LENGTHS = (3, 5, 2, 6)  # of the sequences of a packed batch


class Policy(nn.Module):
    """A language model with a clipped ratio as its loss, ``[B, T]`` or packed."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.mix, self.head = nn.Embedding(WORDS, WIDTH), nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WORDS)

    def forward(self, ids: Tensor, wanted: Tensor, before: Tensor, advantage: Tensor, mask: Tensor) -> Tensor:
        h = self.embed(ids)
        h = h + torch.tanh(self.mix(h))
        known = torch.log_softmax(self.head(h), -1).gather(-1, wanted.unsqueeze(-1)).squeeze(-1)
        ratio = torch.exp(known - before)
        gain = torch.minimum(ratio * advantage, ratio.clamp(0.8, 1.2) * advantage)
        return -(gain * mask).sum() / mask.sum()


def policy_batch(seed: int, size: tuple[int, ...] = (ROWS, LENGTH)) -> dict[str, Tensor]:
    """A healthy batch: the old log-probabilities are nearly those of the start."""
    g = torch.Generator().manual_seed(seed)
    ids, wanted = (torch.randint(0, WORDS, size, generator=g) for _ in range(2))
    before = -2.6 + 0.2 * torch.randn(size, generator=g)
    return {
        "ids": ids,
        "wanted": wanted,
        "before": before,
        "advantage": torch.randn(size, generator=g),
        "mask": (torch.rand(size, generator=g) < 0.9).float(),
    }


class Contrast(nn.Module):
    """Pairs of vectors that are told apart from those of the other rows (InfoNCE)."""

    def __init__(self) -> None:
        super().__init__()
        self.left, self.right = nn.Linear(5, 8, bias=False), nn.Linear(5, 8, bias=False)

    def forward(self, x: Tensor, y: Tensor, weight: Tensor) -> Tensor:
        a, b = self.left(x), self.right(y)
        a = a / a.norm(dim=1, keepdim=True)
        b = b / b.norm(dim=1, keepdim=True)
        similar = a @ b.T / 0.5
        return -(torch.log_softmax(similar, 1).diagonal() * weight).mean()


class Messages(nn.Module):
    """A graph network with means over neighbors; its rows are nodes."""

    def __init__(self) -> None:
        super().__init__()
        self.enter, self.send, self.leave = nn.Linear(4, 8), nn.Linear(8, 8), nn.Linear(8, 2)

    def forward(self, x: Tensor, source: Tensor, target: Tensor, degree: Tensor, y: Tensor) -> Tensor:
        h = torch.relu(self.enter(x))
        sums = torch.zeros_like(h).index_add(0, target, self.send(h)[source])
        h = h + sums / degree.unsqueeze(1)
        return (self.leave(h) - y).square().mean()


class Normed(nn.Module):
    """A network with the statistics of its batch."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.norm, self.b = nn.Linear(5, 8), nn.BatchNorm1d(8), nn.Linear(8, 3)

    def forward(self, x: Tensor, size: Tensor, y: Tensor) -> Tensor:
        h = self.a(x) + torch.log(size).unsqueeze(1)
        return (self.b(torch.relu(self.norm(h))) - y).square().mean()


@dataclass(frozen=True)
class Coupled:
    """A model whose rows are coupled."""

    make: Callable[[], nn.Module]
    batch: Callable[[int], dict[str, Tensor]]
    spoil: Callable[[dict[str, Tensor], list[int]], None]  # make these rows not finite
    swell: Callable[[dict[str, Tensor], int], None]  # make this row large
    rows: int
    op: str  # that makes the first value that is not finite
    error: str  # by whose norm rows are known


def _set(name: str, value: Any) -> Callable[[dict[str, Tensor], Any], None]:
    def change(batch: dict[str, Tensor], rows: Any) -> None:
        batch[name][rows] = value

    return change


def _contrast(seed: int) -> dict[str, Tensor]:
    g = torch.Generator().manual_seed(seed)
    x = torch.randn(9, 5, generator=g)
    return {"x": x, "y": x + 0.1 * torch.randn(9, 5, generator=g), "weight": torch.ones(9)}


def _messages(seed: int) -> dict[str, Tensor]:
    g = torch.Generator().manual_seed(seed)
    source = torch.randint(0, 12, (30,), generator=g)
    target = torch.cat([torch.arange(12), torch.randint(0, 12, (18,), generator=g)])
    degree = torch.bincount(target, minlength=12).float()
    x = torch.randn(12, 4, generator=g)
    return {"x": x, "source": source, "target": target, "degree": degree, "y": torch.randn(12, 2, generator=g)}


def _normed(seed: int) -> dict[str, Tensor]:
    g = torch.Generator().manual_seed(seed)
    size = 1 + torch.rand(8, generator=g)
    return {"x": torch.randn(8, 5, generator=g), "size": size, "y": torch.randn(8, 3, generator=g)}


COUPLED = {
    "contrast": Coupled(Contrast, _contrast, _set("x", 0.0), _set("weight", 1e4), 9, "/truediv", "error:/matmul"),
    "messages": Coupled(Messages, _messages, _set("degree", 0.0), _set("y", 1e4), 12, "/truediv", "error:leave"),
    "normed": Coupled(Normed, _normed, _set("size", -1.0), _set("y", 1e4), 8, "/log", "error:b"),
}
