"""What the monitor asks of a guard."""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from typing import Protocol

from torch import Tensor


class Guard(Protocol):
    """What watches an optimizer (``gr.guard``)."""

    def begin(self) -> None:
        """A backward begins."""
        ...

    def note(self, bad: Tensor, parameters: Sequence[weakref.ref[Tensor]]) -> None:
        """Take the verdict of one graph: 0-d float32 on its device, 1 if a check that skips failed."""
        ...

    @property
    def is_alive(self) -> bool:
        """Whether its optimizer is still there."""
        ...

    @property
    def skipped(self) -> int:
        """How many updates were skipped."""
        ...
