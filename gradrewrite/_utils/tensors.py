"""Tensors in nested containers; random state."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import Tensor


def tensors_in(value: Any) -> Iterator[Tensor]:
    """All tensors in nested containers, dataclasses included."""
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, Mapping):
        for item in value.values():
            yield from tensors_in(item)
    elif isinstance(value, list | tuple | set):
        for item in value:
            yield from tensors_in(item)
    elif hasattr(value, "__dataclass_fields__"):
        for name in value.__dataclass_fields__:
            yield from tensors_in(getattr(value, name))


@contextlib.contextmanager
def kept_random_state() -> Iterator[None]:
    """Leave the random state of all devices as it is."""
    devices = range(torch.cuda.device_count()) if torch.cuda.is_initialized() else ()
    with torch.random.fork_rng(devices=devices):
        yield


def computable(tensor: Tensor) -> Tensor:
    """Return a tensor, in float32 if its numbers have 8 bits: torch has no arithmetic for these."""
    return tensor.float() if tensor.is_floating_point() and tensor.itemsize == 1 else tensor
