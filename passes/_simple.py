"""Actions of a single operation."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from gradrewrite.passes._settings import check_number, now, numbers_of, scalar, short_repr, store_python_numbers
from gradrewrite.policy.insertions import Insertion, ReplaceTensor
from gradrewrite.policy.schedules import Schedule
from gradrewrite.sites import Kind, Site

_KINDS: frozenset[Kind] = frozenset(("error", "gradient", "step"))


@dataclass(frozen=True, slots=True, repr=False)
class Scale:
    """Multiply by a factor; ``Scale(-1.0)`` is gradient reversal.

    NaN stays NaN; infinities keep or change their sign; zero times infinity is NaN. After Ganin and Lempitsky,
    "Unsupervised domain adaptation by backpropagation", 2015, https://arxiv.org/abs/1409.7495.

    Attributes:
        factor: A finite number (baked in), a tensor with one element (read at every backward), or a ``gr.Schedule``.

    Raises:
        ValueError: The factor is NaN or infinite.
        TypeError: The factor is neither number nor tensor nor schedule.

    Example:
        >>> Scale(-1.0)
        Scale(-1.0)
    """

    factor: float | Tensor | Schedule

    kinds: ClassVar[frozenset[Kind]] = _KINDS
    __repr__ = short_repr

    def __post_init__(self) -> None:
        store_python_numbers(self)
        check_number("Scale", "factor", self.factor)
        if isinstance(self.factor, int | float) and math.isinf(self.factor):
            raise ValueError(f"Scale: factor must be finite, got {self.factor!r}")

    def at(self, site: Site) -> Insertion:
        """Return the insertion at a site."""
        return Insertion(self, ReplaceTensor(self.apply), _KINDS, numbers=numbers_of(self, "factor"))

    def apply(self, tensor: Tensor) -> Tensor:
        """Scale; see the class."""
        factor = now(self.factor, tensor.device)
        return tensor * (scalar(factor, tensor) if isinstance(factor, Tensor) else factor)


@dataclass(frozen=True, slots=True)
class Zero:
    """Replace by zeros, NaN and infinities included.

    Nothing behind the site learns from it.

    Example:
        >>> Zero()
        Zero()
    """

    kinds: ClassVar[frozenset[Kind]] = _KINDS

    def at(self, site: Site) -> Insertion:
        """Return the insertion at a site."""
        return Insertion(self, ReplaceTensor(self.apply), _KINDS)

    def apply(self, tensor: Tensor) -> Tensor:
        """Zero; see the class."""
        return torch.zeros_like(tensor)


@dataclass(frozen=True, slots=True)
class NanToNum:
    """Replace NaN by 0 and infinities by the largest finite numbers of the dtype, as ``torch.nan_to_num``.

    This hides faults from finite checks after it.

    Example:
        >>> NanToNum()
        NanToNum()
    """

    kinds: ClassVar[frozenset[Kind]] = _KINDS

    def at(self, site: Site) -> Insertion:
        """Return the insertion at a site."""
        return Insertion(self, ReplaceTensor(self.apply), _KINDS)

    def apply(self, tensor: Tensor) -> Tensor:
        """Replace; see the class."""
        if tensor.is_complex():  # for which torch's decomposition fails
            return torch.complex(torch.nan_to_num(tensor.real), torch.nan_to_num(tensor.imag))
        return torch.nan_to_num(tensor)
