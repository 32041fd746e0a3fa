"""Clipping by the norms of the gradients of single examples, with noise."""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import KW_ONLY, dataclass, field
from typing import ClassVar

import torch
from torch import Tensor

from gradrewrite.numerics.statistics import share_of
from gradrewrite.passes._example_weights import ExampleNoise, weigh_examples
from gradrewrite.passes._settings import (
    bound_of,
    check_norm,
    check_not_negative,
    now,
    short_repr,
    store_python_numbers,
)
from gradrewrite.policy.insertions import Insertion, LossReduction
from gradrewrite.policy.recording import record
from gradrewrite.policy.schedules import Schedule
from gradrewrite.sites import Kind, Site


@dataclass(frozen=True, slots=True, repr=False)
class ClipPerExample:
    """Scale the gradient of each example to a norm of at most ``max_norm``, and add noise to their sum.

    ``sum_b g_b * min(1, max_norm / |g_b|) + noise_multiplier * max_norm * normal``, divided by the batch size if the
    loss is a mean. The gradient ``g_b`` of an example is that of its own loss; its norm is that of the gradients of all
    parameters of the group as one vector. An example whose norm is at or below the bound is not changed; nor is one
    whose norm is not finite, so that nothing is hidden: add ``CheckFinite`` where private training needs the bound
    without exception. Norms are computed at least in float32, as sums of squares: beyond 1e19 they are inf in float32.
    Of a batch without examples the sum is 0, plus the noise, with records of NaN and 0; a mean over none is refused.
    Shape, dtype and device are kept. The gradient without the clip is not computed, unless an action before reads it.

    Records ``example_norm_mean@group:<group>`` and ``example_norm_max@group:<group>`` (before clipping), and
    ``clipped_share@group:<group>``, the share of the examples that were clipped.

    The noise comes from generators of its own: no backward moves those of torch. Their seed is drawn from torch's
    default generator when an action with noise is made, so that ``torch.manual_seed`` before it decides the noise, and
    no two actions draw the same. An action that a policy makes while graphs are compiled goes on with the noise of the
    first one of its group. Their state is part of ``gr.state_dict``. Noise is added in every backward: where ``k`` of
    them add up to one gradient, the variance of its noise is ``k`` times as large, which a warning says.

    On several processes that average gradients (``DistributedDataParallel``, ``AllReduce`` at the same sites), each
    clips its own examples before the average, and the first rank draws the noise of the whole sum.

    DP-SGD of Abadi, Chu, Goodfellow, McMahan, Mironov, Talwar and Zhang, "Deep learning with differential privacy",
    2016, https://arxiv.org/abs/1607.00133; ``docs/per-example.md`` says which losses have such gradients.

    Attributes:
        max_norm: The bound, > 0, in units of the gradient of one example: a number, a tensor with one element (read at
            every backward; acts as ``max(bound, 0)``, and NaN clips nothing), or a ``gr.Schedule``.
        noise_multiplier: Standard deviation of the noise over ``max_norm``, >= 0.
        loss_reduction: How the loss of the batch follows from those of its examples: ``"mean"`` or ``"sum"``.
        group: Parameters of one group have one norm for each example; one group has one bound and one noise.
        batch_dim: The dimension of every tensor input of the model that has the examples.

    Raises:
        ValueError: ``max_norm`` is not > 0, ``noise_multiplier`` < 0 or not finite, ``loss_reduction`` is something
            else, or ``batch_dim`` is negative.
        TypeError: A setting is no number.
        PolicyError: (at the rewrite) An op mixes examples, or nobody knows whether it does; the graph is a part of the
            model; one group has two bounds; the loss is the mean over a batch without examples.
        UnsupportedGradientError: (at the rewrite) A gradient of the group is sparse.

    Example:
        >>> ClipPerExample(1.0, noise_multiplier=1.1)
        ClipPerExample(1.0, noise_multiplier=1.1)
    """

    max_norm: float | Tensor | Schedule
    _: KW_ONLY
    noise_multiplier: float = 0.0
    loss_reduction: LossReduction = "mean"
    group: Hashable = "default"
    batch_dim: int = 0
    _noise: ExampleNoise | None = field(init=False, repr=False, compare=False)

    kinds: ClassVar[frozenset[Kind]] = frozenset(("gradient",))
    __repr__ = short_repr

    def __post_init__(self) -> None:
        store_python_numbers(self)
        check_norm("ClipPerExample", self.max_norm, 2.0)
        object.__setattr__(self, "_noise", ExampleNoise.of(self, self.max_norm))

    def check_bounds(self) -> None:
        """Raise ValueError if the bound is a tensor, and negative now."""
        check_not_negative("ClipPerExample", "max_norm", self.max_norm)

    def at(self, site: Site) -> Insertion:
        """Return the insertion at a site."""
        return weigh_examples(self, self.factors, self._noise)

    def factors(self, norms: Tensor) -> Tensor:
        """Return the factors of the examples, and record the share of clipped ones."""
        bound = bound_of(now(self.max_norm, norms.device, least=0.0), norms)
        if not isinstance(bound, Tensor):
            bound = norms.new_full((), bound)
        acts = (norms > bound) & (norms < torch.inf)
        record("clipped_share", share_of(acts))
        return torch.where(acts, bound / norms, 1.0)
