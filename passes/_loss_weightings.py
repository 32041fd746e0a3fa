"""Weightings of several losses: from the Gram matrix of their gradients to the weights of their sum."""

from __future__ import annotations

import math
from dataclasses import KW_ONLY, dataclass

import torch
from torch import Tensor

from gradrewrite.errors import PolicyError
from gradrewrite.numerics import loss_weights
from gradrewrite.passes._settings import short_repr, store_python_numbers
from gradrewrite.policy.state import State


@dataclass(frozen=True, slots=True, repr=False)
class PCGrad:
    """Project each loss's gradient off the gradients it conflicts with, and add them (PCGrad).

    For each loss i and the others j in a random order, ``g_i <- g_i - min(<g_i, g_j>, 0) / |g_j|^2 g_j``, with ``g_j``
    as it was. Yu et al., "Gradient surgery for multi-task learning", 2020, https://arxiv.org/abs/2001.06782.
    K iterations on the device, each for all i at once.

    The order follows from ``seed`` and the number of the backward, so it is the same on all ranks and devices. That
    number is saved by ``gr.state_dict``, as ``PCGrad.count``.

    Weights are 1 each, those of the plain sum, where nothing conflicts, for one loss, and for gradients of 0, off which
    nothing is projected. They are NaN if an element of the Gram matrix is NaN or infinite.

    Attributes:
        seed: In [0, 2^63).

    Raises:
        ValueError: ``seed`` is out of range.
        TypeError: ``seed`` is no whole number.

    Example:
        >>> gramian = torch.tensor([[1.0, -1.0], [-1.0, 4.0]], dtype=torch.float64)
        >>> PCGrad().weights(gramian)
        tensor([2.0000, 1.2500], dtype=torch.float64)
    """

    seed: int = 0

    __repr__ = short_repr

    def __post_init__(self) -> None:
        store_python_numbers(self)
        _check_whole("PCGrad", "seed", self.seed)
        if not 0 <= self.seed < 2**63:
            raise ValueError(f"PCGrad: seed is in [0, 2**63), got {self.seed!r}")

    def weights(self, gramian: Tensor) -> Tensor:
        """Return the weights, ``[K]`` in float64, for a Gram matrix ``[K, K]``, and count the backward."""
        count = State((), 0, torch.int64, name="PCGrad.count")
        number = count.value
        count.set(number + 1)
        weights: Tensor = loss_weights.OP_PCGRAD(_checked("PCGrad", gramian), number, self.seed)
        return weights


@dataclass(frozen=True, slots=True, repr=False)
class UPGrad:
    """Project each loss's gradient onto the cone of directions without conflict, and average (UPGrad).

    The sum over i of the ``v`` with the least ``v^T G v`` subject to ``v >= e_i / K``. Quinton and Rey, "Jacobian
    descent for multi-objective optimization", 2024, https://arxiv.org/abs/2406.16232. It is solved exactly: K
    iterations on the device look at all 2^K sets of losses.

    By default weights do not depend on the scale of the gradients, and only conflicts within the rounding of G are
    left. TorchJD adds 1e-4 to the diagonal of ``G / trace(G)`` (``reg_eps``), which leaves conflicts smaller than that,
    mostly those of a loss with a much smaller gradient; and it takes a Gram matrix with a trace below 1e-4 as zeros
    (``norm_eps``), which ends the method when gradients get small.

    Weights are 1/K each where nothing conflicts, for one loss, and where all gradients are 0; a loss with a gradient of
    0 keeps 1/K. They are NaN if an element of the Gram matrix is NaN or infinite.

    Attributes:
        norm_eps: A Gram matrix with a smaller trace is taken as zeros; 0 takes none so.
        reg_eps: Regularization, relative to the trace, >= 0.

    Raises:
        ValueError: A setting is out of range.
        PolicyError: (at the rewrite) There are more than 10 losses.
        TypeError: A setting is no number.

    Example:
        >>> gramian = torch.tensor([[1.0, -1.0], [-1.0, 4.0]], dtype=torch.float64)
        >>> UPGrad().weights(gramian)
        tensor([1.0000, 0.6250], dtype=torch.float64)
    """

    _: KW_ONLY
    norm_eps: float = 0.0
    reg_eps: float = 0.0

    __repr__ = short_repr

    def __post_init__(self) -> None:
        store_python_numbers(self)
        _check_not_negative("UPGrad", "norm_eps", self.norm_eps)
        _check_not_negative("UPGrad", "reg_eps", self.reg_eps)

    def weights(self, gramian: Tensor) -> Tensor:
        """Return the weights, ``[K]`` in float64, for a Gram matrix ``[K, K]``."""
        gramian = _checked("UPGrad", gramian, most=loss_weights.MOST_LOSSES)
        weights: Tensor = loss_weights.OP_UPGRAD(gramian, float(self.norm_eps), float(self.reg_eps))
        return weights


