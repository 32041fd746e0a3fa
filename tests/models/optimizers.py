"""Optimizers by name, for tests of what happens around a step."""

from __future__ import annotations

from collections.abc import Callable, Iterable

from torch import Tensor
from torch.optim import SGD, Adagrad, Adam, AdamW, NAdam, Optimizer, RMSprop

Optimize = Callable[[Iterable[Tensor]], Optimizer]

OPTIMIZERS: dict[str, Optimize] = {
    "sgd": lambda p: SGD(p, lr=0.1, momentum=0.9),
    "sgd plain": lambda p: SGD(p, lr=0.1),
    "sgd plain fused": lambda p: SGD(p, lr=0.1, fused=True),
    "sgd fused": lambda p: SGD(p, lr=0.1, momentum=0.9, fused=True),
    "sgd dampened fused": lambda p: SGD(p, lr=0.1, momentum=0.9, dampening=0.1, fused=True),
    "adam": lambda p: Adam(p, lr=0.1),
    "adam fused": lambda p: Adam(p, lr=0.1, fused=True),
    "adamw": lambda p: AdamW(p, lr=0.1),
    "adamw fused": lambda p: AdamW(p, lr=0.1, fused=True),
    "adamw amsgrad fused": lambda p: AdamW(p, lr=0.1, amsgrad=True, fused=True),
    "adagrad fused": lambda p: Adagrad(p, lr=0.1, fused=True),
    "rmsprop": lambda p: RMSprop(p, lr=0.1),
    "nadam": lambda p: NAdam(p, lr=0.1),
}
USUAL = ("sgd", "adamw fused", "adamw", "sgd fused")
"""Names that stand for all where two classes will do, each fused and not."""
