"""Kept steps: the inputs of the micro-batches of one guarded step, for a replay after a skipped update."""

from __future__ import annotations

import weakref
from dataclasses import dataclass, field

from torch import Tensor

from gradrewrite.replay.step_snapshot import StepSnapshot, VersionedRef


@dataclass(slots=True, eq=False)
class KeptStep:
    """The step snapshots of one update, from its first backward to the first forward after it."""

    update_key: int  # of its records
    # By the number of the backward, those of its graphs; None of a graph that cannot be replayed.
    micro_batches: dict[int, list[StepSnapshot | None]] = field(default_factory=dict)
    is_over: bool = False  # whether the update is made, or skipped
    _versions: dict[int, int] = field(default_factory=dict)  # of parameters and buffers after it, by identity

    def add(self, backward: int, snapshot: StepSnapshot | None) -> None:
        """Add a graph of a backward."""
        self.micro_batches.setdefault(backward, []).append(snapshot)

    def close(self) -> None:
        """Note the end of the step: a skipped update has left the bits of parameters, and changed their versions.

        Only the first one: what a second optimizer changes after it is noticed.
        """
        if self.is_over:
            return
        self.is_over = True
        self.note_versions()

    def note_versions(self) -> None:
        """Note the versions of parameters and buffers, as the update has left them."""
        if not self.is_over:
            return
        first = next(iter(self.micro_batches.values()), [])
        values = [value for snapshot in first if snapshot is not None for value in snapshot.values]
        tensors = [value() for value in values if isinstance(value, weakref.ref)]
        self._versions = {id(t): t._version for t in tensors if isinstance(t, Tensor) and not t.is_inference()}

    def is_changed(self, ref: VersionedRef) -> bool:
        """Whether an input of a snapshot is another one than in the step."""
        return ref.is_overwritten() and self._versions.get(id(ref.get()), -1) != ref.get()._version
