"""Models and batches with one poisoned row, and per-example gradients by a loop with batch size 1."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.nn import functional as F

Poison = Literal["scaled label", "repeated token", "finite outlier"]
ROWS, LENGTH, WORDS, FEATURES = 8, 6, 11, 5


class Regression(nn.Module):
    """An MLP; its loss is outside."""

    def __init__(self, dropout: float = 0.0) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Linear(FEATURES, 16), nn.Tanh(), nn.Dropout(dropout), nn.Linear(16, 3))

    def forward(self, x: Tensor) -> Tensor:
        return self.net(x)


class Text(nn.Module):
    """A small language model; its loss is inside."""

    def __init__(self, dropout: float = 0.0, reduction: str = "mean") -> None:
        super().__init__()
        self.reduction = reduction
        self.embedding = nn.Embedding(WORDS, 12)
        self.norm = nn.LayerNorm(12)
        self.qkv = nn.Linear(12, 36)
        self.drop = nn.Dropout(dropout)
        self.out = nn.Linear(12, WORDS)

    def forward(self, ids: Tensor, targets: Tensor, weight: Tensor) -> Tensor:
        h = self.embedding(ids)
        q, k, v = self.qkv(self.norm(h)).chunk(3, -1)
        h = self.drop(h + F.scaled_dot_product_attention(q, k, v, is_causal=True))
        losses = F.cross_entropy(self.out(h).transpose(1, 2), targets, reduction="none") * weight.unsqueeze(1)
        return losses.sum() if self.reduction == "sum" else losses.mean()


@dataclass(frozen=True)
class Task:
    """A model, and its batches by seed, of which one row may be poisoned."""

    make: Callable[[], nn.Module]
    batch: Callable[[int, int | None], tuple[Tensor, ...]]
    loss: Callable[[Any, tuple[Tensor, ...]], Tensor]  # from the output and the batch
    num_inputs: int  # how much of the batch the model is given


def _regression(seed: int, row: int | None, poison: Poison) -> tuple[Tensor, ...]:
    generator = torch.Generator().manual_seed(seed)
    x, y = torch.randn(ROWS, FEATURES, generator=generator), torch.randn(ROWS, 3, generator=generator)
    if row is not None:
        (y if poison == "scaled label" else x)[row] *= 300.0
        if poison == "finite outlier":
            y[row] *= 100.0
    return x, y


def _text(seed: int, row: int | None) -> tuple[Tensor, ...]:
    generator = torch.Generator().manual_seed(seed)
    ids = torch.randint(1, WORDS, (ROWS, LENGTH), generator=generator)
    targets, weight = (ids * 3 + 1) % WORDS, torch.ones(ROWS)
    if row is not None:  # a row of one token, as of a broken page, that counts as a long one
        ids[row], targets[row], weight[row] = 0, 5, 100.0
    return ids, targets, weight


def task_of(poison: Poison, *, dropout: float = 0.0, reduction: str = "mean") -> Task:
    if poison == "repeated token":
        return Task(lambda: Text(dropout, reduction), _text, lambda out, _: out, 3)

    def loss(out: Tensor, batch: tuple[Tensor, ...]) -> Tensor:
        return F.mse_loss(out, batch[1], reduction=reduction)

    return Task(lambda: Regression(dropout), lambda seed, row: _regression(seed, row, poison), loss, 1)


def example_norms(task: Task, model: nn.Module, batch: tuple[Tensor, ...], reduction: str = "mean") -> Tensor:
    """Norms of what each row adds to the gradient of a batch, by a loop with batch size 1."""
    norms = []
    for n in range(len(batch[0])):
        row = tuple(t[n : n + 1] for t in batch)
        loss = task.loss(model(*row[: task.num_inputs]), row)
        gradients = torch.autograd.grad(loss / (len(batch[0]) if reduction == "mean" else 1), list(model.parameters()))
        norms.append(torch.stack([g.double().square().sum() for g in gradients]).sum().sqrt())
    return torch.stack(norms)
