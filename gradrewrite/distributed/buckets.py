"""Buckets: several gradients in one flat tensor, for one collective."""

from __future__ import annotations

from collections.abc import Hashable, Sequence

import torch
from torch import Tensor


def bucket_order(kinds: Sequence[Hashable], sizes: Sequence[int | None], limit: float) -> list[list[int]]:
    """Return the positions of the members of each bucket, in the order of completion.

    Tensors of one bucket are of one kind. A bucket takes tensors as long as it has at most ``limit`` bytes; a tensor of
    unknown size (None) has a bucket of its own.
    """
    done: list[list[int]] = []
    filling: dict[Hashable, tuple[list[int], int]] = {}
    for position, (kind, size) in enumerate(zip(kinds, sizes, strict=True)):
        if size is None:
            done.append([position])
            continue
        members, filled = filling.get(kind, ([], 0))
        if members and filled + size > limit:
            done.append(members)
            members, filled = [], 0
        filling[kind] = ([*members, position], filled + size)
    done += (members for members, _ in filling.values())
    return sorted(done, key=lambda members: members[-1])


def flatten(tensors: Sequence[Tensor]) -> Tensor:
    """Return tensors of one dtype as one real vector, in memory order if dense; a single one is not copied."""
    flat = [_in_memory_order(torch.view_as_real(t) if t.is_complex() else t).reshape(-1) for t in tensors]
    return flat[0] if len(flat) == 1 else torch.cat(flat)


def unflatten(flat: Tensor, tensors: Sequence[Tensor]) -> list[Tensor]:
    """Return views of a flattened vector in the shapes, strides and dtypes of these tensors; they are not read."""
    sizes = [t.numel() * (2 if t.is_complex() else 1) for t in tensors]
    parts = [flat] if len(sizes) == 1 else flat.split(sizes)
    results = []
    for part, tensor in zip(parts, tensors, strict=True):
        like = torch.view_as_real(tensor) if tensor.is_complex() else tensor
        order = _memory_order(like)
        result = part.view([like.shape[d] for d in order])
        if order != sorted(order):
            result = result.permute([order.index(d) for d in range(len(order))])
        results.append(torch.view_as_complex(result) if tensor.is_complex() else result)
    return results


def _in_memory_order(tensor: Tensor) -> Tensor:
    order = _memory_order(tensor)
    return tensor if order == sorted(order) else tensor.permute(order)


def _memory_order(tensor: Tensor) -> list[int]:
    """The dimensions, outermost in memory first; in their own order where elements overlap or have gaps."""
    own = list(range(tensor.dim()))
    if not all(isinstance(n, int) for n in (*tensor.shape, *tensor.stride())):
        return own
    strides = tensor.stride()
    order = sorted(own, key=lambda d: (-strides[d], d))
    return order if tensor.permute(order).is_contiguous() else own
