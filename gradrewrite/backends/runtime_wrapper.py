"""Run-time wrapper of a compiled backward: what is told apart by the gradients in ``.grad``."""

from __future__ import annotations

import weakref
from collections.abc import Sequence

from torch import Tensor

from gradrewrite._compat import autograd

_ACCUMULATED = (
    "{}: gradients of an earlier backward were still in .grad; the global clip acts on the gradients of each backward "
    "by itself, not on their sum"
)
_AGAIN = (
    "{}: the model ran several times before this backward; the global clip acts on the gradients of each run by "
    "itself, not on their sum"
)


class _Accumulation:
    """Tells whether ``.grad`` holds gradients of an earlier backward, without reading them each time."""

    def __init__(self, parameters: Sequence[weakref.ref[Tensor]]) -> None:
        self._parameters = parameters
        self._versions: dict[int, int] = {}
        self._said = False

    def is_accumulating(self) -> bool:
        """True at most once. Gradients set to zero in place since (``set_to_none=False``) do not count."""
        if self._said:
            return False
        for ref in self._parameters:
            parameter = ref()
            grad = parameter.grad if parameter is not None else None
            if grad is None:
                continue
            known = self._versions.get(id(grad))
            # Unknown gradients are read, which happens once: from then on the version tells.
            self._said = bool(grad.count_nonzero()) if known is None else known == grad._version
            if self._said:
                return True
        return False

    def note_at_end(self) -> None:
        """Remember the gradients as this backward leaves them."""
        if self._parameters and not self._said:
            autograd.at_end_of_backward(self._note)

    def _note(self) -> None:
        grads = [p.grad for p in (ref() for ref in self._parameters) if p is not None and p.grad is not None]
        self._versions = {id(g): g._version for g in grads}
