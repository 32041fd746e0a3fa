"""Computing a saved tensor again."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from gradrewrite.policy.insertions import SAVED, Insertion, RecomputeSaved
from gradrewrite.sites import Kind, Site


@dataclass(frozen=True, slots=True)
class Recompute:
    """Compute a saved tensor again in the backward, and do not keep it.

    NaN and infinities come again. What it is computed from is kept instead, unless the backward has that anyway: an
    input of the model, a parameter, another saved tensor. A tensor that is kept only because of that is a saved site of
    its own. As activation checkpointing of single operations: Chen et al., "Training deep nets with sublinear memory
    cost", 2016, https://arxiv.org/abs/1604.06174.

    Raises:
        PolicyError: (at the rewrite) The op draws random numbers or waits for other processes; or another action for
            saved tensors stands at the site.

    Example:
        >>> Recompute()
        Recompute()
    """

    kinds: ClassVar[frozenset[Kind]] = SAVED

    def at(self, site: Site) -> Insertion:
        """Return the insertion at a site."""
        return Insertion(self, RecomputeSaved(), SAVED)
