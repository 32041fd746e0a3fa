"""Scaling by a factor that is known on the device alone."""

from __future__ import annotations

import torch
from torch import Tensor


def scale_where(tensor: Tensor, factor: Tensor, acts: Tensor) -> Tensor:
    """Return a scaled tensor, or its bits if the scaling does not act; shape, dtype and device are kept.

    ``factor`` and ``acts`` are 0-d; the product is computed in the wider of both types.
    """
    wide = tensor.to(torch.promote_types(tensor.dtype, factor.dtype)) * factor.to(tensor.device)
    return torch.where(acts.to(tensor.device), wide.to(tensor.dtype), tensor)
