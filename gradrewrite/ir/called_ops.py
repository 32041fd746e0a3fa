"""Ops of a Dynamo graph with a site for their backward."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from torch import fx


@dataclass(frozen=True, slots=True)
class Operand:
    """A tensor argument of an op."""

    number: int  # among the tensor inputs of the op


@dataclass(frozen=True, slots=True)
class Symbol:
    """A symbolic argument of an op."""


@dataclass(eq=False)
class CalledOp:
    """An op as the user called it; its markers have its number."""

    values: tuple[int, ...]  # numbers of the values that are its results; the first one with a name names the op
    args: tuple[Any, ...]  # with an ``Operand`` for each tensor
    kwargs: Mapping[str, Any]
    num_operands: int
    num_positional: int = 0  # operands among ``args``
    written: int | None = None  # number of the operand that it writes to in place
    refusal: str = ""  # why its backward has no markers; ``""`` if it has
    is_tuple: bool = False  # it returns several tensors
    repeated: bool = False  # it reads one tensor several times, and which gradient is whose is not known


@dataclass(eq=False)
class OpBackward:
    """The backward of an op in a joint graph: the nodes from its errors to the gradients of its inputs."""

    op: CalledOp
    operands: Sequence[fx.Node] = ()  # values of the forward
    results: Sequence[fx.Node] = ()
    errors: dict[int, fx.Node] = field(default_factory=dict)  # markers, by result
    # Markers by operand, in the order of execution: an op of several parts may read an operand several times.
    gradients: dict[int, list[fx.Node]] = field(default_factory=dict)

    @property
    def ends(self) -> list[fx.Node]:
        """The markers of its gradients, in the order of execution."""
        return sorted(marker for markers in self.gradients.values() for marker in markers)
