"""Warnings with the user's line."""

from __future__ import annotations

import sys
import threading
import warnings
from types import FrameType

from gradrewrite._compat import autograd
from gradrewrite.errors import RewriteWarning


def warn(text: str) -> None:
    """Issue a RewriteWarning at the user's line, the first outside of torch and gradrewrite."""
    frame = _caller()
    warnings.warn_explicit(
        text,
        RewriteWarning,
        frame.f_code.co_filename,
        frame.f_lineno,
        module=frame.f_globals.get("__name__"),
        registry=frame.f_globals.setdefault("__warningregistry__", {}),
    )


class PendingWarnings:
    """Warnings held back until a flush; none is issued during a compilation."""

    def __init__(self) -> None:
        self._known: set[str] = set()
        self._pending: list[str] = []

    def __contains__(self, key: str) -> bool:
        """Whether a warning with this key was given, or waits."""
        return key in self._known

    def warn_once(self, key: str, text: str) -> None:
        """Warn at the next flush, once for each key."""
        if key not in self._known:
            self._known.add(key)
            self._pending.append(text)

    def flush_warnings(self) -> None:
        """Issue the pending warnings."""
        while self._pending:
            warn(self._pending.pop(0))


_LIBRARIES = ("torch", "gradrewrite", "importlib", "")  # generated code has no module


def _caller() -> FrameType:
    """The user's frame; the outermost one of this thread where it cannot be found."""
    here = sys._getframe(1)
    found = _first_outside(here)
    if found is None:  # a thread of autograd's own, as it has for each device
        backwards = [b for thread, top in sys._current_frames().items() if (b := _running_backward(thread, top))]
        found = _first_outside(backwards[0]) if len(backwards) == 1 else None
    if found is not None:
        return found
    while here.f_back is not None:
        here = here.f_back
    return here


def _first_outside(frame: FrameType | None) -> FrameType | None:
    while frame is not None and _is_library(str(frame.f_globals.get("__name__", ""))):
        frame = frame.f_back
    return frame


def _is_library(module: str) -> bool:
    return module.partition(".")[0] in _LIBRARIES and not module.startswith("gradrewrite.examples")


def _running_backward(thread: int, frame: FrameType | None) -> FrameType | None:
    """Return another thread's frame that waits for its backward; None without one."""
    if thread == threading.get_ident():
        return None
    while frame is not None and not autograd.runs_backward(frame):
        frame = frame.f_back
    return frame
