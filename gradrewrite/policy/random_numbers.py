"""Random numbers in tensor functions: ``uniform``, ``normal``, ``bernoulli``."""

from __future__ import annotations

import math
from typing import Literal, TypeAlias

import torch
from torch import Tensor

from gradrewrite._compat import dtensors
from gradrewrite.errors import CallbackError
from gradrewrite.numerics import philox
from gradrewrite.policy.current import current_recording
from gradrewrite.policy.numbers import python_number
from gradrewrite.policy.state import State

Across: TypeAlias = Literal["ranks"] | None


def uniform(like: Tensor, *, across: Across = None) -> Tensor:
    """Draw uniform random numbers in [0, 1) inside a tensor function.

    They follow from ``gr.transform(..., seed=)``, the site (in a loop: the iteration), the number of the draw in the
    function, and a count of the runs of the function at its site: every backward draws others, and a replay of a step
    the same. The count is in ``gr.state_dict(model)``, under ``<site>/random``, with a hash of the seed and the site.
    Torch's generators are neither read nor moved. The numbers are computed in the graph, elementwise, by Philox2x32-7,
    with equal bits compiled and op by op, on all devices. They repeat after 2^32 runs at a site, and in a tensor after
    2^32 elements.

    Args:
        like: Shape, dtype and device of the numbers; its values are not read. A floating dtype; of a DTensor the
            numbers are those of the global tensor.
        across: None draws equal numbers on all ranks, ``"ranks"`` others on each; one process is rank 0.

    Returns:
        A new tensor of ``like``'s shape, dtype and device: multiples of the spacing of its dtype below 1 (2^-24 in
        float32, 2^-53 in float64).

    Raises:
        CallbackError: It is not called by a function that is being traced; ``like`` is no floating tensor; or
            ``across="ranks"`` with a DTensor.
        ValueError: ``across`` is something else.

    Example:
        >>> import gradrewrite as gr
        >>> def round_up_or_down(g):  # to multiples of 1/8, unbiased
        ...     return (8 * g + gr.uniform(g)).floor() / 8
        >>> model = gr.transform(torch.nn.Linear(2, 1), gr.on("gradient:weight", round_up_or_down), seed=1)
        >>> model(torch.tensor([[0.3, 0.625]])).sum().backward()
        >>> model.weight.grad
        tensor([[0.3750, 0.6250]])

    References:
        Salmon et al., "Parallel random numbers: as easy as 1, 2, 3", 2011, https://doi.org/10.1145/2063384.2063405
    """
    return _laid_out(philox.uniform(_bits("uniform", like, across), like.dtype), like)


def normal(like: Tensor, *, across: Across = None) -> Tensor:
    """Draw standard normal random numbers inside a tensor function.

    As ``gr.uniform``, by the transform of Box and Muller (1958), in float32 or float64; compiled and op by op they are
    equal up to the rounding of logarithm and cosine. Their size is at most 6.8.

    Args:
        like: Shape, floating dtype and device of the numbers.
        across: As for ``gr.uniform``.

    Returns:
        A new tensor of ``like``'s shape, dtype and device.

    Raises:
        CallbackError, ValueError: As ``gr.uniform``.

    Example:
        >>> import gradrewrite as gr
        >>> policy = gr.on("step:*", lambda g: g + 0.01 * gr.normal(g))
    """
    return _laid_out(philox.normal(_bits("normal", like, across), like.dtype), like)


def bernoulli(p: float | Tensor | State, like: Tensor, *, across: Across = None) -> Tensor:
    """Draw zeros and ones inside a tensor function.

    An element is 1 where a uniform number, drawn as by ``gr.uniform`` at least in float32, is less than ``p``.

    Args:
        p: Probability of a 1: a number in [0, 1], or a real tensor or state that broadcasts to ``like``'s shape, which
            is not checked: below 0 and NaN are as 0, above 1 as 1.
        like: Shape, floating dtype and device of the numbers.
        across: As for ``gr.uniform``.

    Returns:
        A new tensor of ``like``'s shape, dtype and device.

    Raises:
        CallbackError: As ``gr.uniform``; or ``p`` is a number outside of [0, 1], complex, or does not broadcast.
        ValueError: As ``gr.uniform``.

    Example:
        >>> import gradrewrite as gr
        >>> def dropped(g):  # half of the elements, the others twice as large
        ...     return 2 * g * gr.bernoulli(0.5, g)
        >>> policy = gr.on("error:layers.*", dropped)
    """
    bits = _bits("bernoulli", like, across)
    numbers = philox.uniform(bits, torch.promote_types(like.dtype, torch.float32))
    bound = _probability(p, like)
    if dtensors.is_dtensor(bound):
        return _laid_out(numbers, like).lt(bound).to(like.dtype)
    return _laid_out(numbers.lt(bound).to(like.dtype), like)


def _probability(p: float | Tensor | State, like: Tensor) -> float | Tensor:
    given = p.value if isinstance(p, State) else python_number(p)
    if isinstance(given, Tensor) and not given.is_complex():
        try:
            given.expand(like.shape)
        except RuntimeError as err:
            text = f"shape {tuple(given.shape)}, which does not broadcast to {tuple(like.shape)}"
            raise CallbackError(f"gr.bernoulli(p, like): p has {text}", code="random-op") from err
        return given.to(like.device) if given.dim() else given
    if isinstance(given, bool) or not isinstance(given, int | float) or not 0 <= given <= 1:
        raise CallbackError(
            f"gr.bernoulli(p, like): p is a number in [0, 1] or a real tensor, got {given!r}", code="random-op"
        )
    return float(given)


def _bits(function: str, like: Tensor, across: Across) -> Tensor:
    """Return 63 random bits for each element of a tensor."""
    if across not in (None, "ranks"):
        raise ValueError(f"gr.{function}: across is 'ranks' or None, got {across!r}")
    if not isinstance(like, Tensor) or not like.is_floating_point():
        given = like.dtype if isinstance(like, Tensor) else type(like).__name__
        raise CallbackError(f"gr.{function}(like): like is a tensor of a floating dtype, got {given}", code="random-op")
    recording = current_recording()
    if recording is None or recording.states is None:
        raise CallbackError(
            f"gr.{function} draws inside of tensor functions, as gr.on, gr.call, gr.joint and gr.together take them, "
            "where a policy inserts them; elsewhere use torch's own random numbers",
            code="random-op",
        )
    if across is not None and dtensors.is_dtensor(like):
        raise CallbackError(
            f'gr.{function}(like, across="ranks"): like is a DTensor, whose numbers are those of one global tensor; '
            "leave across away",
            code="random-op",
        )
    stream, draw = recording.draw()
    rank = None if across is None else recording.states.store.rank(like.device) + 1
    positions = torch.arange(math.prod(like.shape), device=like.device).view(like.shape)
    return philox.random_bits(positions, stream.to(like.device), draw, rank)


def _laid_out(numbers: Tensor, like: Tensor) -> Tensor:
    return dtensors.laid_out_as(numbers, like) if dtensors.is_dtensor(like) else numbers
