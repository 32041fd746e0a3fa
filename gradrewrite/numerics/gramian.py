"""Gram matrices of the gradients of losses."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from gradrewrite.numerics.library import LIBRARY

CHUNK = 1 << 20  # elements; the rows of all losses stay in a cache between their products

LIBRARY.define("gramian(Tensor[] gradients, int[] losses, int[] counts, int number) -> Tensor")
LIBRARY.define("loss_cosines(Tensor gramian) -> Tensor")


def gramian(
    gradients: Sequence[Tensor], losses: Sequence[int], counts: Sequence[int], number: int, *, is_opaque: bool
) -> Tensor:
    """Inner products of the gradients of losses, summed over parameters, ``[number, number]``, float64.

    Gradients come parameter after parameter, ``counts`` of each, with the number of the loss of each, in ascending
    order; a missing one is 0. NaN and infinities propagate. Elements are multiplied and added in float32, of 64-bit
    gradients in float64, and in host memory where float32 has no room for a product. ``is_opaque``: by one operation
    that the compiler does not look into.
    """
    if is_opaque:
        found: Tensor = torch.ops.gradrewrite.gramian.default(list(gradients), list(losses), list(counts), number)
        return found
    return _gramian(gradients, losses, counts, number)


def cosines(gramian: Tensor, *, is_opaque: bool) -> Tensor:
    """Cosines between the gradients of losses, ``[1 + K (K - 1) / 2]``: the smallest one, then each pair ``i < j``.

    NaN where a norm is 0 or not finite; the smallest is that of the other pairs, NaN if there is none. ``is_opaque`` as
    in ``gramian``.
    """
    return torch.ops.gradrewrite.loss_cosines.default(gramian) if is_opaque else _cosines(gramian)


def diagonal_of(matrix: Tensor) -> Tensor:
    """The diagonal of a square matrix; ``Tensor.diagonal`` has a warning of torch in compiled code (2.13)."""
    return matrix.reshape(-1)[:: len(matrix) + 1]


def _cosines(gramian: Tensor) -> Tensor:
    norms = diagonal_of(gramian).sqrt()
    norms = torch.where(norms.isfinite(), norms, torch.nan)  # of too large a norm a product may be finite
    all_pairs = gramian / norms[:, None] / norms[None, :]
    pairs = list(itertools.combinations(range(len(gramian)), 2))
    found = torch.stack([all_pairs[i, j] for i, j in pairs]) if pairs else gramian.new_full((1,), torch.nan)
    smallest = torch.where(found.isnan(), torch.inf, found).amin()
    smallest = torch.where(smallest == torch.inf, torch.nan, smallest).reshape(1)
    return torch.cat([smallest, found]) if pairs else smallest


def _gramian(gradients: Sequence[Tensor], losses: Sequence[int], counts: Sequence[int], number: int) -> Tensor:
    terms: dict[tuple[int, int], list[Tensor]] = {}
    for rows, own in _by_parameter(gradients, losses, counts):
        wide = [_real(row).to(torch.promote_types(row.dtype.to_real(), torch.float32)) for row in rows]
        for (a, i), (b, j) in itertools.combinations_with_replacement(zip(wide, own, strict=True), 2):
            terms.setdefault((i, j), []).append((a * b).sum().to(torch.float64))
    zero = gradients[0].new_zeros((), dtype=torch.float64)
    sums = {pair: torch.stack(found).sum() if len(found) > 1 else found[0] for pair, found in terms.items()}
    flat = [sums.get((min(i, j), max(i, j)), zero) for i in range(number) for j in range(number)]
    return torch.stack(flat).view(number, number)


def _gramian_on_cpu(gradients: Sequence[Tensor], losses: Sequence[int], counts: Sequence[int], number: int) -> Tensor:
    sums = [[0.0] * number for _ in range(number)]
    for rows, own in _by_parameter(gradients, losses, counts):
        flat = _flat(rows)
        wide = torch.promote_types(flat[0].dtype, torch.float32)
        for start in range(0, flat[0].numel(), CHUNK):
            chunks = [row[start : start + CHUNK].to(wide) for row in flat]
            for (a, i), (b, j) in itertools.combinations_with_replacement(zip(chunks, own, strict=True), 2):
                sums[i][j] += _dot(a, b)
    for i, j in itertools.combinations(range(number), 2):
        sums[j][i] = sums[i][j]
    return torch.tensor(sums, dtype=torch.float64)


def _dot(a: Tensor, b: Tensor) -> float:
    """The inner product, in float64 outside of the range of float32."""
    found = torch.dot(a, b).item()
    return found if 0 < abs(found) < math.inf else torch.dot(a.double(), b.double()).item()


def _flat(rows: Sequence[Tensor]) -> list[Tensor]:
    """Return tensors of one shape as vectors, in one order.

    Dense memory is not copied.
    """
    order = sorted(range(rows[0].dim()), key=rows[0].stride, reverse=True)
    return [_real(row.permute(order)).reshape(-1) for row in rows]


def _real(tensor: Tensor) -> Tensor:
    return torch.view_as_real(tensor.resolve_conj()) if tensor.is_complex() else tensor


def _by_parameter(
    gradients: Sequence[Tensor], losses: Sequence[int], counts: Sequence[int]
) -> Iterator[tuple[Sequence[Tensor], Sequence[int]]]:
    start = 0
    for count in counts:
        yield gradients[start : start + count], losses[start : start + count]
        start += count


def _fake(gradients: Sequence[Tensor], losses: Sequence[int], counts: Sequence[int], number: int) -> Tensor:
    return gradients[0].new_empty((number, number), dtype=torch.float64)


LIBRARY.impl("gramian", _gramian, "CompositeExplicitAutograd")
LIBRARY.impl("gramian", _gramian_on_cpu, "CPU")
torch.library.register_fake("gradrewrite::gramian", _fake, lib=LIBRARY)
LIBRARY.impl("loss_cosines", _cosines, "CompositeExplicitAutograd")
torch.library.register_fake(
    "gradrewrite::loss_cosines", lambda g: g.new_empty(1 + len(g) * (len(g) - 1) // 2), lib=LIBRARY
)
