"""The loss of the best constant answer to classes."""

from __future__ import annotations

import math
from collections import Counter
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional
from torch.overrides import TorchFunctionMode

from gradrewrite._utils.tensors import tensors_in

_LARGEST = 1 << 20  # classes of one batch that are counted
_MOST = 64  # targets of one step


class Targets(TorchFunctionMode):
    """Counts the classes that ``cross_entropy`` is given inside of the block.

    Weighted or smoothed losses, and targets that are probabilities, are not known.
    """

    def __init__(self) -> None:
        super().__init__()
        self.given: list[tuple[Tensor, int]] = []  # the last targets, each with the class that is ignored
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
        return _entropy(self._counts) if self._is_known else math.nan

    def constant_loss_over(self, classes: Classes, batch: Any) -> float:
        """Return the entropy over many batches; NaN if not known.

        ``classes`` were counted in them; one of them, ``batch``, was given to the loss inside of the block.
        """
        found: Counter[int] = Counter()
        for target, ignored in self.given:
            counts = classes.counts_of(target, batch)
            if counts is None:
                return math.nan
            found.update({n: count for n, count in counts.items() if n != ignored})
        return _entropy(found) if self._is_known else math.nan

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
        self.given = [*self.given, (target, ignore_index)][-_MOST:]
        self._counts.update(_counts(target[target != ignore_index]))


class Classes:
    """Counts of the integers in batches, for traced losses."""

    def __init__(self) -> None:
        self._counts: list[Counter[int]] = []  # by the position of the tensor

    def count(self, batch: Any) -> None:
        """Count those of one more batch."""
        for n, tensor in enumerate(tensors_in(batch)):
            self._counts += [Counter()] * (n == len(self._counts))
            if _has_classes(tensor):
                self._counts[n].update(_counts(tensor))

    def counts_of(self, target: Tensor, batch: Any) -> Counter[int] | None:
        """Return the counts of a target's tensor; None if unknown."""
        for n, tensor in enumerate(tensors_in(batch)):
            if n < len(self._counts) and _has_classes(tensor) and _is_same(target, tensor):
                return self._counts[n]
        return None


def _has_classes(tensor: Tensor) -> bool:
    is_integer = not (tensor.is_floating_point() or tensor.is_complex() or tensor.dtype == torch.bool)
    return is_integer and 0 < tensor.numel() <= _LARGEST


def _is_same(target: Tensor, tensor: Tensor) -> bool:
    """Whether a target is a tensor, a part of it, or a copy."""
    if target.untyped_storage().data_ptr() == tensor.untyped_storage().data_ptr():
        return True
    return target.numel() == tensor.numel() and bool((target.flatten() == tensor.flatten()).all())


def _counts(classes: Tensor) -> dict[int, int]:
    found, counts = classes.unique(return_counts=True)
    return dict(zip(found.tolist(), counts.tolist(), strict=True))


def _entropy(counts: Counter[int]) -> float:
    total = counts.total()
    return -sum(n / total * math.log(n / total) for n in counts.values()) if total else math.nan
