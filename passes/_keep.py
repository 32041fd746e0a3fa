"""Keeping a tensor of the backward."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import ClassVar, Literal

from torch import Tensor

from gradrewrite.policy.actions import ANYWHERE
from gradrewrite.policy.recording import keep
from gradrewrite.sites import Kind


@dataclass(frozen=True, slots=True)
class Keep:
    """Keep the tensor of the last backward in ``model.monitor.kept()``: ``retain_grad`` for compiled code.

    The tensor passes unchanged, NaN and infinities included. What is kept is a copy, as it is where the action
    stands in the order of its site.

    Args:
        what: ``"tensor"``, the only thing that is kept.

    Raises:
        ValueError: ``what`` is something else.

    Example:
        >>> Keep()
        Keep()
    """

    kinds: ClassVar[frozenset[Kind]] = ANYWHERE
    has_units: ClassVar[bool] = False  # kept as it is, as retain_grad does

    what: Literal["tensor"] = field(default="tensor", repr=False)

    def __post_init__(self) -> None:
        if self.what != "tensor":
            raise ValueError(f'Keep(what) is "tensor", got {self.what!r}')

    def apply(self, tensor: Tensor) -> Tensor:
        """Keep; see the class."""
        keep(tensor)
        return tensor
