"""Models whose per-example gradients are measured: each gives one loss for each example."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from itertools import pairwise

import torch
from torch import Tensor, nn
from torch.nn import functional

from models.gpt import Gpt


class Tokens(Gpt):
    """The small GPT without its loss, with positions of each example: Opacus and ``vmap`` need a batch everywhere."""

    def forward(self, tokens: Tensor) -> Tensor:  # type: ignore[override]  # the loss is outside
        """Logits ``[B, T, V]`` of tokens ``[B, T]``."""
        x = self.embed(tokens) + self.position(torch.arange(tokens.shape[1]).expand(tokens.shape).contiguous())
        for block in self.blocks:
            x = block(x)
        logits: Tensor = self.head(self.norm(x))
        return logits


class ResBlock(nn.Module):
    """Two convolutions with GroupNorm, and a shortcut."""

    def __init__(self, before: int, width: int, stride: int) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(before, width, 3, stride, 1, bias=False)
        self.conv2 = nn.Conv2d(width, width, 3, 1, 1, bias=False)
        self.norm1, self.norm2 = nn.GroupNorm(8, width), nn.GroupNorm(8, width)
        self.short = nn.Conv2d(before, width, 1, stride) if before != width else nn.Identity()

    def forward(self, x: Tensor) -> Tensor:
        """Images ``[B, C, H, W]`` in, the same in other sizes out."""
        y = functional.relu(self.norm1(self.conv1(x)))
        return functional.relu(self.norm2(self.conv2(y)) + self.short(x))


class ResNet(nn.Module):
    """A residual net for small images, of three stages, 16 to 64 channels wide.

    With three blocks in each stage it is ResNet-20 (He et al., 2016), with GroupNorm and shortcuts with a convolution.

    Args:
        blocks: Number of blocks in each stage.
    """

    def __init__(self, blocks: int) -> None:
        super().__init__()
        self.stem = nn.Conv2d(3, 16, 3, 1, 1)
        firsts = {16: ResBlock(16, 16, 1), 32: ResBlock(16, 32, 2), 64: ResBlock(32, 64, 2)}
        others = {width: [ResBlock(width, width, 1) for _ in range(blocks - 1)] for width in firsts}
        self.stages = nn.Sequential(*(block for w, first in firsts.items() for block in (first, *others[w])))
        self.head = nn.Linear(64, 10)

    def forward(self, images: Tensor) -> Tensor:
        """Logits ``[B, 10]`` of images ``[B, 3, 32, 32]``."""
        logits: Tensor = self.head(self.stages(functional.relu(self.stem(images))).mean((2, 3)))
        return logits


def losses_of(logits: Tensor, targets: Tensor) -> Tensor:
    """The loss of each example ``[B]``: a mean over tokens, if it has several."""
    each = functional.cross_entropy(logits.flatten(0, -2), targets.flatten(), reduction="none")
    return each.view(targets.shape[0], -1).mean(1)


class WithLoss(nn.Module):
    """A net and its loss, the mean over the examples."""

    def __init__(self, net: nn.Module) -> None:
        super().__init__()
        self.net = net

    def forward(self, x: Tensor, targets: Tensor) -> Tensor:
        """The loss of a batch."""
        return losses_of(self.net(x), targets).mean()


@dataclass(frozen=True)
class Case:
    """A model and a batch.

    Attributes:
        text: Its sizes.
        make: Makes the net.
        batch: Makes inputs and targets.
    """

    text: str
    make: Callable[[], nn.Module]
    batch: Callable[[], tuple[Tensor, Tensor]]


def _mlp() -> nn.Module:
    sizes = (784, 512, 512)
    layers = [m for a, b in pairwise(sizes) for m in (nn.Linear(a, b), nn.ReLU())]
    return nn.Sequential(*layers, nn.Linear(sizes[-1], 10))


def _images() -> tuple[Tensor, Tensor]:
    return torch.randn(16, 3, 32, 32), torch.randint(0, 10, (16,))


CASES: Mapping[str, Case] = {
    "GPT": Case(
        "4 layers of width 256, vocabulary 128, 16 x 128 tokens",
        lambda: Tokens(layers=4, width=256, context=128),
        lambda: (torch.randint(0, 128, (16, 128)), torch.randint(0, 128, (16, 128))),
    ),
    "MLP": Case("784, 512, 512, 10; 64 rows", _mlp, lambda: (torch.randn(64, 784), torch.randint(0, 10, (64,)))),
    "ResNet-8": Case(
        "1 block with GroupNorm in each of 3 stages, 16 to 64 channels; 16 images of 32 x 32",
        lambda: ResNet(1),
        _images,
    ),
    "ResNet-20": Case(
        "3 blocks with GroupNorm in each of 3 stages, 16 to 64 channels; 16 images of 32 x 32",
        lambda: ResNet(3),
        _images,
    ),
}
