"""The noise scale of a network."""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import KW_ONLY, dataclass
from typing import ClassVar

import torch
from torch import Tensor

from gradrewrite.passes._settings import check_examples, check_number, short_repr, store_python_numbers
from gradrewrite.policy.insertions import Insertion, LossReduction, MeasureExampleGradients, PerExample
from gradrewrite.policy.recording import record
from gradrewrite.policy.state import State
from gradrewrite.sites import Kind, Site


@dataclass(frozen=True, slots=True, repr=False)
class NoiseScale:
    """Record the simple noise scale of a group of gradients.

    They stay as they are. Over all parameters of the group it is the trace of the covariance of the gradients of
    single examples over the squared norm of the true gradient: a batch of that size has as much noise as signal,
    and larger ones pay less and less. Both are estimated without bias, from the squared norms of single gradients
    and of that of the batch, and are smoothed by themselves: the quotient of one step is too noisy, and that of two
    means has little bias. McCandlish, Kaplan, Amodei and the OpenAI Dota team, "An empirical model of large-batch
    training", 2018, appendix A.1, https://arxiv.org/abs/1812.06162.

    Records at ``group:<group>``: ``example_variance``, the trace, and ``true_square_norm``, both of this step and in
    units of the unscaled loss (the latter may be negative); ``noise_scale``, in examples, the quotient of their
    exponential means. A step in which one of the two is not finite (a batch of one has none) does not count for the
    means; before the first other one ``noise_scale`` is NaN. Its state is in ``gr.state_dict``. It is measured in every
    step, whatever ``Monitor(sample=)`` says.

    ``Observe("noise_scale")`` is that of each parameter by itself, and of one step.

    Attributes:
        decay: Of the exponential means, in [0, 1): 0 is the quotient of this step.
        loss_reduction: How the loss of the batch follows from those of its examples: ``"mean"`` or ``"sum"``.
        group: Parameters of one group have one noise scale.
        batch_dim: The dimension of every tensor input of the model that has the examples.

    Raises:
        ValueError: ``decay`` is out of range, ``loss_reduction`` is something else, or ``batch_dim`` is negative.
        TypeError: ``decay`` is no number.
        PolicyError: (at the rewrite) An op mixes examples, or nobody knows whether it does; the graph is a part of the
            model.
        UnsupportedGradientError: (at the rewrite) A gradient of the group is sparse.

    Example:
        >>> import gradrewrite as gr
        >>> policy = gr.on("gradient:*", NoiseScale(decay=0.9))
    """

    _: KW_ONLY
    decay: float = 0.99
    loss_reduction: LossReduction = "mean"
    group: Hashable = "default"
    batch_dim: int = 0

    kinds: ClassVar[frozenset[Kind]] = frozenset(("gradient",))
    __repr__ = short_repr

    def __post_init__(self) -> None:
        store_python_numbers(self)
        if isinstance(self.decay, Tensor):
            raise TypeError("NoiseScale: decay is a number, got a tensor")
        check_number("NoiseScale", "decay", self.decay)
        if not 0 <= self.decay < 1:
            raise ValueError(f"NoiseScale: decay is in [0, 1), got {self.decay!r}")
        check_examples("NoiseScale", self.loss_reduction, self.batch_dim)

    def at(self, site: Site) -> Insertion:
        """Return the insertion at a site."""
        examples = PerExample((), self.loss_reduction, self.batch_dim)
        return Insertion(self, MeasureExampleGradients(self.group, self.measure, examples), self.kinds, has_units=True)

    def measure(self, squares: Tensor, of_batch: Tensor) -> None:
        """Record from squared norms: of examples ``[B]``, and of the batch."""
        wide = torch.float32 if squares.device.type == "mps" else torch.float64
        variance, norm = variance_and_norm(squares.to(wide), of_batch.to(wide), self.loss_reduction)
        record("example_variance", variance)
        record("true_square_norm", norm)
        is_known = variance.isfinite() & norm.isfinite()
        means = []
        for name, value in (("variance", variance), ("norm", norm)):
            state = State((), 0.0, wide, name=f"NoiseScale.{name}")
            means.append(torch.where(is_known, self.decay * state.value + (1 - self.decay) * value, state.value))
            state.set(means[-1])
        record("noise_scale", means[0] / means[1])


def variance_and_norm(squares: Tensor, of_batch: Tensor, loss_reduction: LossReduction) -> tuple[Tensor, Tensor]:
    """Return the unbiased estimates of trace and squared norm."""
    number = squares.shape[0]
    mean = of_batch if loss_reduction == "mean" else of_batch / (number * number)
    single = squares.mean()
    return (single - mean) * number / (number - 1), (mean * number - single) / (number - 1)
