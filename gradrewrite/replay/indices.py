"""Indices of elements in words: rows of the batch, positions of a sequence, columns."""

from __future__ import annotations

import itertools
from collections.abc import Sequence

from torch import Tensor

_SHOWN, _MOST = 3, 5  # how many are named where there are more than the second


def rows_of(mask: Tensor, dim: int) -> tuple[int, ...]:
    """Return the indices of true elements along a dimension."""
    rest = [d for d in range(mask.dim()) if d != dim % mask.dim()]
    found = mask.any(rest) if rest else mask
    return tuple(found.nonzero().flatten().tolist())


def split_rows(mask: Tensor, batch_size: int | None, positions: int | None) -> Tensor:
    """Give the rows a dimension of their own, where dimension 0 has positions or heads behind them.

    ``[B * T, ...]`` becomes ``[B, T, ...]``, and ``[B * H, T, ...]`` of attention ``[B, H, T, ...]``; groups of rows,
    ``[B / G, G, ...]``, become ``[B, ...]``; other shapes stay. ``positions`` is the length of the sequences, ``T``;
    None where it is not known.
    """
    if batch_size and mask.dim() > 1 and batch_size not in mask.shape and mask.shape[:2].numel() == batch_size:
        return mask.flatten(0, 1)  # groups of rows
    if not batch_size or not positions or not mask.dim() or mask.shape[0] == batch_size or mask.shape[0] % batch_size:
        return mask
    is_flat = mask.shape[0] in [batch_size * length for length in _lengths(positions)]
    is_of_heads = mask.dim() > 2 and positions in mask.shape[1:]
    return mask.unflatten(0, (batch_size, -1)) if is_flat or is_of_heads else mask


def _lengths(positions: int | None) -> tuple[int, ...]:
    """Return the length of sequences, and of those without their first or last token."""
    return () if positions is None or positions < 2 else (positions, positions - 1)


def names_of_dimensions(
    shape: Sequence[int], batch_size: int | None = None, positions: int | None = None
) -> tuple[str, ...]:
    """Return the names of the dimensions of a value: ``("row", "position", "column")``.

    Args:
        shape: Sizes of the value.
        batch_size: The first dimension of this size has the rows of the batch. None for a value without them: a matrix
            has rows and columns of its own, a vector elements.
        positions: Length of the sequences; the first other dimension of this size, or of one less (what comes next),
            has the positions. None where it is not known: a dimension between rows and columns has them.
    """
    rank = len(shape)
    rows = next((d for d, size in enumerate(shape) if size == batch_size), None)
    if rows is None:
        return {0: (), 1: ("element",), 2: ("row", "column")}.get(rank) or _numbered(rank)
    others = [d for d in range(rank) if d != rows]
    names = list(_numbered(rank))
    names[rows] = "row"
    known = [d for size in _lengths(positions) for d in others if shape[d] == size]
    if known or rank == 3:
        names[others.pop(others.index(known[0] if known else others[0]))] = "position"
    if others:
        names[others[-1]] = "column"
    return tuple(names)


def _numbered(rank: int) -> tuple[str, ...]:
    return tuple(f"dimension {d}" for d in range(rank))


def indices_text(mask: Tensor, names: Sequence[str]) -> str:
    """Return where a mask is true, in at most a line: ``"rows 4 to 7, positions 15 to 19"``.

    Args:
        mask: Booleans.
        names: Name of each dimension in the singular; rows come first, then positions. A dimension other than these is
            left out where the mask is true along all of it.

    Returns:
        ``""`` where the mask is true nowhere, and for a scalar.
    """
    if not mask.dim() or not mask.any():
        return ""
    order = sorted(range(mask.dim()), key=lambda d: (_rank_of(names[d]), d))
    mask, names = mask.permute(order), [names[d] for d in order]
    if mask.dim() == 1 or _is_product(mask):
        return _of_product(mask, names)
    return _by_first(mask, names)


def _rank_of(name: str) -> int:
    return {"row": 0, "position": 1}.get(name, 2)


def _is_product(mask: Tensor) -> bool:
    """Whether a mask is true at all combinations of its indices."""
    number = 1
    for dim in range(mask.dim()):
        number *= len(rows_of(mask, dim))
    return int(mask.sum()) == number


def _of_product(mask: Tensor, names: Sequence[str]) -> str:
    """Return the indices of each dimension, whatever their combinations."""
    parts = []
    for dim, name in enumerate(names):
        numbers, size = rows_of(mask, dim), mask.shape[dim]
        if len(numbers) == size and _rank_of(name) > 0 and (size == 1 or name != "position"):
            continue
        parts.append(numbers_text(name, numbers, size))
    return ", ".join(parts) or numbers_text(names[-1], rows_of(mask, -1), mask.shape[-1])


def _by_first(mask: Tensor, names: Sequence[str]) -> str:
    """Return the indices of dimension 0 in groups with the same ones of the others."""
    groups: dict[str, list[int]] = {}
    rows = rows_of(mask, 0)
    for row in rows:
        rest, others = mask[row], names[1:]
        while rest.dim() > 1 and not _is_product(rest):
            rest, others = rest.any(-1), others[:-1]
        groups.setdefault(_of_product(rest, others), []).append(row)
        if len(groups) > _SHOWN:
            break
    shown = list(groups.items())[:_SHOWN]
    texts = [", ".join((numbers_text(names[0], own), rest)) for rest, own in shown]
    more = len(rows) - sum(len(own) for _, own in shown)
    return "; ".join([*texts, *([f"and {more} more {_plural(names[0], more)}"] if more else [])])


def numbers_text(name: str, numbers: Sequence[int], size: int | None = None) -> str:
    """Return numbers with their noun: ``"rows 3, 8 and 11, and 7 more"``; ``"all rows"`` of this size."""
    if size == len(numbers) > 1:
        return f"all {name}s" if name in ("row", "element") else f"every {name}"
    runs = _runs(numbers)
    shown = runs if len(runs) <= _MOST else runs[:_SHOWN]
    more = len(numbers) - sum(last - first + 1 for first, last in shown)
    texts = [str(first) if first == last else f"{first} to {last}" for first, last in shown]
    text = " and ".join(filter(None, (", ".join(texts[:-1]), texts[-1])))
    return f"{_plural(name, len(numbers))} {text}{f', and {more} more' if more else ''}"


def _runs(numbers: Sequence[int]) -> list[tuple[int, int]]:
    """Return first and last of the runs of three numbers or more, others as runs of one."""
    found = []
    for _, group in itertools.groupby(enumerate(numbers), lambda pair: pair[1] - pair[0]):
        run = [number for _, number in group]
        found += [(run[0], run[-1])] if len(run) > 2 else [(number, number) for number in run]
    return found


def _plural(name: str, number: int) -> str:
    if name.startswith("dimension"):
        return f"{name} at"
    if number == 1:
        return name
    return f"{name[:-1]}ies" if name.endswith("y") else f"{name}s"
