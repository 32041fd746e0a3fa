"""Weighing the gradients of several losses."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from dataclasses import KW_ONLY, dataclass
from typing import ClassVar, Protocol, get_args, runtime_checkable

import torch
from torch import Tensor

from gradrewrite._utils.formatting import describe_callable
from gradrewrite.errors import CallbackError
from gradrewrite.passes._loss_figures import record_loss_cosines, record_loss_norms
from gradrewrite.policy.actions import num_required
from gradrewrite.policy.insertions import Insertion, LossStatistic, WeighLossGradients, action_key
from gradrewrite.policy.recording import record_all
from gradrewrite.sites import Kind, Site


@runtime_checkable
class LossWeighting(Protocol):
    """Weights of losses from the Gram matrix of their gradients."""

    def weights(self, gramian: Tensor) -> Tensor:
        """Return the weights ``[K]`` from the inner products ``[K, K]``, both float64."""


@dataclass(frozen=True, slots=True, repr=False, eq=False)
class WeighLosses:
    """Replace the sum of the gradients of several losses by a weighted sum.

    For a model that returns ``K`` losses, and whose sum is differentiated as ever: ``sum(model(x)).backward()``. The
    losses are its differentiable scalar outputs, in their order, or without any the elements of its only differentiable
    one of shape ``[K]``; at most 32. Other differentiable outputs may not receive a gradient. What several losses share
    of the backward is there once for each of them, in one graph; a gradient that one loss reaches stays as it is, and a
    shared one outside of all groups is the sum of those of each loss.

    At gradient sites the gradient of a loss is that of all parameters of the group which more than one loss reaches; it
    is 0 for those that it does not reach. At an error site, the only one of its group, it is the error of each loss:
    what lies upstream is there once.

    Actions that the policy lists before it at the same site, and those at error sites between it and the losses, act on
    the gradient of each loss by itself; those after it on the weighted sum, and so do other group actions. For one
    loss, and where no gradient of the group is shared, nothing is inserted, of which a warning tells.

    Records at ``group:<group>``: ``loss_weight_0``, ... ; ``loss_norm_0``, ..., the L2 norms of the gradients of the
    losses; ``loss_cosine``, the smallest cosine of two of them, and for ``K > 2`` ``loss_cosine_0_1``, ... of each pair
    (NaN where a norm is 0, infinite or NaN). Figures are in units of the unscaled losses; squares of elements are added
    in float32, those of 64-bit gradients in float64. With the weightings below a NaN or an infinity in the gradient of
    a loss makes all weights NaN, and so all gradients of the group.

    Attributes:
        weighting: ``PCGrad()``, ``UPGrad()``, ``MGDA()``, ``CAGrad()``, ``AlignedMTL()``; or a function of torch
            operations: of the inner products of the gradients, ``[K, K]``, float64, and, with a second required
            parameter, of the losses ``[K]``, float64, then of each of ``statistics``. It returns the weights ``[K]``,
            may remember values in a ``gr.State``, and is traced once. Or constant weights: ``K`` numbers, or a tensor
            ``[K]``, which is read at every backward; under data parallelism only these are allowed.
        statistics: Figures of the gradient of each loss that a function is given, ``[K]``, float64: ``"max_abs"``, the
            largest absolute value, and ``"mean_abs"``, the mean one, over all elements that the inner products are
            over; 0 where the loss does not reach them.
        everywhere: Whether gradients of the group that a single loss reaches are multiplied by its weight too, as if
            the losses were weighed. The inner products and statistics stay those of shared gradients, if there are any.
        group: Sites of one group are weighed together.

    Raises:
        TypeError: ``weighting`` is neither, or a function takes another number of arguments.
        ValueError: A statistic is unknown.
        PolicyError: (at the rewrite) The model returns no losses; a part of the model is in another graph; gradients
            are DTensors, on several devices, or averaged later by others; an op of the shared backward cannot run once
            for each loss; a group is at several error sites.
        CallbackError: (at the rewrite) A function returns something else than weights.

    Example:
        >>> WeighLosses(lambda gramian: 1 / gramian.diagonal().sqrt(), group="trunk")
        WeighLosses(<lambda>, group='trunk')
    """

    weighting: LossWeighting | Callable[..., Tensor] | Sequence[float] | Tensor
    _: KW_ONLY
    statistics: tuple[LossStatistic, ...] = ()
    everywhere: bool = False
    group: Hashable = "default"

    kinds: ClassVar[frozenset[Kind]] = frozenset(("gradient", "error"))

    def __post_init__(self) -> None:
        if isinstance(self.weighting, type):
            raise TypeError(
                f"WeighLosses: got the class {self.weighting.__name__}; a weighting is a value, as in "
                f"{self.weighting.__name__}()"
            )
        if not (isinstance(self.weighting, LossWeighting) or callable(self.weighting) or self._is_constant):
            raise TypeError(
                "WeighLosses: weighting is UPGrad(), PCGrad(), MGDA(), CAGrad(), AlignedMTL(), a function of the Gram "
                f"matrix [K, K], or K numbers, got {self.weighting!r}"
            )
        known, given = get_args(LossStatistic), self.statistics
        is_several = isinstance(given, tuple | list) and len(set(given)) == len(given)
        if not is_several or not set(known).issuperset(given):
            raise ValueError(f"WeighLosses: statistics is a tuple of {', '.join(map(repr, known))}, got {given!r}")
        object.__setattr__(self, "statistics", tuple(given))
        if isinstance(self.weighting, list):
            object.__setattr__(self, "weighting", tuple(self.weighting))
        if given and self._is_constant:
            raise ValueError("WeighLosses: constant weights take no statistics; a function of the Gram matrix does")
        needed, count = num_required(self.function), len(self.statistics)
        if count and needed not in (None, 1 + count, 2 + count):
            raise TypeError(
                f"WeighLosses: with statistics={self.statistics!r} the function takes (gramian, "
                f"{', '.join(self.statistics)}) or (gramian, losses, {', '.join(self.statistics)}); it takes {needed} "
                "arguments"
            )

    @property
    def _is_constant(self) -> bool:
        if isinstance(self.weighting, Tensor):
            return self.weighting.dim() == 1 and not self.weighting.is_complex()
        numbers = self.weighting if isinstance(self.weighting, tuple | list) else ()
        return len(numbers) > 0 and all(isinstance(number, float | int) for number in numbers)

    def __eq__(self, other: object) -> bool:
        """Compare settings; tensors by identity."""
        return isinstance(other, WeighLosses) and action_key(self) == action_key(other)

    def __hash__(self) -> int:
        """Hash of the settings."""
        return hash(action_key(self))

    def __repr__(self) -> str:
        """As the call that makes it."""
        given = self.weighting
        weighting = describe_callable(given) if callable(given) and not self._is_constant else repr(given)
        further = f", statistics={self.statistics!r}" if self.statistics else ""
        further += ", everywhere=True" if self.everywhere else ""
        return f"WeighLosses({weighting}{further}{'' if self.group == 'default' else f', group={self.group!r}'})"

    @property
    def function(self) -> Callable[..., Tensor]:
        """The function of the Gram matrix."""
        if self._is_constant:
            return self._constant
        if isinstance(self.weighting, LossWeighting):
            return self.weighting.weights
        assert callable(self.weighting)
        return self.weighting

    def _constant(self, gramian: Tensor) -> Tensor:
        given = self.weighting
        return given if isinstance(given, Tensor) else torch.tensor(given, dtype=gramian.dtype, device=gramian.device)

    def at(self, site: Site) -> Insertion:
        """Return the insertion at a site."""
        reads_losses = num_required(self.function) == 2 + len(self.statistics)
        given = self.group, self.apply_group, self.function, reads_losses, self.statistics, self.everywhere
        return Insertion(self, WeighLossGradients(*given, self._is_constant), self.kinds, has_units=True)

    def apply_group(self, tensors: Sequence[Tensor]) -> Sequence[Tensor]:
        """Return the weights ``[K]`` of the losses, and record them; see ``policy.insertions.WeighLossGradients``."""
        found, gramian = self.function(*tensors), tensors[0]
        number = len(gramian)
        if self._is_constant and len(found) != number:
            raise CallbackError(f"{self!r} has {len(found)} weights, and the model returns {number} losses")
        if not isinstance(found, Tensor) or tuple(found.shape) != (number,) or found.is_complex():
            got = f"{tuple(found.shape)}, {found.dtype}" if isinstance(found, Tensor) else type(found).__name__
            raise CallbackError(
                f"{self!r}: the weights of {number} losses are a real tensor of shape ({number},); the function "
                f"returned {got}"
            )
        found = found.to(gramian.device, gramian.dtype)
        record_all([f"loss_weight_{loss}" for loss in range(number)], found)
        record_loss_norms(gramian)
        record_loss_cosines(gramian)
        return [found]
