"""Decompositions of ops with factors (``alpha``, ``beta``, ``value``) into products.

Inductor's pattern for ``addmm`` takes ``add(mm, x, alpha=a)`` and drops ``a`` (pytorch issues 167313 and 196577), so
that an action behind a matrix product would compute otherwise compiled than in eager mode.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, cast

import torch
from torch import Tensor

from gradrewrite._compat.versions import needed_for

with needed_for("the dtype in which an operator computes is known"):
    from torch._prims_common import ELEMENTWISE_TYPE_PROMOTION_KIND, elementwise_dtypes

aten = torch.ops.aten
Number = int | float | complex


def dtypes_of(*terms: Tensor | Number) -> tuple[torch.dtype, torch.dtype]:
    """Return the dtype of the computation, float32 for half precision, and that of the result."""
    return elementwise_dtypes(*terms, type_promotion_kind=ELEMENTWISE_TYPE_PROMOTION_KIND.DEFAULT)


def scaled_sum(first: Tensor, beta: Number, second: Tensor | Number, alpha: Number | Tensor) -> Tensor:
    """Return ``beta * first + alpha * second``, without ``first`` for a ``beta`` of 0."""
    wide, dtype = dtypes_of(first, second)
    term: Any = second.to(wide) * alpha if isinstance(second, Tensor) else second * alpha
    if beta != 0:
        term = first.to(wide) + term if beta == 1 else first.to(wide) * beta + term
    return cast(Tensor, term.to(dtype))


def _add(self: Tensor, other: Tensor | Number, alpha: Number = 1) -> Tensor:
    return NotImplemented if alpha == 1 else scaled_sum(self, 1, other, alpha)


def _sub(self: Tensor, other: Tensor | Number, alpha: Number = 1) -> Tensor:
    return NotImplemented if alpha == 1 else scaled_sum(self, 1, other, -alpha)


def _with_product(product: Callable[[Tensor, Tensor], Tensor]) -> Callable[..., Tensor]:
    """Return a decomposition of ``beta * self + alpha * product(a, b)``."""

    def run(self: Tensor, a: Tensor, b: Tensor, *, beta: Number = 1, alpha: Number = 1) -> Tensor:
        return NotImplemented if alpha == beta == 1 else scaled_sum(self, beta, product(a, b), alpha)

    return run


def _with_term(term: Callable[[Tensor, Tensor], Tensor]) -> Callable[..., Tensor]:
    """Return a decomposition of ``self + value * term(a, b)``."""

    def run(self: Tensor, a: Tensor, b: Tensor, value: Number | Tensor = 1) -> Tensor:
        wide, dtype = dtypes_of(self, a, b)
        return (self.to(wide) + term(a.to(wide), b.to(wide)) * value).to(dtype)

    return run


def _index_add(self: Tensor, dim: int, index: Tensor, source: Tensor, *, alpha: Number = 1) -> Tensor:
    return NotImplemented if alpha == 1 else self.index_add(dim, index, source * alpha)


def _sums(run: Callable[..., Tensor]) -> Callable[..., list[Tensor]]:
    """Return a decomposition of a sum of each of a list with one tensor, or with that of another list."""

    def run_all(self: Sequence[Tensor], other: Sequence[Tensor] | Tensor, *, alpha: Number = 1) -> list[Tensor]:
        others = [other] * len(self) if isinstance(other, Tensor) else other
        return NotImplemented if alpha == 1 else [run(x, y, alpha) for x, y in zip(self, others, strict=True)]

    return run_all


def _terms(run: Callable[..., Tensor]) -> Callable[..., list[Tensor]]:
    """Return a decomposition of an op on three lists, with one factor for all or one for each."""

    def run_all(self: Sequence[Tensor], a: Sequence[Tensor], b: Sequence[Tensor], factor: Any = 1) -> list[Tensor]:
        factors = factor.unbind() if isinstance(factor, Tensor) and factor.dim() else factor
        each = factors if isinstance(factors, Sequence) else [factors] * len(self)
        return [run(*four) for four in zip(self, a, b, each, strict=True)]

    return run_all


_addcmul, _addcdiv = _with_term(torch.mul), _with_term(torch.div)

DECOMPOSITIONS: Mapping[Any, Callable[..., Any]] = {
    aten.add.Tensor: _add,
    aten.add.Scalar: _add,
    aten.sub.Tensor: _sub,
    aten.sub.Scalar: _sub,
    aten.addmm.default: _with_product(torch.mm),
    aten.addbmm.default: _with_product(lambda a, b: torch.bmm(a, b).sum(0)),
    aten.baddbmm.default: _with_product(torch.bmm),
    aten.addcmul.default: _addcmul,
    aten.addcdiv.default: _addcdiv,
    aten.index_add.default: _index_add,
    aten._foreach_add.List: _sums(_add),
    aten._foreach_add.Tensor: _sums(_add),
    aten._foreach_sub.List: _sums(_sub),
    **{getattr(aten._foreach_addcmul, kind): _terms(_addcmul) for kind in ("Scalar", "ScalarList", "Tensor")},
    **{getattr(aten._foreach_addcdiv, kind): _terms(_addcdiv) for kind in ("Scalar", "ScalarList", "Tensor")},
}
