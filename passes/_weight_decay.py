"""Weight decay: decoupled from the gradient, or added to it."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import ClassVar

from torch import Tensor

from gradrewrite.passes._settings import check_number, scalar, short_repr, store_python_numbers
from gradrewrite.policy.insertions import Insertion, ReplaceTensor, ScaleParameter
from gradrewrite.sites import Kind, Site


@dataclass(frozen=True, slots=True, repr=False)
class DecayWeights:
    """Decay a parameter after the optimizer's update: ``W <- W * (1 - rate)``.

    The rate is per step, and independent of learning rate, momentum and the gradient. Nothing decays in a skipped
    step, nor a parameter without a gradient; the gradient stays as it is. NaN and infinities stay what they are. After
    Loshchilov and Hutter, "Decoupled weight decay regularization", 2019, https://arxiv.org/abs/1711.05101; ``L2`` is
    what Caffe's solvers do. Runs in ``gr.guard``.

    Attributes:
        rate: A number from 0 to 1, or a tensor with one element (read at every step).

    Raises:
        ValueError: The rate is not from 0 to 1.
        TypeError: The rate is neither number nor tensor.

    Example:
        >>> DecayWeights(5e-4)
        DecayWeights(0.0005)
    """

    rate: float | Tensor

    kinds: ClassVar[frozenset[Kind]] = frozenset(("step",))
    __repr__ = short_repr

    def __post_init__(self) -> None:
        store_python_numbers(self)
        check_number("DecayWeights", "rate", self.rate)
        if not isinstance(self.rate, Tensor) and not 0 <= self.rate <= 1:
            raise ValueError(f"DecayWeights: rate must be from 0 to 1, got {self.rate!r}")

    def at(self, site: Site) -> Insertion:
        """Return the insertion at a site."""
        return Insertion(self, ScaleParameter(self._factor), self.kinds)

    def _factor(self) -> float | Tensor:
        return 1 - (self.rate.detach() if isinstance(self.rate, Tensor) else self.rate)


@dataclass(frozen=True, slots=True, repr=False)
class L2:
    """Add a multiple of the parameter to its gradient: ``gradient + rate * W``, the gradient of ``rate / 2 * |W|^2``.

    The optimizer then treats both alike: momentum accumulates the decay, and Adam divides it by the size of the
    gradients. This is the weight decay of Caffe's solvers and of ``torch.optim.SGD`` and ``Adam`` (``weight_decay``);
    ``DecayWeights`` is the decoupled form. Computed in the wider dtype of both; the gradient keeps its dtype, and NaN
    and infinities propagate. At gradient sites it is added in every backward, at step sites once per step.

    Attributes:
        rate: A finite number, or a tensor with one element (read at every backward or step).

    Raises:
        ValueError: The rate is NaN or infinite.
        TypeError: The rate is neither number nor tensor.

    Example:
        >>> L2(5e-4)
        L2(0.0005)
    """

    rate: float | Tensor

    kinds: ClassVar[frozenset[Kind]] = frozenset(("gradient", "step"))
    __repr__ = short_repr

    def __post_init__(self) -> None:
        store_python_numbers(self)
        check_number("L2", "rate", self.rate)
        if not isinstance(self.rate, Tensor) and math.isinf(self.rate):
            raise ValueError(f"L2: rate must be finite, got {self.rate!r}")

    def at(self, site: Site) -> Insertion:
        """Return the insertion at a site."""
        return Insertion(self, ReplaceTensor(self.apply, "value"), self.kinds, has_units=True)

    def apply(self, tensor: Tensor, parameter: Tensor) -> Tensor:
        """Add; see the class."""
        rate = scalar(self.rate, parameter) if isinstance(self.rate, Tensor) else self.rate
        return (tensor + parameter * rate).to(tensor.dtype)
