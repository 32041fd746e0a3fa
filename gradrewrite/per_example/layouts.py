"""Example layouts: the batch dimension of each node's value.

A batch has B examples. Sizes may be symbolic; two sizes are equal where torch can prove it.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

import torch
from torch import Tensor

from gradrewrite._compat.fake_tensors import as_number, equal_or_guarded, statically_known_true

Size: TypeAlias = "int | torch.SymInt"


@dataclass(frozen=True, slots=True)
class Const:
    """A value without examples, or a function of counts (of targets that are not ignored)."""


@dataclass(frozen=True, slots=True, eq=False)
class Batch:
    """A value with the examples along one dimension, of size ``pre * B * post``.

    Along that dimension the index of the example is ``(i // post) % B``: it is B itself, B * T flattened rows (``post``
    = T), T * B (``pre`` = T), or two batches one behind the other (``pre`` = 2).
    """

    dim: int  # from 0
    pre: Size = 1
    post: Size = 1

    def moved(self, dim: int) -> Batch:
        """Return the layout with the same rows in another dimension."""
        return Batch(dim, self.pre, self.post)

    def equals(self, other: Batch) -> bool:
        """Whether two values have the same examples at the same places; see ``equal_or_guarded``."""
        sizes = ((self.pre, other.pre), (self.post, other.post))
        return self.dim == other.dim and all(equal_or_guarded(a, b) for a, b in sizes)


@dataclass(frozen=True, slots=True)
class Sum:
    """A sum over examples of one term of each, and linear in these terms."""


@dataclass(frozen=True, slots=True)
class Mixed:
    """A value with a mixture of examples, or with an unknown layout."""

    node: str  # the first in the order of execution that mixed them
    reason: str  # the op, and what it does
    order: int  # position of that node


Layout: TypeAlias = Const | Batch | Sum | Mixed


class MixesExamplesError(Exception):
    """An op that mixes examples, or may do so; the message says how."""


def same_size(a: Size, b: Size) -> bool:
    """Whether two sizes are equal for every batch."""
    return statically_known_true(a == b)


def quotient(size: Size, divisor: Size) -> Size | None:
    """Return an exact quotient of sizes; None if the one may not divide the other."""
    if same_size(divisor, 1):
        return size
    return as_number(size // divisor) if divides(divisor, size) else None


def divides(divisor: Size, size: Size) -> bool:
    """Whether a size is a multiple of another for every batch."""
    remainder: Any = operator.mod(size, divisor)
    return statically_known_true(remainder == 0)


def product(sizes: Sequence[Size]) -> Size:
    """Return the product of sizes; 1 of none."""
    return as_number(math.prod(sizes))


def agree(layouts: Iterable[Batch | None]) -> Batch:
    """Return the common layout of those operands of an elementwise op that have the batch."""
    known = [layout for layout in layouts if layout is not None]
    if not known:
        raise MixesExamplesError("has no rule for a batch in this argument alone")
    if not all(known[0].equals(other) for other in known[1:]):
        raise MixesExamplesError("combines different examples")
    return known[0]


def of_view(layout: Batch, size: Sequence[Size], result: Sequence[Size], num_examples: Size) -> Batch:
    """Return the layout after a reshape from one size to another; the order of the elements is kept.

    Dimensions are put into groups, the smallest ones with as many elements on both sides; inside of its group, the
    batch is in the dimension that its rows divide. MixesExamplesError if no dimension holds whole examples in their
    order.
    """
    before, after = _group_of(layout.dim, size, result)
    pre = product([*(size[d] for d in before if d < layout.dim), layout.pre])
    post = product([layout.post, *(size[d] for d in before if d > layout.dim)])
    for position, dim in enumerate(after):
        left = quotient(pre, product([result[d] for d in after[:position]]))
        right = quotient(post, product([result[d] for d in after[position + 1 :]]))
        if left is not None and right is not None and same_size(result[dim], left * num_examples * right):
            return Batch(dim, left, right)
    raise MixesExamplesError("puts examples and others into one dimension")


def _group_of(wanted: int, size: Sequence[Size], result: Sequence[Size]) -> tuple[range, range]:
    """Return the dimensions before and after of the group that has a dimension of the sizes before."""
    at, to = 0, 0
    while at < len(size):
        begin, begin_to = at, to
        left, at = size[at], at + 1
        right: Size = 1
        while not same_size(left, right):
            grows = to >= len(result) or (at < len(size) and _is_smaller(left, right))
            if grows and at < len(size):
                left, at = left * size[at], at + 1
            elif to < len(result):
                right, to = right * result[to], to + 1
            else:
                break
        if at == len(size):
            to = len(result)
        if begin <= wanted < at:
            return range(begin, at), range(begin_to, to)
    raise MixesExamplesError("reshapes in a way that is not understood")


def _is_smaller(a: Size, b: Size) -> bool:
    """Whether one product of sizes has to grow, not the other; a wrong answer makes a group larger than need be."""
    if isinstance(a, int) and isinstance(b, int):
        return a < b
    return not same_size(a, b) and divides(a, b)


def unflatten(tensor: Tensor, layout: Batch, num_examples: Size) -> Tensor:
    """Bring the examples of ``[..., pre * B * post, ...]`` to dimension 0: ``[B, ..., pre * post, ...]``."""
    dim, pre, post = layout.dim, as_number(layout.pre), as_number(layout.post)
    if same_size(pre, 1) and same_size(post, 1):
        return tensor.movedim(dim, 0).unsqueeze(dim + 1)
    split: Tensor = tensor.unflatten(dim, (pre, as_number(num_examples), post))
    return split.movedim(dim + 1, 0).flatten(dim + 1, dim + 2)


def weighted(tensor: Tensor, layout: Batch, weights: Tensor) -> Tensor:
    """Multiply a tensor's examples by weights ``[B]``; a weight of 1 changes no bit."""
    rows, pre, post = weights.to(tensor.device), as_number(layout.pre), as_number(layout.post)
    if not same_size(post, 1):
        rows = rows.unsqueeze(1).expand(-1, post).reshape(-1)
    if not same_size(pre, 1):
        rows = rows.unsqueeze(0).expand(pre, -1).reshape(-1)
    factors = rows.reshape([-1 if d == layout.dim else 1 for d in range(tensor.dim())])
    return (tensor.to(torch.promote_types(tensor.dtype, weights.dtype)) * factors).to(tensor.dtype)
