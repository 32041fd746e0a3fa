"""Zero errors that stay zero through the backward of an op."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from gradrewrite.policy.insertions import OF_OPS, Insertion, KeepZeroErrors
from gradrewrite.sites import Kind, Site


@dataclass(frozen=True, slots=True)
class KeepZeros:
    """Keep zeros in the backward of an op: an error of exactly 0 leaves it as 0.

    By the chain rule torch multiplies an error of 0 by the derivative, and 0 times infinity is NaN: a value that a
    mask, ``torch.where``, ``clamp`` or ``torch.minimum`` has discarded makes all gradients NaN.

    - Elementwise ops: by element, before the sum over the dimensions of a broadcast input.
    - Ops along dimensions (softmax, norms, normalizations, sums): a slice of zeros leaves as zeros.
    - Products (``mm``, ``bmm``, ``linear``, ``einsum``, attention): values of the forward that are not finite are left
      out of the sum where they meet zero errors alone. Parameters are not mended.

    Nothing else changes: a gradient that is finite without it keeps its bits, and an error that is not 0 meets the
    derivative as before, so that NaN and infinities that matter stay. Where errors are 0 by cancellation inside the
    backward of an op, NaN stays as well. ``model.explain()`` lists the ops whose backward is not covered.

    Example:
        >>> import torch
        >>> import gradrewrite as gr
        >>> class Root(torch.nn.Module):
        ...     def forward(self, x):
        ...         return x.sqrt().where(x > 0, 0).sum()
        >>> x = torch.tensor([4.0, 0.0], requires_grad=True)
        >>> gr.transform(Root(), gr.on("backward:*/*", KeepZeros()))(x).backward()
        >>> x.grad  # 0.25 and NaN without it
        tensor([0.2500, 0.0000])
    """

    kinds: ClassVar[frozenset[Kind]] = OF_OPS

    def at(self, site: Site) -> Insertion:
        """Return the insertion at a site."""
        return Insertion(self, KeepZeroErrors(), OF_OPS)
