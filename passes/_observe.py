"""Recording statistics of a tensor."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar

from torch import Tensor

from gradrewrite.errors import UnsupportedGradientError
from gradrewrite.policy.actions import ANYWHERE
from gradrewrite.policy.recording import record_statistics
from gradrewrite.sites import Kind, Site

_KNOWN = ("max_abs", "mean_abs", "norm", "min", "max", "nan", "inf", "nonfinite", "zeros", "saturated")
_SATURATING = {"tanh": "tanh", "tanh_": "tanh", "sigmoid": "sigmoid", "sigmoid_": "sigmoid", "expit": "sigmoid"}
_REAL = frozenset(("min", "max", "saturated_tanh", "saturated_sigmoid"))


@dataclass(frozen=True, slots=True, init=False, repr=False)
class Observe:
    """Record statistics of a tensor, which passes unchanged.

    ``max_abs``, ``mean_abs``, ``norm`` (L2), ``min``, ``max`` in units of the unscaled loss: NaN if an element is
    NaN, inf if one is infinite. ``nan``, ``inf``, ``nonfinite``: counts of elements. ``zeros``: share of elements
    that are exactly 0. ``saturated``: share of the elements of a tanh or a sigmoid within 1 % of its bounds
    (``|x| >= 0.99``; ``x <= 0.01`` or ``x >= 0.99``), recorded at activations of these ops alone. Of an empty tensor
    counts, shares and norm are 0, the others NaN. Complex tensors count by modulus; ``min`` and ``max`` need real ones.

    Attributes:
        statistics: Names, in the order of the records.

    Raises:
        ValueError: No name, or one that is unknown.
        UnsupportedGradientError: (a TypeError, at the rewrite) ``min`` or ``max`` of a complex tensor.

    Example:
        >>> Observe("max_abs", "nonfinite")
        Observe('max_abs', 'nonfinite')
    """

    statistics: tuple[str, ...]

    kinds: ClassVar[frozenset[Kind]] = ANYWHERE
    has_units: ClassVar[bool] = False  # each record is brought to its unit

    def __init__(self, *statistics: str) -> None:
        """Refuse names that are unknown."""
        unknown = [name for name in statistics if name not in _KNOWN]
        if unknown or not statistics:
            got = repr(unknown[0]) if unknown else "none"
            raise ValueError(f"Observe: name at least one of {', '.join(_KNOWN)}; got {got}")
        object.__setattr__(self, "statistics", tuple(dict.fromkeys(statistics)))

    def __repr__(self) -> str:
        """As the call that makes it."""
        return f"Observe({', '.join(map(repr, self.statistics))})"

    def specialize(self, site: Site) -> _Observation:
        """The statistics that mean something at one site."""
        chosen = []
        for name in self.statistics:
            if name != "saturated":
                chosen.append((name, name))
            elif site.kind == "activation" and site.op in _SATURATING:
                chosen.append((name, f"saturated_{_SATURATING[site.op]}"))
        return _Observation(tuple(chosen))

    def apply(self, tensor: Tensor) -> Tensor:
        """Record where no site is known."""
        return _Observation(tuple((n, n) for n in self.statistics if n != "saturated")).apply(tensor)


@dataclass(frozen=True, slots=True)
class _Observation:
    """Records at one site: names, and what is measured."""

    chosen: tuple[tuple[str, str], ...]

    kinds: ClassVar[frozenset[Kind]] = ANYWHERE
    has_units: ClassVar[bool] = False

    @property
    def statistics(self) -> Mapping[str, str]:
        return dict(self.chosen)

    @property
    def fails(self) -> None:
        return None

    def apply(self, tensor: Tensor) -> Tensor:
        unordered = [name for name, key in self.chosen if key in _REAL]
        if tensor.is_complex() and unordered:
            raise UnsupportedGradientError(
                f"Observe({unordered[0]!r}) needs real numbers and the tensor is {tensor.dtype}; use 'max_abs'"
            )
        if self.chosen:
            record_statistics(tensor, self.statistics)
        return tensor