@dataclass(frozen=True, slots=True, repr=False)
class MGDA:
    """Take the combination of least norm in the convex hull of the losses' gradients (MGDA).

    The minimum of ``w^T G w`` over ``w >= 0`` with sum 1, by at most ``max_iters`` steps of Frank-Wolfe with exact line
    search from ``w = 1/K``, to the first step shorter than ``epsilon``. Desideri, "Multiple-gradient descent algorithm
    (MGDA) for multiobjective optimization", 2012; Sener and Koltun, "Multi-task learning as multi-objective
    optimization", 2018, https://arxiv.org/abs/1810.04650. On a GPU all ``max_iters`` iterations run, those after the
    stop without effect.

    The shorter a gradient the larger its weight: for orthogonal ones in proportion to ``1 / |g_i|^2``, so 1/K each if
    they have one norm. A gradient of 0 has the weight 1 and the combination is 0, as at every Pareto-stationary point;
    where all are 0, one of them has the weight 1. One loss has the weight 1. They do not depend on the scale of the
    gradients, and are NaN if an element of the Gram matrix is NaN or infinite.

    Attributes:
        epsilon: Least step, > 0.
        max_iters: Most steps, >= 1.

    Raises:
        ValueError: A setting is out of range.
        TypeError: A setting is no number.

    Example:
        >>> gramian = torch.tensor([[1.0, 0.0], [0.0, 4.0]], dtype=torch.float64)
        >>> MGDA().weights(gramian)
        tensor([0.8000, 0.2000], dtype=torch.float64)
    """

    _: KW_ONLY
    epsilon: float = 1e-3
    max_iters: int = 100

    __repr__ = short_repr

    def __post_init__(self) -> None:
        store_python_numbers(self)
        _check_not_negative("MGDA", "epsilon", self.epsilon)
        _check_whole("MGDA", "max_iters", self.max_iters)
        if not self.epsilon > 0:
            raise ValueError(f"MGDA: epsilon must be > 0, got {self.epsilon!r}")
        if self.max_iters < 1:
            raise ValueError(f"MGDA: max_iters must be >= 1, got {self.max_iters!r}")

    def weights(self, gramian: Tensor) -> Tensor:
        """Return the weights, ``[K]`` in float64, for a Gram matrix ``[K, K]``."""
        weights: Tensor = loss_weights.OP_MGDA(_checked("MGDA", gramian), float(self.epsilon), self.max_iters)
        return weights


@dataclass(frozen=True, slots=True, repr=False)
class CAGrad:
    """Improve the worst loss as far as a ball around the mean gradient allows (CAGrad).

    The direction ``d`` with ``|d - g_0| <= c |g_0|`` and the largest ``min_i <g_i, d>``; ``g_0`` is the mean gradient.
    Its weights are ``1/K + c |g_0| / |g_w| w``, with the minimum w of ``<g_w, g_0> + c |g_0| |g_w|`` over ``w >= 0`` of
    sum 1; ``g_w = sum_i w_i g_i``. Liu et al., "Conflict-averse gradient descent for multi-task learning", 2021,
    https://arxiv.org/abs/2110.14048. It is solved exactly: K iterations on the device look at all 2^K sets of losses.

    The weights sum to more than 1: they are ``1 + c`` for one loss, and ``(1 + c) / K`` each for orthogonal gradients
    of one norm. They are 1/K each, those of the mean, at Pareto-stationary points, where ``|g_w|`` is less than 1e-4
    times ``sum_i w_i |g_i|``: where all gradients are 0, and where one is, unless a combination of others has a cosine
    with ``g_0`` below ``-c``. They do not depend on the scale of the gradients, and are NaN if an element of the Gram
    matrix is NaN or infinite.

    Attributes:
        c: Radius of the ball in units of ``|g_0|``, >= 0; 0 gives the mean.
        norm_eps: If > 0 it is TorchJD's, 1e-4 by default there: weights are 0 if the trace is less, or ``|g_w|`` in
            units of the root of the trace.

    Raises:
        ValueError: A setting is out of range.
        PolicyError: (at the rewrite) There are more than 10 losses.
        TypeError: A setting is no number.

    Example:
        >>> gramian = torch.tensor([[1.0, 0.0], [0.0, 1.0]], dtype=torch.float64)
        >>> CAGrad(c=0.5).weights(gramian)
        tensor([0.7500, 0.7500], dtype=torch.float64)
    """

    c: float = 0.5
    _: KW_ONLY
    norm_eps: float = 0.0

    __repr__ = short_repr

    def __post_init__(self) -> None:
        store_python_numbers(self)
        _check_not_negative("CAGrad", "c", self.c)
        _check_not_negative("CAGrad", "norm_eps", self.norm_eps)

    def weights(self, gramian: Tensor) -> Tensor:
        """Return the weights, ``[K]`` in float64, for a Gram matrix ``[K, K]``."""
        gramian = _checked("CAGrad", gramian, most=loss_weights.MOST_LOSSES)
        weights: Tensor = loss_weights.OP_CAGRAD(gramian, float(self.c), float(self.norm_eps))
        return weights


