"""The recording of the action that is traced."""

from __future__ import annotations

from contextvars import ContextVar
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from gradrewrite.policy.recording import Recording

CURRENT: ContextVar[Recording | None] = ContextVar("gradrewrite_recording", default=None)


def current_recording() -> Recording | None:
    """Return the collector of the traced action's records; None outside of a rewrite."""
    return CURRENT.get()
