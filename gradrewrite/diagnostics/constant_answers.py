"""The loss of the best constant answer to classes."""

from __future__ import annotations

import math
from collections import Counter
from typing import Any

from torch import Tensor
from torch.nn import functional
from torch.overrides import TorchFunctionMode

_LARGEST = 1 << 20  # classes of one batch that are counted


class Targets(TorchFunctionMode):
    """Counts the classes that ``cross_entropy`` is given inside of the block.

    Weighted or smoothed losses, and targets that are probabilities, are not known.
    """

    def __init__(self) -> None:
        super().__init__()
        self._counts: Counter[int] = Counter()
        self._is_known = True

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Count the targets of a loss."""
        kwargs = kwargs or {}
        if func is functional.cross_entropy:
            self._note(*args, **kwargs)
        return func(*args, **kwargs)

    @property
    def constant_loss(self) -> float:
        """The entropy of the classes, in nats: the mean loss of an answer that is always the same; NaN if not known."""
        total = self._counts.total() if self._is_known else 0
        if not total:
            return math.nan
        return -sum(n / total * math.log(n / total) for n in self._counts.values())

    def _note(
        self,
        input: Tensor,
        target: Tensor,
        weight: Tensor | None = None,
        size_average: Any = None,
        ignore_index: int = -100,
        reduce: Any = None,
        reduction: str = "mean",
        label_smoothing: float = 0.0,
    ) -> None:
        is_plain = weight is None and reduction == "mean" and not label_smoothing and size_average is reduce is None
        if not is_plain or target.is_floating_point() or target.numel() > _LARGEST:
            self._is_known = False
            return
        classes, counts = target[target != ignore_index].unique(return_counts=True)
        self._counts.update(dict(zip(classes.tolist(), counts.tolist(), strict=True)))