@dataclass(frozen=True, slots=True, repr=False)
class AlignedMTL:
    """Make the principal components of the losses' gradients equally long, and average (AlignedMTL).

    The weights are ``sqrt(s) V diag(l)^-1/2 V^T 1/K`` with ``G = V diag(l) V^T``, over the eigenvalues ``l`` that are
    not 0 (more than K times the rounding of the largest). Senushkin et al., "Independent component alignment for
    multi-task learning", 2023, https://arxiv.org/abs/2305.19000. On the CPU by LAPACK, on other devices by
    ``K // 2 + 8`` sweeps of Jacobi rotations, of K - 1 rounds (K if that is odd); one rotation for two losses.

    Weights are 1/K each for orthogonal gradients of one norm, for one loss, and where all gradients are 0; a single
    gradient of 0 has the weight 0. They do not depend on the scale of the gradients. They are NaN if an element of the
    Gram matrix is NaN or infinite.

    Attributes:
        scale_mode: What ``s`` is of the eigenvalues that are not 0: ``"min"``, ``"median"`` (the lower one), or
            ``"rmse"``, their mean.

    Raises:
        ValueError: There is no such ``scale_mode``.

    Example:
        >>> gramian = torch.tensor([[1.0, 0.0], [0.0, 4.0]], dtype=torch.float64)
        >>> AlignedMTL().weights(gramian)
        tensor([0.5000, 0.2500], dtype=torch.float64)
    """

    _: KW_ONLY
    scale_mode: loss_weights.ScaleMode = "min"

    __repr__ = short_repr

    def __post_init__(self) -> None:
        if self.scale_mode not in loss_weights.SCALE_MODES:
            raise ValueError(f'AlignedMTL: scale_mode is "min", "median" or "rmse", got {self.scale_mode!r}')

    def weights(self, gramian: Tensor) -> Tensor:
        """Return the weights, ``[K]`` in float64, for a Gram matrix ``[K, K]``."""
        weights: Tensor = loss_weights.OP_ALIGNED_MTL(_checked("AlignedMTL", gramian), self.scale_mode)
        return weights


def _check_not_negative(weighting: str, name: str, value: float) -> None:
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise TypeError(f"{weighting}: {name} is a number, got {value!r}")
    if not 0 <= value < math.inf:
        raise ValueError(f"{weighting}: {name} must be >= 0 and finite, got {value!r}")


def _check_whole(weighting: str, name: str, value: int) -> None:
    if isinstance(value, bool) or not isinstance(value, int):
        raise TypeError(f"{weighting}: {name} is a whole number, got {value!r}")


def _checked(weighting: str, gramian: Tensor, most: int | None = None) -> Tensor:
    """Return a Gram matrix that is one, of not too many losses."""
    if gramian.dim() != 2 or gramian.shape[0] != gramian.shape[1] or not gramian.shape[0]:
        raise ValueError(f"{weighting}: a Gram matrix is [K, K] with K >= 1, got shape {tuple(gramian.shape)}")
    if most is not None and gramian.shape[0] > most:
        raise PolicyError(
            f"{weighting}: got {gramian.shape[0]} losses, and it looks at all sets of at most {most}; add up some "
            "of them in the model, or take PCGrad, MGDA or AlignedMTL",
            code="losses",
        )
    return gramian
