"""Skipped updates after a spike of the total norm or of the loss."""

from __future__ import annotations

import math
from collections.abc import Hashable
from dataclasses import KW_ONLY, dataclass
from typing import ClassVar, get_args

import torch
from torch import Tensor

from gradrewrite.passes._settings import check_number, short_repr, store_python_numbers
from gradrewrite.policy.insertions import Insertion, JudgedFigure, JudgeUpdate
from gradrewrite.policy.schedules import Schedule
from gradrewrite.policy.state import State
from gradrewrite.sites import Kind, Site


@dataclass(frozen=True, slots=True, repr=False)
class SkipSpikes:
    """Skip an update after a spike of the total norm or loss.

    A spike is more than ``sigma`` standard deviations above the mean. Mean and standard deviation (with Bessel's
    correction) are those of the last ``window`` accepted figures: of updates that were made. A figure of an update that
    was skipped is not among them, whoever skipped it: this action, ``CheckFinite("skip")``, a GradScaler, or another
    rank. A figure that is not finite always skips. A finite one never does before ``max(2, window // 2)`` figures were
    accepted, half of the window, rounded down.

    ``"total_norm"`` is the L2 norm of the unscaled gradients of the group, after the actions of the single sites and
    before every group action, as ``ClipByGlobalNorm`` computes it. ``"loss"`` is the mean of all
    ``monitor.log("loss", loss)`` since the last step of the optimizer, one for each micro-batch, over all ranks that
    skip together. A skip is one of ``CheckFinite("skip")``: the same verdict, counts and exchange of ranks. The guard
    records ``total_norm`` or ``loss``, ``spike_limit`` (infinite as long as nothing is skipped) and ``spike`` (1 where
    the figure skips, else 0) at ``step:group:<group>``. After the ``SkipStepOptimizer`` of OLMo-core, which also keeps
    the figures that it rejects.

    Its state is saved by ``gr.state_dict``: the window, and how many figures were accepted, as float64 where the device
    has it.

    Attributes:
        sigma: Number of standard deviations, > 0 and finite.
        window: Number of accepted figures that are remembered, >= 2.
        of: ``"total_norm"`` or ``"loss"``.
        group: Gradients of one group have one total norm; one group has one figure and one window.

    Raises:
        ValueError: A setting is out of range.
        TypeError: ``sigma`` or ``window`` is no number.
        PolicyError: (at the rewrite) The site is no step site, or one group has two settings; (from ``step``) no loss
            was logged since the last step.
        UnsupportedGradientError: (at the rewrite) A gradient of the group is sparse.
        SpikeError: (from ``step``) Too many updates in a row were skipped; see ``gr.guard``.

    Example:
        >>> import gradrewrite as gr
        >>> policy = gr.on("step:*", SkipSpikes())
        >>> SkipSpikes(4.0, of="loss")
        SkipSpikes(sigma=4.0, of='loss')
    """

    sigma: float = 6.0
    _: KW_ONLY
    window: int = 128
    of: JudgedFigure = "total_norm"
    group: Hashable = "default"

    kinds: ClassVar[frozenset[Kind]] = frozenset(("step",))
    __repr__ = short_repr

    def __post_init__(self) -> None:
        store_python_numbers(self)
        for name in ("sigma", "window"):
            if isinstance(getattr(self, name), Tensor | Schedule):
                raise TypeError(f"SkipSpikes: {name} is a number, got a {type(getattr(self, name)).__name__}")
            check_number("SkipSpikes", name, getattr(self, name))
        if not 0 < self.sigma < math.inf:
            raise ValueError(f"SkipSpikes: sigma must be > 0 and finite, got {self.sigma!r}")
        if not isinstance(self.window, int) or self.window < 2:
            raise ValueError(f"SkipSpikes: window is a whole number >= 2, got {self.window!r}")
        if self.of not in get_args(JudgedFigure):
            raise ValueError(f'SkipSpikes: of is "total_norm" or "loss", got {self.of!r}')

    def at(self, site: Site) -> Insertion:
        """Return the insertion at a site."""
        return Insertion(self, JudgeUpdate(self.group, self.of, self.judge), self.kinds, has_units=True)

    def judge(self, figure: Tensor) -> tuple[Tensor, Tensor]:
        """Return the limit of a figure, and whether it is a spike.

        Both are 0-d. A figure that is no spike is remembered. The guard writes the state only where the update is made.
        """
        wide = torch.float32 if figure.device.type == "mps" else torch.float64
        window = State((self.window,), 0.0, wide, name="SkipSpikes.window")
        count = State((), 0, torch.int64, name="SkipSpikes.count")
        values, number, figure = window.value, count.value, figure.to(wide)
        place = torch.arange(self.window, device=figure.device)
        size = number.clamp(max=self.window)
        limit = _limit(torch.where(place < size, values, torch.nan), size.to(wide), self.sigma)
        limit = torch.where(size < max(2, self.window // 2), torch.inf, limit)
        is_spike = ~figure.isfinite() | (figure > limit)
        window.set(torch.where((place == number % self.window) & ~is_spike, figure, values))
        count.set(number + ~is_spike)
        return limit, is_spike


def _limit(values: Tensor, size: Tensor, sigma: float) -> Tensor:
    """Return mean plus ``sigma`` standard deviations of some values.

    They are those that are not NaN, ``size`` in number. By the largest absolute value: squares do not overflow, and the
    limit of equal values is their value exactly.
    """
    largest = values.abs().nan_to_num(0.0).amax()
    unit = torch.where(largest > 0, largest, 1.0)
    shares = values / unit
    mean = shares.nansum() / size
    deviation = ((shares - mean).square().nansum() / (size - 1)).sqrt()
    return (mean + sigma * deviation) * unit
