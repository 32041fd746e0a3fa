"""Calls that made non-finite values in a replay, as they are told."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, fx

from gradrewrite._compat import operators
from gradrewrite._utils.tensors import computable, tensors_in
from gradrewrite.errors import Operand
from gradrewrite.replay.indices import indices_text, names_of_dimensions, rows_of, split_rows
from gradrewrite.replay.reason_table import growth_of, reason_of
from gradrewrite.replay.reasons import EarlierOp, OpCall, Reason

_FAR = 4  # how many ops before are looked at
_COLUMNS, _LARGE_COLUMN = 3, 30.0  # at least that many columns, and how large one is, over the median of the others
_ROWS = 64  # numbers of rows that are kept


@dataclass(frozen=True, slots=True)
class BatchSizes:
    """Sizes of the dimensions of the batch."""

    rows: int | None = None
    positions: frozenset[int] = frozenset()  # lengths of sequences

    @classmethod
    def of(cls, inputs: Sequence[Any]) -> BatchSizes:
        """Read the sizes off the inputs of a model: the first dimension, and the second of tokens and sequences."""
        tensors = [t for t in tensors_in(list(inputs)) if t.dim()]
        rows = tensors[0].shape[0] if tensors else None
        own = [t for t in tensors if t.shape[0] == rows and t.dim() > 1]
        lengths = {t.shape[1] for t in own if t.dim() == 3 or (t.dim() == 2 and not t.is_floating_point())}
        return cls(rows, frozenset(lengths | {size - 1 for size in lengths if size > 2}))  # a target is shifted by one

    def positions_in(self, shape: Sequence[int]) -> int | None:
        """Return the length of the sequences in a value."""
        return next((size for size in shape if size in self.positions), None)


@dataclass(frozen=True, slots=True)
class NotedCall:
    """Why and where an op made a non-finite value."""

    reason: Reason | None
    operands: tuple[Operand, ...]
    elements: Tensor  # where its result, or the guilty operand, is at fault
    dims: tuple[str, ...] | None  # names of dimensions; None for the usual ones

    def places(self, sizes: BatchSizes) -> tuple[str, tuple[int, ...]]:
        """Return the elements in words, and the rows."""
        mask = self.elements
        if self.dims is not None:
            mask = _by_batch(mask, sizes.rows)
            names = (self.dims[0], *self.dims[len(self.dims) + 1 - mask.dim() :]) if mask.dim() > 1 else self.dims[:1]
        else:
            positions = sizes.positions_in(mask.shape)
            mask = split_rows(mask, sizes.rows, positions)
            names = names_of_dimensions(mask.shape, sizes.rows, positions)
        text = indices_text(mask, names) if not mask.all() else ""
        is_of_rows = "row" in names and mask.shape[names.index("row")] == sizes.rows
        return text, rows_of(mask, names.index("row"))[:_ROWS] if is_of_rows and mask.any() else ()


def _by_batch(mask: Tensor, rows: int | None) -> Tensor:
    """Take the heads of attention out of the rows."""
    is_of_heads = rows and mask.dim() > 1 and mask.shape[0] != rows and mask.shape[0] % rows == 0
    return mask.unflatten(0, (rows, -1)) if is_of_heads else mask


def note_call(
    node: fx.Node,
    args: Sequence[Any],
    kwargs: dict[str, Any],
    result: Any,
    backward_of: str,
    name_of: Callable[[fx.Node], str],
) -> NotedCall | None:
    """Note a call of an operator; None if its result has no dense tensor.

    Args:
        node: Its node.
        args: Its arguments.
        kwargs: Its keyword arguments.
        result: What it returned.
        backward_of: The op of the forward that it differentiates; ``""`` in the forward.
        name_of: From a node to the name of its value.
    """
    bad = next((t for t in tensors_in(result) if _is_dense(t) and not bool(torch.isfinite(computable(t)).all())), None)
    if bad is None:
        return None
    call = OpCall(op_name(node), [*args, *kwargs.values()], bad.detach(), backward_of, earlier_ops(node))
    reason = reason_of(call)
    operands = _operands(node, args, kwargs, name_of)
    elements, dims = call.is_bad, None
    if reason is not None and reason.elements is not None:
        elements, dims = reason.elements, reason.dims
    return NotedCall(reason, operands, elements, dims)


def note_growth(
    node: fx.Node, args: Sequence[Any], kwargs: dict[str, Any], result: Any, name_of: Callable[[fx.Node], str]
) -> NotedCall | None:
    """Note an exponential with a very large finite result; None if it is not."""
    if not isinstance(result, Tensor) or not _is_dense(result):
        return None
    reason = growth_of(OpCall(op_name(node), [*args, *kwargs.values()], result.detach()))
    if reason is None or reason.elements is None:
        return None
    return NotedCall(reason, _operands(node, args, kwargs, name_of), reason.elements, None)


def _operands(
    node: fx.Node, args: Sequence[Any], kwargs: dict[str, Any], name_of: Callable[[fx.Node], str]
) -> tuple[Operand, ...]:
    named = zip(node.all_input_nodes, _values_of(node, args, kwargs), strict=False)
    return tuple(operand_of(name_of(n), value) for n, value in named if isinstance(value, Tensor) and _is_dense(value))


def operand_of(name: str, value: Tensor) -> Operand:
    """Return a tensor as an operand of an error."""
    numbers = computable(value.detach())
    numbers = numbers.abs() if numbers.is_complex() else numbers
    finite = numbers[torch.isfinite(numbers)]
    low, high = (float(finite.min()), float(finite.max())) if finite.numel() else (float("nan"), float("nan"))
    dtype = str(value.dtype).removeprefix("torch.")
    zeros = int((numbers == 0).sum())
    return Operand(name, dtype, tuple(value.shape), low, high, zeros, numbers.numel() - finite.numel())


def op_name(node: fx.Node) -> str:
    """Name of an operator without underscores around it."""
    return operators.name_of(node).strip("_")


def common_value(batch: Mapping[str, Any], rows: Sequence[int]) -> str:
    """Return a whole number of the batch that these rows have, and no others: ``t is 49``; ``""`` without one."""
    for name, value in batch.items():
        if not isinstance(value, Tensor) or value.dim() != 1 or value.is_floating_point() or value.is_complex():
            continue
        if rows and max(rows) < len(value):
            own = value[list(rows)]
            is_own = int((value == own[0]).sum()) == len(own) == int((own == own[0]).sum())
            is_at_end = own[0] in (value.min(), value.max())  # one row has many numbers that no other has
            if is_own and len(own) < len(value) and (len(own) > 1 or is_at_end):
                return f"{name} is {int(own[0])}"
    return ""


def large_column(batch: Mapping[str, Any]) -> str:
    """Return the column of the batch that is far larger than the others; ``""`` without one."""
    for name, value in batch.items():
        if not isinstance(value, Tensor) or not value.is_floating_point() or value.dim() not in (2, 3):
            continue
        sizes = value.detach().abs().nan_to_num(0.0, 0.0, 0.0).flatten(0, -2).float()
        if sizes.shape[1] < _COLUMNS or not len(sizes):
            continue
        largest = sizes.amax(0)
        column = int(largest.argmax())
        usual = float(torch.cat([largest[:column], largest[column + 1 :]]).median())
        if usual > 0 and float(largest[column]) > _LARGE_COLUMN * usual:
            times = f"{float(largest[column]) / usual:.3g} times the others"
            return f"column {column} of {name} is up to {float(largest[column]):.4g}, {times}"
    return ""


def reads_values(node: fx.Node) -> bool:
    """Whether a result has numbers that are computed from those of the operands."""
    return not op_name(node).endswith("_like") and not op_name(node).startswith(("new_", "sym_"))


def earlier_ops(node: fx.Node) -> list[EarlierOp]:
    """Return the ops before a node, the nearest first."""
    found = [(0, _earlier(node, -1))]
    for number, given in enumerate(node.args):
        level, seen = [given] if isinstance(given, fx.Node) else [], {node}
        for distance in range(_FAR):
            seen.update(level)
            found += [(distance, _earlier(one, number)) for one in dict.fromkeys(level) if one.op == "call_function"]
            level = [read for one in level for read in one.all_input_nodes if read not in seen]
    return [one for _, one in sorted(found, key=lambda pair: pair[0])]


def _earlier(node: fx.Node, operand: int) -> EarlierOp:
    value = node.meta.get("val")
    numbers = tuple(float(a) for a in (*node.args, *node.kwargs.values()) if isinstance(a, float))
    return EarlierOp(op_name(node), numbers, value.dtype if isinstance(value, Tensor) else None, operand)


def _is_dense(value: Tensor) -> bool:
    return value.layout is torch.strided and (value.is_floating_point() or value.is_complex())


def _values_of(node: fx.Node, args: Sequence[Any], kwargs: dict[str, Any]) -> list[Any]:
    """Return the values of a node's inputs, in their order."""
    values: dict[fx.Node, Any] = {}

    def visit(given: Any, value: Any) -> None:
        if isinstance(given, fx.Node):
            values.setdefault(given, value)
        elif isinstance(given, list | tuple):
            for one, own in zip(given, value, strict=False):
                visit(one, own)

    visit(node.args, args)
    visit(tuple(node.kwargs.values()), tuple(kwargs.values()))
    return [values.get(read) for read in node.all_input_nodes]
