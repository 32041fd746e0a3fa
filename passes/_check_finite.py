"""Finite checks of tensors."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import KW_ONLY, dataclass, replace
from typing import ClassVar, get_args

from gradrewrite.ir.reports import OnFailure
from gradrewrite.passes._settings import short_repr
from gradrewrite.policy.insertions import MEASURABLE, Insertion, MeasureTensor, action_key
from gradrewrite.sites import Kind, Site


@dataclass(frozen=True, slots=True, repr=False)
class CheckFinite:
    """Count the elements that are NaN or infinite, at the position of the check in the order of its site.

    The tensor passes unchanged. A value clip before the check turns an infinity into its bound and ``NanToNum``
    hides everything; what counts is what the check sees. At an activation that the program itself fills with
    infinities (``masked_fill(mask, -inf)`` and what is computed from it up to the softmax) only NaN count. Empty
    tensors pass. Records ``nonfinite`` (``nan`` where only NaN count). After Caffe's ``checkFinite`` layers and
    ``torch.autograd.detect_anomaly``.

    Attributes:
        on_failure: ``"raise"`` raises ``NonFiniteError`` at the end of ``loss.backward()``, which then waits for
            the device once; ``"skip"`` makes ``gr.guard`` skip the update; ``"warn"`` warns when the count has
            arrived, one step later; ``"record"`` only records. At ``param`` and ``state`` sites, behind a guarded
            ``optimizer.step()``, ``"raise"`` raises from the step, and ``"skip"`` is a ``PolicyError``.
        nan_only: Let infinities pass.

    Raises:
        ValueError: ``on_failure`` is none of the four.

    Example:
        >>> CheckFinite("skip")
        CheckFinite(on_failure='skip')
    """

    on_failure: OnFailure = "raise"
    _: KW_ONLY
    nan_only: bool = False

    kinds: ClassVar[frozenset[Kind]] = MEASURABLE
    __repr__ = short_repr

    def __post_init__(self) -> None:
        if self.on_failure not in get_args(OnFailure):
            known = ", ".join(repr(name) for name in get_args(OnFailure))
            raise ValueError(f"CheckFinite: on_failure is one of {known}, got {self.on_failure!r}")

    def at(self, site: Site) -> Insertion:
        """Return the insertion at a site; under mask infinities NaN alone count."""
        check = replace(self, nan_only=True) if site.kind == "activation" and site.may_be_infinite else self
        every = 1 if self.on_failure in ("warn", "record") else None
        effect = MeasureTensor(check.statistics, self.on_failure)
        return Insertion(self, effect, self.kinds, every=every, key=action_key(check))

    @property
    def statistics(self) -> Mapping[str, str]:
        """The count."""
        name = "nan" if self.nan_only else "nonfinite"
        return {name: name}
