"""Reasons of non-finite values: calls of ops, and rows of a table about them."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from gradrewrite._utils.tensors import computable, tensors_in

Arguments = list[Any]


@dataclass(frozen=True, slots=True)
class EarlierOp:
    """An op that made an operand, directly or some ops before.

    Attributes:
        op: Its name.
        numbers: The Python numbers among its arguments.
        dtype: Of its result; None if that is not known.
        operand: The position of the argument that it leads to; -1 for the op itself, and where it is not known.
    """

    op: str
    numbers: tuple[float, ...] = ()
    dtype: torch.dtype | None = None
    operand: int = -1


@dataclass(frozen=True)
class OpCall:
    """A call of an op with a non-finite result of its own.

    Attributes:
        op: Its name, that of the operator without namespace, overload and underscores: ``softmax``.
        args: All its arguments, keyword arguments last.
        result: Its first result with a NaN or an infinity.
        backward_of: The op of the forward that it differentiates, as the program calls it; ``""`` in the forward.
        earlier: The ops that made its operands, the nearest first.
    """

    op: str
    args: Sequence[Any]
    result: Tensor
    backward_of: str = ""
    earlier: Sequence[EarlierOp] = field(default=(), repr=False)

    def operand(self, number: int) -> Tensor:
        """Return an argument as a tensor that can be computed with; empty if it has no numbers."""
        value = self.args[number] if number < len(self.args) else None
        if isinstance(value, int | float) and not isinstance(value, bool):
            return torch.tensor(value, dtype=torch.float64)
        return computable(value.detach()) if isinstance(value, Tensor) and not value.is_complex() else torch.empty(0)

    def made_by(self, number: int, passed: Collection[str] = ()) -> str:
        """Return the name of the nearest op behind an argument, none of ``passed``; ``""`` without one."""
        return next((one.op for one in self.earlier if one.operand == number and one.op not in passed), "")

    @property
    def tensors(self) -> list[Tensor]:
        """The operands with a fraction."""
        return [computable(t.detach()) for t in tensors_in(list(self.args)) if t.is_floating_point() and t.numel()]

    @property
    def is_bad(self) -> Tensor:
        """Where the result is NaN or infinite."""
        return torch.isfinite(computable(self.result)).logical_not()


@dataclass(frozen=True, slots=True)
class Reason:
    """Why an op made a non-finite value.

    Attributes:
        why: Half a sentence: ``log of -0.135``.
        advice: What to change.
        elements: Where the guilty elements are; None if that is not known.
        dims: Names of the dimensions of ``elements``; None for those of any value.
        repair: From the arguments of the op to those with the advice followed; None if there is no such change.
        operands: Positions of the arguments that are changed then.
        is_overflow: Whether finite values became too large, and not by this op alone.
        is_too_large: Whether an operand was too large.
    """

    why: str
    advice: str
    elements: Tensor | None = None
    dims: tuple[str, ...] | None = None
    repair: Callable[[Arguments], Arguments] | None = None
    operands: tuple[int, ...] = (0,)
    is_overflow: bool = False
    is_too_large: bool = False


Found = tuple[str, "Tensor | None"] | None  # the reason, and where; None if it is another one


@dataclass(frozen=True)
class Row:
    """A row of the table: ops, a check, and the remedy.

    ``of`` are ops of the forward: the row is about what their backward runs. Without it a row holds in both.
    """

    name: str
    ops: Collection[str]
    advice: str
    find: Callable[[OpCall], Found]
    repair: Callable[[Arguments], Arguments] | None = None
    of: Collection[str] = ()
    is_overflow: bool = False
    is_too_large: bool = False
    dims: tuple[str, ...] | None = None
    operands: tuple[int, ...] = (0,)

    def reason(self, call: OpCall) -> Reason | None:
        """Return the reason of a call; None if the row is not about it."""
        if call.op not in self.ops or (self.of and call.backward_of not in self.of):
            return None
        found = self.find(call)
        if found is None:
            return None
        why, elements = found
        bad = call.is_bad
        if elements is not None and elements.shape == bad.shape and not (elements & bad).any():
            return None  # these elements are not the ones at fault
        is_too_large = self.is_overflow or self.is_too_large
        repair = self.repair, self.operands
        return Reason(why, self.advice, elements, self.dims, *repair, self.is_overflow, is_too_large)
