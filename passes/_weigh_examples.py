"""Weighing the gradients of single examples by a function of their norms."""

from __future__ import annotations

from collections.abc import Callable, Hashable
from dataclasses import KW_ONLY, dataclass, field
from typing import ClassVar

from torch import Tensor

from gradrewrite._compat import fake_tensors
from gradrewrite.errors import CallbackError
from gradrewrite.passes._example_weights import ExampleNoise, weigh_examples
from gradrewrite.passes._settings import short_repr, store_python_numbers
from gradrewrite.policy.actions import num_required
from gradrewrite.policy.insertions import Insertion, LossReduction, action_key
from gradrewrite.policy.recording import record
from gradrewrite.sites import Kind, Site


@dataclass(frozen=True, slots=True, repr=False, eq=False)
class WeighExamples:
    """Multiply the gradient of each example by a factor.

    ``sum_b f_b * g_b + noise_multiplier * normal``, divided by the batch size if the loss is a mean. The gradient
    ``g_b`` of an example is that of its own loss, and ``f = function(norms)``. ``ClipPerExample(c)`` is one case, with
    ``lambda norms: (c / norms).clamp(max=1)``; automatic clipping, ``lambda norms: 1 / (norms + 0.01)``, has no bound
    to be tuned, and gives each example a norm below 1. A factor is multiplied as it is returned: a NaN or an infinity
    in it is one of the gradients, and so is that of an example whose factor is 0 (``0 * inf`` is NaN). Norms are
    computed at least in float32, as sums of squares: beyond 1e19 they are inf in float32. Of a batch without examples
    norms are ``[0]``, and the sum is 0, plus the noise; a mean over none is refused. Shape, dtype and device of the
    gradient are kept. The gradient without factors is not computed, unless an action before reads it.

    Records ``example_norm_mean``, ``example_norm_max`` and ``example_factor_mean`` at ``group:<group>``, or at each
    ``gradient:<name>`` with ``per_parameter``, as do ``gr.record`` and ``gr.State`` in the function.

    The noise is that of a function that bounds each example at norm 1: for one with the bound ``c`` multiply
    ``noise_multiplier`` by ``c``. Nothing checks the factors: without a bound the noise hides no example. With
    ``per_parameter`` the function bounds each parameter alone, and an example over ``P`` of them by ``sqrt(P)``.
    Generators, accumulation and several processes are as for ``ClipPerExample``.

    Automatic clipping of Bu, Wang, Zha and Karypis, "Automatic clipping: differentially private deep learning made
    easier and stronger", 2023, https://arxiv.org/abs/2206.07136; ``docs/per-example.md`` says which losses have such
    gradients.

    Attributes:
        function: ``f(norms) -> factors`` in torch operations: of the L2 norms ``[B]`` of the gradients of the examples,
            in units of the unscaled loss, float32 (float64 for float64 gradients). It returns floating factors ``[B]``
            on the same device, without a unit, converted to that dtype. Traced once; may use ``gr.record`` and
            ``gr.State``.
        per_parameter: Whether norms are those of each parameter alone, with one call of the function for each; else
            over all parameters of the group.
        noise_multiplier: Standard deviation of the noise of the sum, >= 0, in units of the gradient of one example.
        loss_reduction: How the loss of the batch follows from those of its examples: ``"mean"`` or ``"sum"``.
        group: Parameters of one group have one function and one noise.
        batch_dim: The dimension of every tensor input of the model that has the examples.

    Raises:
        ValueError: ``noise_multiplier`` is < 0 or not finite, ``loss_reduction`` is something else, or ``batch_dim`` is
            negative.
        TypeError: ``function`` is not callable with one argument, or a setting is no number.
        PolicyError: (at the rewrite) As ``ClipPerExample``.
        CallbackError: (at the rewrite) The function returns something else than factors.
        UnsupportedGradientError: (at the rewrite) A gradient of the group is sparse.

    Example:
        >>> WeighExamples(lambda norms: 1 / (norms + 0.01), noise_multiplier=1.1)
        WeighExamples(<lambda>, noise_multiplier=1.1)
    """

    function: Callable[[Tensor], Tensor]
    _: KW_ONLY
    per_parameter: bool = False
    noise_multiplier: float = 0.0
    loss_reduction: LossReduction = "mean"
    group: Hashable = "default"
    batch_dim: int = 0
    _noise: ExampleNoise | None = field(init=False, repr=False)

    kinds: ClassVar[frozenset[Kind]] = frozenset(("gradient",))
    __repr__ = short_repr

    def __post_init__(self) -> None:
        store_python_numbers(self)
        if not callable(self.function) or num_required(self.function) not in (None, 1):
            raise TypeError(f"WeighExamples: function takes norms [B] and returns factors [B], got {self.function!r}")
        object.__setattr__(self, "_noise", ExampleNoise.of(self))

    def __eq__(self, other: object) -> bool:
        """Compare settings; functions by code and values."""
        return isinstance(other, WeighExamples) and action_key(self) == action_key(other)

    def __hash__(self) -> int:
        """Hash of the settings."""
        return hash(action_key(self))

    def at(self, site: Site) -> Insertion:
        """Return the insertion at a site."""
        return weigh_examples(self, self.factors, self._noise, per_parameter=self.per_parameter)

    def factors(self, norms: Tensor) -> Tensor:
        """Return the factors of the examples, and record their mean."""
        found = self.function(norms)
        if not _are_factors(found, norms):
            is_tensor = isinstance(found, Tensor)
            got = f"{tuple(found.shape)}, {found.dtype}, on {found.device}" if is_tensor else type(found).__name__
            raise CallbackError(
                f"{self!r}: the factors of the examples are a floating tensor of shape {tuple(norms.shape)} on "
                f"{norms.device}; the function returned {got}"
            )
        factors = found.to(norms.dtype)
        record("example_factor_mean", factors.mean())
        return factors


def _are_factors(found: object, norms: Tensor) -> bool:
    if not isinstance(found, Tensor) or not found.is_floating_point() or found.device != norms.device:
        return False
    return found.dim() == 1 and fake_tensors.statically_known_true(found.shape[0] == norms.shape[0])
