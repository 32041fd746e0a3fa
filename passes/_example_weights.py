"""Factors of the gradients of single examples, and noise of their sum, for several actions."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

from torch import Tensor

from gradrewrite.numerics.noise import NoiseSource, draw_seed
from gradrewrite.numerics.statistics import largest_of
from gradrewrite.passes._settings import Bound, bound_of, check_examples, check_number, now
from gradrewrite.policy.current import current_recording
from gradrewrite.policy.insertions import Insertion, PerExample, WeighExampleGradients
from gradrewrite.policy.recording import record


@dataclass(frozen=True, slots=True, eq=False)
class ExampleNoise:
    """Normal noise for the sums of the gradients of examples."""

    state: str  # name of its state
    multiplier: float
    unit: Bound | None  # of the multiplier; None for 1
    source: NoiseSource

    @classmethod
    def of(cls, action: Any, unit: Bound | None = None) -> ExampleNoise | None:
        """Return the noise of an action, None without any.

        ValueError or TypeError for its settings of noise and examples.
        """
        name, multiplier = type(action).__name__, action.noise_multiplier
        if isinstance(multiplier, Tensor):
            raise TypeError(f"{name}: noise_multiplier is a number, got a tensor")
        check_number(name, "noise_multiplier", multiplier)
        if not 0 <= multiplier < float("inf"):
            raise ValueError(f"{name}: noise_multiplier must be >= 0 and finite, got {multiplier!r}")
        check_examples(name, action.loss_reduction, action.batch_dim)
        return cls(f"{name}.noise", multiplier, unit, NoiseSource(draw_seed())) if multiplier > 0 else None

    def draw(self, like: Tensor) -> Tensor:
        """Return the noise for the sum of one parameter's weighted gradients."""
        source, recording = self.source, current_recording()
        if recording is not None and recording.states is not None:
            source = recording.states.noise_source(self.state, source)
        drawn = source.normal_like(like)
        if self.unit is not None:
            drawn = drawn * bound_of(now(self.unit, like.device, least=0.0), like)
        return drawn * self.multiplier


def weigh_examples(
    action: Any, factors: Callable[[Tensor], Tensor], noise: ExampleNoise | None, *, per_parameter: bool = False
) -> Insertion:
    """Return the insertion of an action with factors ``[B]`` from norms ``[B]``."""
    effect = WeighExampleGradients(
        action.group,
        partial(_factors_of_squares, factors),
        PerExample((), action.loss_reduction, action.batch_dim),
        None if noise is None else noise.draw,
        per_parameter,
    )
    return Insertion(action, effect, action.kinds, has_units=True)


def _factors_of_squares(factors: Callable[[Tensor], Tensor], tensors: Sequence[Tensor]) -> Sequence[Tensor]:
    """Return the factors of examples from their squared norms, and record the norms."""
    (squares,) = tensors
    norms = squares.sqrt()
    record("example_norm_mean", norms.mean())
    record("example_norm_max", largest_of(norms))
    return [factors(norms)]
