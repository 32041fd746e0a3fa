"""Small models that cover what a real one does, each with inputs and a loss."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

Loss = Callable[[Any], Tensor]


@dataclass(frozen=True)
class Case:
    """A model class, how to call it, and the modules whose errors eager hooks can reach."""

    make: Callable[[], nn.Module]
    inputs: Callable[[], tuple[Tensor, ...]]
    loss: Loss
    hooked: tuple[str, ...]
    autocast: bool = False


class Residual(nn.Module):
    """A pre-norm transformer block with dropout."""

    def __init__(self, width: int = 16, heads: int = 2, dropout: float = 0.2) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 2 * width), nn.Linear(2 * width, width)
        self.drop = nn.Dropout(dropout)
        self.heads = heads

    def attend(self, x: Tensor) -> Tensor:
        q, k, v = self.qkv(x).chunk(3, dim=-1)
        b, n, d = q.shape
        q, k, v = (t.view(b, n, self.heads, d // self.heads).transpose(1, 2) for t in (q, k, v))
        weights = (q @ k.transpose(-1, -2) / (d // self.heads) ** 0.5).softmax(-1)
        return self.out((weights @ v).transpose(1, 2).reshape(b, n, d))

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.drop(self.attend(self.norm1(x)))
        return x + self.drop(self.down(functional.gelu(self.up(self.norm2(x)))))


class Cnn(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.conv1, self.bn1 = nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4)
        self.relu = nn.ReLU(inplace=True)
        self.conv2, self.bn2 = nn.Conv2d(4, 4, 3), nn.BatchNorm2d(4)
        self.head = nn.Linear(4, 2)

    def forward(self, x: Tensor) -> Tensor:
        x = self.relu(self.bn1(self.conv1(x)))
        x = self.relu(self.bn2(self.conv2(x)))
        return self.head(x.mean((2, 3)))


class Repeated(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.cell = nn.Linear(4, 4)
        self.head = nn.Linear(4, 2)

    def forward(self, x: Tensor) -> Tensor:
        for _ in range(3):
            x = torch.tanh(self.cell(x)) + x
        return self.head(x)


class Tied(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(11, 6)
        self.body = nn.Linear(6, 6)
        self.unembed = nn.Linear(6, 11, bias=False)
        self.unembed.weight = self.embed.weight

    def forward(self, tokens: Tensor) -> Tensor:
        return self.unembed(torch.tanh(self.body(self.embed(tokens))))


class TwoHeads(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.trunk = nn.Linear(4, 4)
        self.one, self.two = nn.Linear(4, 2), nn.Linear(4, 2)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        h = torch.relu(self.trunk(x))
        return self.one(h), self.two(h)


class LossInside(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.fc1, self.fc2 = nn.Linear(4, 8), nn.Linear(8, 3)

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        return functional.mse_loss(self.fc2(torch.sigmoid(self.fc1(x))), y)


@dataclass
class Output:
    logits: Tensor
    hidden: Tensor


class ReturnsDataclass(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.fc1, self.fc2 = nn.Linear(4, 8), nn.Linear(8, 3)

    def forward(self, x: Tensor) -> Output:
        hidden = torch.tanh(self.fc1(x))
        return Output(self.fc2(hidden), hidden)


class Checkpointed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 4)) for _ in range(2))
        self.head = nn.Linear(4, 2)

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = x + checkpoint(block, x, use_reentrant=False)
        return self.head(x)


class _Cube(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        return x**3

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> Tensor:
        (x,) = ctx.saved_tensors
        return 2.5 * g * x**2  # not the true derivative, so that a lost custom backward shows


class CustomFunction(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.fc1, self.fc2 = nn.Linear(4, 8), nn.Linear(8, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.fc2(_Cube.apply(self.fc1(x)))


class Frozen(nn.Module):
    """A frozen layer between two that train, an unused layer, and a branch that is not taken."""

    def __init__(self) -> None:
        super().__init__()
        self.fc1, self.frozen, self.fc2 = nn.Linear(4, 8), nn.Linear(8, 8), nn.Linear(8, 3)
        self.unused, self.other = nn.Linear(2, 2), nn.Linear(8, 3)
        self.frozen.requires_grad_(False)
        self.use_other = False

    def forward(self, x: Tensor) -> Tensor:
        h = torch.tanh(self.frozen(torch.tanh(self.fc1(x))))
        return self.other(h) if self.use_other else self.fc2(h)


def mlp() -> nn.Module:
    return nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 2))


def _rows(*shape: int) -> Callable[[], tuple[Tensor, ...]]:
    return lambda: (torch.randn(*shape),)


def square(out: Tensor) -> Tensor:
    return out.square().sum()


CASES: dict[str, Case] = {
    "mlp": Case(mlp, _rows(5, 4), square, ("0", "1", "2", "3", "4")),
    "cnn": Case(Cnn, _rows(2, 3, 8, 8), square, ("conv1", "bn1", "relu", "conv2", "bn2", "head")),
    "transformer": Case(Residual, _rows(2, 5, 16), square, ("norm1", "qkv", "out", "drop", "norm2", "up", "down")),
    "repeated": Case(Repeated, _rows(5, 4), square, ("cell", "head")),
    "tied": Case(Tied, lambda: (torch.randint(0, 11, (5,)),), square, ("embed", "body", "unembed")),
    "two heads": Case(TwoHeads, _rows(5, 4), lambda out: square(out[0]), ("trunk", "one", "two")),
    "loss inside": Case(LossInside, lambda: (torch.randn(5, 4), torch.randn(5, 3)), lambda out: out, ("fc1", "fc2")),
    "dataclass": Case(ReturnsDataclass, _rows(5, 4), lambda out: square(out.logits) + out.hidden.sum(), ("fc1", "fc2")),
    "checkpoint": Case(
        Checkpointed, _rows(5, 4), square, ("blocks.0.0", "blocks.0.1", "blocks.1.0", "blocks.1.2", "head")
    ),
    "autocast": Case(mlp, _rows(5, 4), lambda out: square(out.float()), ("0", "1", "2", "3", "4"), autocast=True),
    "custom function": Case(CustomFunction, _rows(5, 4), square, ("fc1", "fc2")),
    "frozen": Case(Frozen, _rows(5, 4), square, ("fc1", "frozen", "fc2")),
}
