"""Bytes kept for the backward."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import Tensor


def bytes_behind(output: Tensor, known: Sequence[Tensor]) -> int:
    """Return the bytes of all storages kept for an output, without those of known tensors."""
    left = {t.untyped_storage().data_ptr() for t in known}
    found: dict[int, int] = {}
    waiting: list[Any] = [output.grad_fn]
    seen = set()
    while waiting:
        node = waiting.pop()
        if node is None or node in seen:
            continue
        seen.add(node)
        waiting += [function for function, _ in node.next_functions]
        for tensor in getattr(node, "saved_tensors", ()):
            storage = tensor.untyped_storage()
            if storage.data_ptr() not in left:
                found[storage.data_ptr()] = storage.nbytes()
    return sum(found.values())
