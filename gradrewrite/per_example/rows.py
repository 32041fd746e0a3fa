"""Gradients of matrices as rows: the term of an example is the sum of ``left[t] x right[t]`` over its rows.

That of a linear layer has rows of errors and of inputs, that of an embedding one-hot rows (words) and rows of errors.
The norm of such a sum follows from Gram matrices of the rows, without the term itself; several uses of one parameter
have their rows one behind the other.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any, Literal

import torch
from torch import Tensor, fx

from gradrewrite._compat import fake_tensors, operators
from gradrewrite.ir import ops
from gradrewrite.per_example.layouts import Batch, Size, unflatten
from gradrewrite.per_example.op_calls import PUTS, size_of
from gradrewrite.per_example.tails import Tail, TensorsFunction

_aten = torch.ops.aten


@dataclass(frozen=True, slots=True)
class Factor:
    """One side of the rows: a matrix of rows by example, or a tensor of words.

    Attributes:
        node: The node.
        layout: Where it has the examples.
        is_transposed: Whether its rows are in its last dimension.
    """

    node: fx.Node
    layout: Batch
    is_transposed: bool = False


@dataclass(frozen=True, slots=True)
class Rows:
    """The rows of one use of a parameter.

    Attributes:
        left: Rows of as many elements as the gradient has rows; words, if these are one-hot.
        right: Rows of as many elements as the gradient has columns.
        is_one_hot: Whether ``left`` are words.
        padding: The word that does not count; None if all do.
        size: Number of words: negative ones count from the end. None where there are no negative ones.
        mask: Which rows count; None if all do.
    """

    left: Factor
    right: Factor
    is_one_hot: bool = False
    padding: int | None = None
    size: Size | None = None
    mask: Factor | None = None

    @property
    def nodes(self) -> list[fx.Node]:
        """The nodes of all factors."""
        return [factor.node for factor in (self.left, self.right, self.mask) if factor is not None]


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
        words, errors = given["indices"], given["grad_output"]
        padding = int(given["padding_idx"])
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
_KEEPS = frozenset(
    (
        *operators.overloads(("view", "_unsafe_view", "clone", "alias", "detach", "_to_copy")),
        torch.ops.prims.convert_element_type.default,
        ops.mark_error,
    )
)


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


def _num_rows(rows: Rows, num_examples: Size) -> int:
    sizes = size_of(rows.left.node)
    number: Size = rows.left.layout.pre * rows.left.layout.post
    if rows.is_one_hot:
        for dim, size in enumerate(sizes):
            number = number if dim == rows.left.layout.dim else number * size
    return fake_tensors.hint_of(number)


Way = Literal["gram", "direct"]


def cheaper_way(rows: list[Rows], gradient: fx.Node, num_examples: Size) -> Way:
    """Return the way with fewer multiplications to the norms: by Gram matrices, or by the terms themselves."""
    if any(own.is_one_hot for own in rows):
        return "gram"
    number = sum(_num_rows(own, num_examples) for own in rows)
    height, width = map(fake_tensors.hint_of, size_of(gradient))
    return "gram" if number * (height + width) <= height * width else "direct"


def square_norms_of(rows: list[Rows], num_examples: Size, dtype: torch.dtype) -> tuple[list[fx.Node], TensorsFunction]:
    """Return nodes, and a function of their tensors: the squared norms of the terms ``[B]``, by Gram matrices."""
    nodes = _nodes_of(rows)

    def run(*tensors: Tensor) -> Tensor:
        given = dict(zip(nodes, tensors, strict=True))
        merged = _merged([_read(own, given, num_examples, dtype) for own in rows])
        total: Any = 0
        for n, first in enumerate(merged):
            for second in merged[n:]:
                total = total + (1 if second is first else 2) * _inner(first, second)
        squares: Tensor = total.clamp(min=0)  # rounding
        return squares

    return nodes, run


def products_of(
    rows: list[Rows], num_examples: Size, dtype: torch.dtype
) -> tuple[list[fx.Node], TensorsFunction] | None:
    """Return nodes, and a function of their tensors: the terms ``[B, O, I]``; None where rows are words."""
    if any(own.is_one_hot for own in rows):
        return None
    nodes = _nodes_of(rows)

    def run(*tensors: Tensor) -> Tensor:
        given = dict(zip(nodes, tensors, strict=True))
        (merged,) = _merged([_read(own, given, num_examples, dtype) for own in rows])
        return torch.bmm(merged.left.transpose(1, 2), merged.right)

    return nodes, run


def _nodes_of(rows: list[Rows]) -> list[fx.Node]:
    return list(dict.fromkeys(node for own in rows for node in own.nodes))


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
) -> tuple[list[fx.Node], TensorsFunction] | None:
    """Return nodes, and a function of their tensors: the sum over examples of the squared terms, ``[O, I]``.

    None where that needs the terms: several dense rows for each example, or rows of words and dense ones together.
    """
    nodes = _nodes_of(rows)
    if all(own.is_one_hot for own in rows):

        def run(*tensors: Tensor) -> Tensor:
            given = dict(zip(nodes, tensors, strict=True))
            (merged,) = _merged([_read(own, given, num_examples, dtype) for own in rows])
            return _squares_of_words(merged, size_of(gradient))

        return nodes, run
    if len(rows) > 1 or rows[0].left.layout.pre * rows[0].left.layout.post != 1:
        return None

    def square(*tensors: Tensor) -> Tensor:
        found = _read(rows[0], dict(zip(nodes, tensors, strict=True)), num_examples, dtype)
        return found.left[:, 0].square().t() @ found.right[:, 0].square()

    return nodes, square


def _squares_of_words(rows: RowsOfExamples, size: tuple[Size, ...]) -> Tensor:
    """The sum over words: each counts once in an example, with the sum of its rows there."""
    same = rows.left.unsqueeze(2) == rows.left.unsqueeze(1)  # [B, T, T]
    whole = torch.bmm(same.to(rows.right.dtype), rows.right)
    number = rows.left.shape[1]
    before = torch.ones(number, number, dtype=torch.bool, device=same.device).tril(-1)
    is_first = ~(same & before).any(2)
    squares = torch.where(is_first.unsqueeze(-1), whole.square(), 0)
    base = rows.right.new_zeros(size)
    return base.index_put([rows.left.flatten()], squares.flatten(0, 1), accumulate=True)
