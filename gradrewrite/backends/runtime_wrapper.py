"""The run-time wrapper of a compiled backward: live inputs, auxiliary outputs, step snapshots."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from gradrewrite._compat import autograd
from gradrewrite.backends.session import Session
from gradrewrite.diagnostics.step_snapshot import PendingForwards
from gradrewrite.ir.record_layout import BackwardOutputs

_ACCUMULATED = (
    "{}: gradients of an earlier backward were still in .grad; the global clip acts on the gradients of each backward "
    "by itself, not on their sum"
)
_AGAIN = (
    "{}: the model was called several times before this backward; the global clip acts on the gradients of each call "
    "by itself, not on their sum"
)


@dataclass(eq=False, repr=False)
class RewrittenBackward:
    """A compiled backward graph with live inputs and auxiliary outputs, both of which are taken off where it runs.

    Attributes:
        session: Whose policy it follows.
        compiled: The code.
        live: Tensors that it reads at every call, after its inputs.
        outputs: Its auxiliary outputs.
        num_outputs: How many of them there are.
        is_whole: Whether its graph holds all that one call of the model does.
        copies_packs: Whether the next call overwrites its outputs.
        ranks: Name of the data parallelism around the model, and its number of ranks.
        forwards: The pending calls of the forward; None where nothing is checked.
        parameters: Those whose gradients it computes.
        accumulation: Watches the gradients of those that are clipped together.
    """

    session: Session
    compiled: Callable[[list[Any]], Any]
    live: Sequence[Tensor]
    outputs: BackwardOutputs
    num_outputs: int
    is_whole: bool
    copies_packs: bool
    ranks: tuple[str, int]
    forwards: PendingForwards | None
    parameters: Sequence[weakref.ref[Tensor]]
    accumulation: Accumulation

    def __call__(self, args: list[Any]) -> Any:
        """Run; gradients are returned, records go to the session's recorder."""
        session, outputs = self.session, self.outputs
        if not session.has_model:
            session.check_rules()
            session.check_ranks(*self.ranks)
            session.warnings.flush_warnings()
        if outputs.groups and self.accumulation.is_accumulating():
            self._warn("accumulated", _ACCUMULATED, outputs.groups)
        snapshot = None if self.forwards is None else self.forwards.snapshot(args)
        if session.config.loss_scale is not None:
            session.config.loss_scale.update()
        args.extend(self.live)
        results = self.compiled(args)
        if not self.num_outputs:
            return results
        results, auxiliary = results[: -self.num_outputs], results[-self.num_outputs :]
        packs, kept = auxiliary[: len(outputs.packs)], auxiliary[len(outputs.packs) :]
        # What is kept may be a gradient itself, which belongs to autograd; a CUDA graph overwrites all of it.
        tensors = [*(t.clone() if self.copies_packs else t for t in packs), *(t.clone() for t in kept)]
        again = session.recorder.collect(outputs, tensors, snapshot, self.parameters)
        if again and self.is_whole:
            self._warn("again", _AGAIN, again)
        self.accumulation.note_at_end()
        return results

    def _warn(self, key: str, text: str, groups: Sequence[str]) -> None:
        self.session.warnings.warn_once(key, text.format(", ".join(groups)))
        self.session.warnings.flush_warnings()


class Accumulation:
    """Detection of gradients of an earlier backward in ``.grad``, without reading them each time."""

    def __init__(self, parameters: Sequence[weakref.ref[Tensor]]) -> None:
        self._parameters = parameters
        self._versions: dict[int, int] = {}
        self._was_found = False

    def is_accumulating(self) -> bool:
        """True at most once. Gradients set to zero in place since (``set_to_none=False``) do not count."""
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
