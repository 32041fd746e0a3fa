"""Recording statistics of a tensor."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

from gradrewrite.numerics.statistics import PARTS, STATISTICS, largest_of, norm_of
from gradrewrite.passes._loss_figures import record_loss_cosines, record_loss_norms
from gradrewrite.passes._noise_scale import variance_and_norm
from gradrewrite.passes._settings import check_examples
from gradrewrite.policy.insertions import (
    MEASURABLE,
    SAVED,
    Effect,
    Insertion,
    LossReduction,
    MeasureTensor,
    PerExample,
    ReplaceTensor,
    action_key,
)
from gradrewrite.policy.recording import record
from gradrewrite.policy.sampling import checked_interval
from gradrewrite.sites import Kind, Site

_EXAMPLES = ("example_norm_mean", "example_norm_max", "noise_scale")
_LOSSES = ("loss_norms", "loss_cosine")
_PARTS = frozenset(part for parts in PARTS.values() for part in parts)
_SINGLE = ("saturated" if name.startswith("saturated_") else name for name in STATISTICS if name not in _PARTS)
_STORED = "stored_error"
_KNOWN = tuple(dict.fromkeys([*_SINGLE, *PARTS, *_EXAMPLES, *_LOSSES, _STORED]))
_OF_LOSSES: frozenset[Kind] = frozenset(("gradient", "error"))
_SATURATING = {"tanh": "tanh", "tanh_": "tanh", "sigmoid": "sigmoid", "sigmoid_": "sigmoid", "expit": "sigmoid"}


@dataclass(frozen=True, slots=True, init=False, repr=False)
class Observe:
    """Record statistics of a tensor; it passes unchanged.

    ``max_abs``, ``mean_abs``, ``norm`` (L2), ``min``, ``max`` in units of the unscaled loss: NaN if an element is
    NaN, inf if one is infinite. ``nan``, ``inf``, ``nonfinite``: counts of elements. ``zeros``: share of elements
    that are exactly 0. ``saturated``: share of the elements of a tanh or a sigmoid within 1 % of its bounds
    (``|x| >= 0.99``; ``x <= 0.01`` or ``x >= 0.99``), recorded at activations of these ops alone. Of an empty tensor
    counts, shares and norm are 0, the others NaN. Complex tensors count by modulus; ``min`` and ``max`` need real ones.

    ``fingerprint``: a sum of the bits of all elements modulo 2^48, for ``gradrewrite diff``; tensors with the same
    elements have the same one in any order, and one flipped bit changes it (the formula: ``fingerprint_of`` in
    ``numerics.statistics``). It is of the tensor as it is, scaled by the loss scale. Three records of 16 bits, exact in
    float32: ``fingerprint_0`` has the low ones; tables show ``fingerprint@site`` as one number.

    ``std``: standard deviation over all elements, and ``mean`` beside it; ``kurtosis``: these two, ``skewness`` and
    ``kurtosis`` (3 of a normal distribution). NaN if an element is not finite; no complex tensors. ``exponents``: 64
    counts ``exponents_0`` to ``exponents_63`` of ``floor(log2 |x|)`` from -46 to 17 (smaller and larger elements count
    in the first and the last), and ``exponents_zero``, ``exponents_inf`` and ``exponents_nan``: what a narrower dtype
    would flush to zero or not hold, which ``gradrewrite doctor`` says. Tables have one row for them, TensorBoard and
    wandb a histogram.

    It stands at any kind of site: ``error``, ``gradient``, ``input``, ``activation``, ``step``, and at ``param`` and
    ``state`` (parameters, and their optimizer's state, behind a guarded ``optimizer.step()``).

    ``numel``: number of elements; it is recorded by itself beside a mean, a share or an extreme of a tensor with
    symbolic sizes, for the figure of a whole (``Monitor.reduce``).

    At gradient sites alone, of the gradients of single examples (see ``docs/per-example.md``): ``example_norm_mean``
    and ``example_norm_max``, the mean and the largest of their L2 norms; ``noise_scale``, of this parameter alone
    (``NoiseScale`` is that of all parameters, smoothed), the trace of their covariance over the squared norm of the
    true gradient, both estimated without bias from the norms of single gradients and of their mean (with a small batch
    the estimate of the latter may be negative). It is NaN for a batch of one; all three are NaN for a batch without
    examples, and NaN or inf where a gradient is. The simple noise scale of McCandlish, Kaplan, Amodei and the OpenAI
    Dota team, "An empirical model of large-batch training", 2018, https://arxiv.org/abs/1812.06162.

    At gradient and error sites alone, of a model with several losses (see ``WeighLosses``): ``loss_norms``, the L2 norm
    of the gradient of each loss (``loss_norm_0``, ...), and ``loss_cosine``, the smallest cosine between two of them,
    with that of each pair (``loss_cosine_0_1``, ...) where there are more than two; NaN where a norm is 0 or not
    finite. These are the gradients of the model, before any action.

    At saved sites alone, and by itself: ``stored_error``, the relative L2 error ``|r - x| / |x|`` of the form in which
    ``Store`` keeps a tensor ``x``, restored as ``r``; NaN where that is. Nothing is recorded where none is stored.

    Attributes:
        statistics: Names, in the order of the records; those of single examples and of losses come last.
        every: Number of steps from one measurement to the next; see ``Monitor(sample=)``.
        loss_reduction: How the loss of the batch follows from those of its examples: ``"mean"`` or ``"sum"``.
        batch_dim: The dimension of every tensor input of the model that has the examples.

    Raises:
        ValueError: No name, one that is unknown, or one that takes an ``Observe`` of its own; or ``every`` is no whole
            number >= 1.
        PolicyError: (at the rewrite) An op mixes examples, or nobody knows whether it does.
        UnsupportedGradientError: (a TypeError, at the rewrite) ``min``, ``max``, ``std`` or ``kurtosis`` of a complex
            tensor.

    Example:
        >>> Observe("max_abs", "nonfinite")
        Observe('max_abs', 'nonfinite')
    """

    statistics: tuple[str, ...]
    every: int
    loss_reduction: LossReduction
    batch_dim: int

    def __init__(
        self, *statistics: str, every: int = 1, loss_reduction: LossReduction = "mean", batch_dim: int = 0
    ) -> None:
        """Refuse unknown names."""
        unknown = [name for name in statistics if name not in _KNOWN]
        if unknown or not statistics:
            got = repr(unknown[0]) if unknown else "none"
            raise ValueError(f"Observe: name at least one of {', '.join(_KNOWN)}; got {got}")
        check_examples("Observe", loss_reduction, batch_dim)
        if not set(_LOSSES).isdisjoint(statistics) and not set(_EXAMPLES).isdisjoint(statistics):
            raise ValueError("Observe: take one Observe for figures of single examples, and one for those of losses")
        if _STORED in statistics and len(set(statistics)) > 1:
            raise ValueError(f"Observe: {_STORED!r} is of saved sites; take one Observe for it, and one for the others")
        object.__setattr__(self, "statistics", tuple(dict.fromkeys(statistics)))
        object.__setattr__(self, "every", checked_interval("Observe", "every", every))
        object.__setattr__(self, "loss_reduction", loss_reduction)
        object.__setattr__(self, "batch_dim", batch_dim)

    def __repr__(self) -> str:
        """As the call that makes it."""
        given = list(map(repr, self.statistics))
        given += [f"every={self.every}"] * (self.every != 1)
        given += [f"loss_reduction={self.loss_reduction!r}"] * (self.loss_reduction != "mean")
        given += [f"batch_dim={self.batch_dim}"] * (self.batch_dim != 0)
        return f"Observe({', '.join(given)})"

    @property
    def kinds(self) -> frozenset[Kind]:
        """The allowed kinds of site."""
        own = set(self.statistics)
        if _STORED in own:
            return SAVED
        if own <= set(_EXAMPLES):
            return frozenset(("gradient",))
        return _OF_LOSSES if own <= set(_LOSSES) else MEASURABLE

    def at(self, site: Site) -> Insertion:
        """Return the insertion at a site, of the statistics that mean something there."""
        if _STORED in self.statistics:
            return Insertion(
                self, ReplaceTensor(_record_stored_error, "value"), SAVED, every=self.every, records=(_STORED,)
            )
        chosen = dict(self._statistics_at(site))
        measure = MeasureTensor(chosen)
        examples = tuple(name for name in self.statistics if name in _EXAMPLES)
        losses = tuple(name for name in self.statistics if name in _LOSSES)
        effect: Effect = measure
        records = tuple(chosen)
        if losses and site.kind in _OF_LOSSES:
            effect = ReplaceTensor(
                partial(_record_losses, measure, losses), "losses", of_others=measure if chosen else None
            )
        elif examples and site.kind == "gradient":
            run = partial(_record_examples, measure, examples, self.loss_reduction)
            effect = ReplaceTensor(run, PerExample(("square_norms",), self.loss_reduction, self.batch_dim))
            records += examples
        key = action_key(self), tuple(chosen.items())
        return Insertion(self, effect, self.kinds, has_units=bool(examples), every=self.every, records=records, key=key)

    def _statistics_at(self, site: Site) -> list[tuple[str, str]]:
        """Return the names of the records at a site, with their keys of ``STATISTICS``."""
        chosen = []
        for name in self.statistics:
            if name in _EXAMPLES or name in _LOSSES:
                continue
            if name != "saturated":
                chosen += _records_of(name)
            elif site.kind == "activation" and site.op in _SATURATING:
                chosen.append((name, f"saturated_{_SATURATING[site.op]}"))
        if None in site.shape and any(STATISTICS[key].combination.kind in ("mean", "min", "max") for _, key in chosen):
            chosen.append(("numel", "numel"))  # by which parts are weighted
        return chosen


def _records_of(statistic: str) -> list[tuple[str, str]]:
    """Name the records of a statistic, one a part, with their keys of ``STATISTICS``."""
    return [(part, part) for part in PARTS.get(statistic, (statistic,))]


def _record_stored_error(tensor: Tensor, restored: Tensor) -> Tensor:
    """Record the relative L2 error of the stored form of a saved tensor."""
    norm = norm_of(tensor)
    error = norm_of(restored.to(norm.dtype) - tensor.to(norm.dtype))
    record(_STORED, torch.where(norm > 0, error / norm, error))
    return tensor


def _record_losses(measure: MeasureTensor, names: Sequence[str], tensor: Tensor, gramian: Tensor) -> Tensor:
    measure.run(tensor)
    if "loss_norms" in names:
        record_loss_norms(gramian)
    if "loss_cosine" in names:
        record_loss_cosines(gramian)
    return tensor


def _record_examples(
    measure: MeasureTensor, names: Sequence[str], loss_reduction: LossReduction, tensor: Tensor, squares: Tensor
) -> Tensor:
    measure.run(tensor)
    for name in names:
        if name == "noise_scale":
            record(name, _noise_scale(tensor, squares, loss_reduction))
        else:
            record(name, squares.sqrt().mean() if name == "example_norm_mean" else largest_of(squares).sqrt())
    return tensor


def _noise_scale(gradient: Tensor, squares: Tensor, loss_reduction: LossReduction) -> Tensor:
    of_batch = norm_of(gradient).to(squares.dtype).square()
    variance, norm = variance_and_norm(squares, of_batch, loss_reduction)
    return variance / norm
