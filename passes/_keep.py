"""Keeping a tensor of the backward."""

from __future__ import annotations

from dataclasses import KW_ONLY, dataclass
from typing import Literal

from torch import Tensor

from gradrewrite.passes._settings import check_examples, short_repr, store_python_numbers
from gradrewrite.policy.insertions import (
    MEASURABLE,
    ExampleQuantity,
    Insertion,
    KeepTensor,
    LossReduction,
    PerExample,
    ReplaceTensor,
)
from gradrewrite.policy.recording import keep_as
from gradrewrite.policy.sampling import checked_interval
from gradrewrite.sites import Kind, Site

_QUANTITIES: dict[str, tuple[ExampleQuantity, ...]] = {
    "tensor": (),
    "example_norms": ("square_norms",),
    "second_moment": ("second_moment",),
}


@dataclass(frozen=True, slots=True, repr=False)
class Keep:
    """Keep a tensor of the last backward in ``model.monitor.kept()``.

    The tensor of the site passes unchanged. ``"tensor"`` keeps the tensor of the site, NaN and infinities included:
    ``retain_grad`` for compiled code. What is kept is a copy, as it is where the action stands in the order of its
    site. It stands at any kind of site; at ``param`` and ``state`` it copies what a guarded ``optimizer.step()``
    leaves.

    At gradient sites, of the gradients of single examples (the gradient of an example is that of its own loss, in units
    of the unscaled loss; see ``docs/per-example.md``):

    - ``"example_norms"``: their L2 norms, ``[B]``, at least in float32.
    - ``"second_moment"``: the mean over examples of their squares, in the shape of the parameter, at least in float32.
      Where that needs the gradients of all examples the gradient itself is their sum: equal up to rounding.

    Both are NaN or inf where a gradient is; the mean over no examples is NaN.

    Attributes:
        what: ``"tensor"``, ``"example_norms"`` or ``"second_moment"``.
        loss_reduction: How the loss of the batch follows from those of its examples: ``"mean"`` or ``"sum"``.
        every: Number of steps from one such tensor to the next; see ``Monitor(sample=)``.
        batch_dim: The dimension of every tensor input of the model that has the examples.

    Raises:
        ValueError: ``what`` or ``loss_reduction`` is something else, ``batch_dim`` is negative, or ``every`` no whole
            number >= 1.
        PolicyError: (at the rewrite) An op mixes examples, or nobody knows whether it does.

    Example:
        >>> Keep()
        Keep()
        >>> Keep("example_norms")
        Keep(what='example_norms')
    """

    what: Literal["tensor", "example_norms", "second_moment"] = "tensor"
    _: KW_ONLY
    every: int = 1
    loss_reduction: LossReduction = "mean"
    batch_dim: int = 0

    __repr__ = short_repr

    def __post_init__(self) -> None:
        store_python_numbers(self)
        if self.what not in _QUANTITIES:
            raise ValueError(f"Keep(what) is one of {', '.join(map(repr, _QUANTITIES))}, got {self.what!r}")
        checked_interval("Keep", "every", self.every)
        check_examples("Keep", self.loss_reduction, self.batch_dim)

    @property
    def kinds(self) -> frozenset[Kind]:
        """The allowed kinds of site."""
        return MEASURABLE if self.what == "tensor" else frozenset(("gradient",))

    def at(self, site: Site) -> Insertion:
        """Return the insertion at a site."""
        if self.what == "tensor":
            return Insertion(self, KeepTensor(self.apply), self.kinds, every=self.every)
        examples = PerExample(_QUANTITIES[self.what], self.loss_reduction, self.batch_dim)
        return Insertion(self, ReplaceTensor(self.apply, examples), self.kinds, every=self.every)

    def apply(self, tensor: Tensor, /, *quantities: Tensor) -> Tensor:
        """Keep; see the class."""
        if not quantities:
            keep_as(tensor)
        for quantity in quantities:
            keep_as(quantity.sqrt() if self.what == "example_norms" else quantity, self.what)
        return tensor
