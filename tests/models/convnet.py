"""A convolutional net of any depth, with the loss inside."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn
from torch.nn import functional


class ConvNet(nn.Module):
    """Convolutions with BatchNorm and ReLU, all but the first with stride 2; ``forward(images, labels)`` is the loss.

    Args:
        widths: Channels of each convolution.
        classes: Number of classes.
    """

    def __init__(self, widths: Sequence[int] = (32, 64), classes: int = 10) -> None:
        super().__init__()
        pairs = list(zip([3, *widths], widths, strict=False))
        self.convs = nn.ModuleList(nn.Conv2d(a, b, 3, stride=2 if n else 1) for n, (a, b) in enumerate(pairs))
        self.norms = nn.ModuleList(nn.BatchNorm2d(width) for width in widths)
        self.act, self.head = nn.ReLU(), nn.Linear(widths[-1], classes)

    def forward(self, images: Tensor, labels: Tensor) -> Tensor:
        x = images
        for conv, norm in zip(self.convs, self.norms, strict=True):
            x = self.act(norm(conv(x)))
        return functional.cross_entropy(self.head(x.mean((2, 3))), labels)


def images(rows: int = 8, size: int = 32, classes: int = 10, device: str = "cpu") -> tuple[Tensor, Tensor]:
    """Random images ``[rows, 3, size, size]`` and labels ``[rows]``."""
    return torch.randn(rows, 3, size, size, device=device), torch.randint(0, classes, (rows,), device=device)
