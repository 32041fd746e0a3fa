"""Checks of settings that several actions share."""

from __future__ import annotations

import math
from dataclasses import MISSING, fields
from typing import Any

import torch
from torch import Tensor


def check_number(action: str, name: str, value: float | Tensor) -> None:
    """A setting is a real number other than NaN, or a real tensor with one element (read at every backward)."""
    if isinstance(value, Tensor):
        if value.numel() != 1 or value.is_complex() or value.layout is not torch.strided:
            raise ValueError(
                f"{action}: {name} as a tensor has one real element, got shape {tuple(value.shape)}, {value.dtype}"
            )
    elif isinstance(value, bool) or not isinstance(value, int | float):
        raise TypeError(f"{action}: {name} is a number or a tensor with one element, got {value!r}")
    elif math.isnan(value):
        raise ValueError(f"{action}: {name} must not be NaN")


def check_norm(action: str, max_norm: float | Tensor, norm_type: float) -> None:
    """Bounds and orders that a norm clip takes: both > 0, infinity included."""
    check_number(action, "max_norm", max_norm)
    if not isinstance(max_norm, Tensor) and not max_norm > 0:
        raise ValueError(f"{action}: max_norm must be > 0, got {max_norm!r}")
    if isinstance(norm_type, bool) or not isinstance(norm_type, int | float):
        raise TypeError(f"{action}: norm_type is a number, got {norm_type!r}")
    if not norm_type > 0:
        raise ValueError(f"{action}: norm_type must be > 0, got {norm_type!r}")


def check_examples(action: str, loss_reduction: str, batch_dim: int) -> None:
    """How the loss of a batch follows from those of its examples, and where these are."""
    if loss_reduction not in ("mean", "sum"):
        raise ValueError(f'{action}: loss_reduction is "mean" or "sum", got {loss_reduction!r}')
    if isinstance(batch_dim, bool) or not isinstance(batch_dim, int):
        raise TypeError(f"{action}: batch_dim is an integer, got {batch_dim!r}")
    if batch_dim < 0:
        raise ValueError(f"{action}: batch_dim must be >= 0, got {batch_dim}")


def short_repr(action: Any) -> str:
    """An action as the call that makes it, without the settings that have their default."""
    shown = []
    for field in fields(action):
        if not field.repr:
            continue
        value = getattr(action, field.name)
        if field.default is MISSING:
            shown.append(repr(value) if not field.kw_only else f"{field.name}={value!r}")
        elif isinstance(value, Tensor) or value != field.default:
            shown.append(f"{field.name}={value!r}")
    return f"{type(action).__name__}({', '.join(shown)})"


def scalar(value: float | Tensor, like: Tensor) -> float | Tensor:
    """A setting as an operand for a real ``like``: a number, inf where the dtype cannot hold it; or a 0-d tensor."""
    if not isinstance(value, Tensor):
        return math.copysign(math.inf, value) if abs(value) > torch.finfo(like.dtype).max else value
    value = value.detach().reshape(()).to(like.dtype)
    return value if value.device.type == "cpu" else value.to(like.device)
