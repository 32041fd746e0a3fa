"""One use of a compiled graph: its names, parameters and earlier gradients."""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from dataclasses import dataclass

from torch import Tensor

from gradrewrite._compat import autograd
from gradrewrite.backends.parameter_watch import GraphCoverage
from gradrewrite.ir.record_layout import BackwardOutputs
from gradrewrite.replay.step_snapshot import PendingForwards


@dataclass(eq=False, repr=False)
class GraphUse:
    """A compiled graph's names and parameters for a model, or for one region.

    Attributes:
        outputs: The auxiliary outputs of its backward.
        parameters: Those whose gradients it computes.
        coverage: Tells the watch on parameters which backward ran it.
        accumulation: Watches the gradients of those that are clipped together.
        forwards: The pending calls of the forward; None where nothing is checked.
    """

    outputs: BackwardOutputs
    parameters: Sequence[weakref.ref[Tensor]]
    coverage: GraphCoverage
    accumulation: Accumulation
    forwards: PendingForwards | None


class Accumulation:
    """Detection of gradients of an earlier backward in ``.grad``, without reading them each time."""

    def __init__(self, parameters: Sequence[weakref.ref[Tensor]]) -> None:
        self._parameters = parameters
        self._versions: dict[int, int] = {}
        self._was_found = False

    def is_accumulating(self) -> bool:
        """Return whether a parameter had a gradient already; True at most once.

        Gradients set to zero in place since (``set_to_none=False``) do not count.
        """
        if self._was_found:
            return False
        for ref in self._parameters:
            parameter = ref()
            grad = parameter.grad if parameter is not None else None
            if grad is None:
                continue
            known = self._versions.get(id(grad))
            # Unknown gradients are read, which happens once: from then on the version tells.
            self._was_found = bool(grad.count_nonzero()) if known is None else known == grad._version
            if self._was_found:
                return True
        return False

    def note_at_end(self) -> None:
        """Remember the gradients as this backward leaves them."""
        if self._parameters and not self._was_found:
            autograd.at_end_of_backward(self._note)

    def _note(self) -> None:
        grads = [p.grad for p in (ref() for ref in self._parameters) if p is not None and p.grad is not None]
        self._versions = {id(g): g._version for g in grads}
