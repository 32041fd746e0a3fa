"""Gradients of matrices as rows: the term of an example is the sum of ``left[t] x right[t]`` over its rows.

That of a linear layer has rows of errors and of inputs, that of an embedding one-hot rows (words) and rows of errors.
The norm of such a sum follows from Gram matrices of the rows, without the term itself; several uses of one parameter
have their rows one behind the other.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, fx

from gradrewrite._compat import fake_tensors, operators
from gradrewrite.ir import markers
from gradrewrite.per_example.layouts import Batch, Size, unflatten
from gradrewrite.per_example.op_calls import PUTS, size_of
from gradrewrite.per_example.tails import FunctionOfNodes, Tail

_aten = torch.ops.aten


@dataclass(frozen=True, slots=True)
class Factor:
    """One side of the rows: a matrix of rows by example, or a tensor of words."""

    node: fx.Node
    layout: Batch
    is_transposed: bool = False  # its rows are in its last dimension


@dataclass(frozen=True, slots=True)
class Rows:
    """The rows of one use of a parameter."""

    left: Factor  # rows of as many elements as the gradient has rows; words, if these are one-hot
    right: Factor  # rows of as many elements as the gradient has columns
    is_one_hot: bool = False
    padding: int | None = None  # the word that does not count; None if all do
    size: Size | None = None  # number of words: negative ones count from the end; None where there are no negative ones
    mask: Factor | None = None  # which rows count; None if all do


@dataclass(frozen=True, slots=True)
class RowsOfExamples:
    """The rows as tensors: ``left`` is ``[B, T, O]``, or words ``[B, T]``; ``right`` is ``[B, T, I]``."""

    left: Tensor
    right: Tensor
    is_one_hot: bool


def find_rows(tail: Tail) -> list[Rows]:
    """Return the rows of all uses of a matrix; none if they are not known."""
    if len(size_of(tail.gradient)) != 2:
        return []
    found: list[Rows] = []
    todo = [(tail.gradient, False)]
    while todo:
        node, is_turned = todo.pop()
        rows = _rows_of(tail, node, is_turned)
        if rows is not None:
            found.append(rows)
        elif node.target in _TURNS and list(node.args[1:]) in ([], [[1, 0]], [0, 1], [1, 0]):
            todo.append((node.all_input_nodes[0], not is_turned))
        elif node.target in _KEEPS and size_of(node) == size_of(node.all_input_nodes[0]):
            todo.append((node.all_input_nodes[0], is_turned))
        elif node.target is _aten.add.Tensor and not node.kwargs and node not in tail.splits:
            todo += [(a, is_turned) for a in node.args if isinstance(a, fx.Node)]
        else:
            return []
    return found


def _rows_of(tail: Tail, node: fx.Node, is_turned: bool) -> Rows | None:
    if node not in tail.splits:
        return None
    split, given = tail.splits[node], operators.arguments_of(node)
    if node.target is _aten.mm.default:
        left, right = given["self"], given["mat2"]
        a, b = Factor(left, split[left], is_transposed=True), Factor(right, split[right])
        return Rows(b, a) if is_turned else Rows(a, b)
    if is_turned:
        return None
    if node.target is _aten.embedding_dense_backward.default:
        words, errors, padding = given["indices"], given["grad_output"], int(given["padding_idx"])
        return Rows(Factor(words, split[words]), Factor(errors, split[errors]), True, None if padding < 0 else padding)
    if node.target in PUTS and len(given["indices"]) == 1:
        (words,), errors, mask = given["indices"], given["values"], given.get("mask")
        if len(size_of(errors)) != len(size_of(words)) + 1 or (mask is not None and size_of(mask)[-1] != 1):
            return None
        if mask is not None and len(size_of(mask)) != len(size_of(errors)):
            return None
        found = Rows(Factor(words, split[words]), Factor(errors, split[errors]), True, size=size_of(node)[0])
        return found if mask is None else replace(found, mask=Factor(mask, split[mask]))
    return None


_TURNS = frozenset(operators.overloads(("t", "permute", "transpose")))
_KEEPS = {
    *operators.overloads(("view", "_unsafe_view", "clone", "alias", "detach", "_to_copy")),
    torch.ops.prims.convert_element_type.default,
    markers.mark_error,
}


def _read(rows: Rows, given: dict[fx.Node, Tensor], num_examples: Size, dtype: torch.dtype) -> RowsOfExamples:
    """Return the rows by example; those that do not count are 0."""

    def split(factor: Factor) -> Tensor:
        found = unflatten(given[factor.node], factor.layout, num_examples)
        return found.transpose(1, 2) if factor.is_transposed else found

    left, right = split(rows.left), split(rows.right).to(dtype)
    if not rows.is_one_hot:
        return RowsOfExamples(left.to(dtype), right, False)
    words, right = left.flatten(1), right.flatten(1, -2)
    if rows.size is not None:
        size: Any = rows.size
        words = torch.where(words < 0, words + size, words)
    if rows.mask is not None:
        counts = split(rows.mask).flatten(1)
    elif rows.padding is not None:
        counts = words.ne(rows.padding)
    else:
        return RowsOfExamples(words, right, True)
    return RowsOfExamples(torch.where(counts, words, 0), torch.where(counts.unsqueeze(-1), right, 0), True)


def has_cheap_gram(rows: list[Rows], gradient: fx.Node) -> bool:
    """Whether Gram matrices take fewer multiplications to the norms than the terms themselves."""
    if any(own.is_one_hot for own in rows):
        return True
    number = sum(fake_tensors.hint_of(own.left.layout.pre * own.left.layout.post) for own in rows)
    height, width = map(fake_tensors.hint_of, size_of(gradient))
    return number * (height + width) <= height * width


def square_norms_of(rows: list[Rows], num_examples: Size, dtype: torch.dtype) -> FunctionOfNodes:
    """Return the squared norms of the terms ``[B]``, by Gram matrices."""

    def square_norms(merged: list[RowsOfExamples]) -> Tensor:
        total: Any = 0
        for n, first in enumerate(merged):
            for second in merged[n:]:
                total = total + (1 if second is first else 2) * _inner(first, second)
        squares: Tensor = total.clamp(min=0)  # rounding
        return squares

    return _of_rows(rows, num_examples, dtype, square_norms)


def products_of(rows: list[Rows], num_examples: Size, dtype: torch.dtype) -> FunctionOfNodes | None:
    """Return the terms ``[B, O, I]``; None where rows are words."""
    if any(own.is_one_hot for own in rows):
        return None
    return _of_rows(rows, num_examples, dtype, lambda dense: torch.bmm(dense[0].left.transpose(1, 2), dense[0].right))


def _of_rows(
    rows: list[Rows], num_examples: Size, dtype: torch.dtype, compute: Callable[[list[RowsOfExamples]], Tensor]
) -> FunctionOfNodes:
    factors = (factor for own in rows for factor in (own.left, own.right, own.mask))
    nodes = list(dict.fromkeys(factor.node for factor in factors if factor is not None))

    def run(*tensors: Tensor) -> Tensor:
        given = dict(zip(nodes, tensors, strict=True))
        return compute(_merged([_read(own, given, num_examples, dtype) for own in rows]))

    return nodes, run


def _merged(known: list[RowsOfExamples]) -> list[RowsOfExamples]:
    """Put the rows of several uses one behind the other: the dense ones, and those of words."""
    merged = []
    for is_one_hot in (False, True):
        own = [rows for rows in known if rows.is_one_hot == is_one_hot]
        if len(own) == 1:
            merged.append(own[0])
        elif own:
            left, right = torch.cat([rows.left for rows in own], 1), torch.cat([rows.right for rows in own], 1)
            merged.append(RowsOfExamples(left, right, is_one_hot))
    return merged


def _inner(first: RowsOfExamples, second: RowsOfExamples) -> Tensor:
    """Inner products ``[B]`` of the terms of two uses."""
    if first is second and not first.is_one_hot and first.left.shape[1] == 1:
        return first.left.square().sum((1, 2)) * first.right.square().sum((1, 2))
    rights = torch.bmm(first.right, second.right.transpose(1, 2))
    if first.is_one_hot:  # then both are: dense rows come first
        same = first.left.unsqueeze(2) == second.left.unsqueeze(1)
        return torch.where(same, rights, 0).sum((1, 2))
    if second.is_one_hot:
        words = second.left.unsqueeze(1).expand(-1, first.left.shape[1], -1)
        return (first.left.gather(2, words) * rights).sum((1, 2))
    return (torch.bmm(first.left, second.left.transpose(1, 2)) * rights).sum((1, 2))


def sum_of_squares_of(
    rows: list[Rows], gradient: fx.Node, num_examples: Size, dtype: torch.dtype
) -> FunctionOfNodes | None:
    """Return the sum over examples of the squared terms, ``[O, I]``.

    None where that needs the terms: several dense rows for each example, or rows of words and dense ones together.
    """
    if all(own.is_one_hot for own in rows):
        return _of_rows(rows, num_examples, dtype, lambda words: _squares_of_words(words[0], size_of(gradient)))
    if len(rows) > 1 or rows[0].left.layout.pre * rows[0].left.layout.post != 1:
        return None

    def squares_of_single(dense: list[RowsOfExamples]) -> Tensor:
        return dense[0].left[:, 0].square().t() @ dense[0].right[:, 0].square()

    return _of_rows(rows, num_examples, dtype, squares_of_single)


def _squares_of_words(rows: RowsOfExamples, size: tuple[Size, ...]) -> Tensor:
    """The sum over words: each counts once in an example, with the sum of its rows there."""
    same = rows.left.unsqueeze(2) == rows.left.unsqueeze(1)  # [B, T, T]
    whole, number = torch.bmm(same.to(rows.right.dtype), rows.right), rows.left.shape[1]
    before = torch.ones(number, number, dtype=torch.bool, device=same.device).tril(-1)
    is_first = ~(same & before).any(2)
    squares = torch.where(is_first.unsqueeze(-1), whole.square(), 0)
    base = rows.right.new_zeros(size)
    return base.index_put([rows.left.flatten()], squares.flatten(0, 1), accumulate=True)
