"""Optimizers, GradScaler, and foreach operations."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor


def note_step(optimizer: torch.optim.Optimizer) -> None:
    """Mark ``step`` as called, though it changed nothing; else learning-rate schedulers warn."""
    optimizer.__dict__["_opt_called"] = True


def foreach_copy(targets: Sequence[Tensor], sources: Sequence[Tensor]) -> None:
    """Copy each source into its target, by few kernels."""
    torch._foreach_copy_(list(targets), list(sources))


def foreach_subtract(tensors: Sequence[Tensor], others: Sequence[Tensor]) -> None:
    """Subtract in place, by few kernels where the dtypes are equal."""
    torch._foreach_sub_(list(tensors), list(others))


def foreach_norm(tensors: Sequence[Tensor], dtype: torch.dtype) -> Tensor:
    """L2 norms, accumulated in ``dtype``, as one flat tensor."""
    return torch.stack(torch._foreach_norm(list(tensors), 2, dtype=dtype))


def scale_of(scaler: torch.amp.GradScaler) -> Tensor | None:
    """The scale of a GradScaler on its device; None before its first use, or if it is disabled."""
    return scaler._scale if scaler.is_enabled() else None  # get_scale() would wait for the device
