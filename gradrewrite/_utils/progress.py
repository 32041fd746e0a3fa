"""Progress of long tracing, on a terminal."""

from __future__ import annotations

import contextlib
import sys
import threading
from collections.abc import Iterator
from contextvars import ContextVar
from dataclasses import dataclass

DELAY = 5.0  # seconds; what is over sooner shows nothing
INTERVAL = 0.5  # seconds


@dataclass
class Progress:
    """The progress of one stage, for a reader on another thread."""

    stage: str = ""  # what is done now
    done: int = 0  # number of its steps that are done
    total: int | None = None  # number of its steps; None if it is not known

    def begin(self, stage: str, total: int | None = None) -> None:
        """Show the name of the current stage."""
        self.stage, self.done, self.total = stage, 0, total

    def advance(self) -> None:
        """Count one step of the stage."""
        self.done += 1


_progress: ContextVar[Progress | None] = ContextVar("gradrewrite_progress", default=None)


def current_progress() -> Progress:
    """Return the shown progress, or else one without a reader."""
    return _progress.get() or Progress()


@contextlib.contextmanager
def show_progress(name: str, stage: str, *, delay: float = DELAY) -> Iterator[None]:
    """Show the progress of a block on standard error, as a bar of tqdm, once it has run for ``delay`` seconds.

    Nothing is shown, and no thread runs, where standard error is no terminal.
    """
    if not sys.stderr.isatty():
        yield
        return
    progress = Progress(stage)
    ended = threading.Event()
    thread = threading.Thread(target=_draw, args=(name, progress, ended, delay), daemon=True)
    token = _progress.set(progress)
    thread.start()
    try:
        yield
    finally:
        _progress.reset(token)
        ended.set()
        thread.join()


def _draw(name: str, progress: Progress, ended: threading.Event, delay: float) -> None:
    """Draw the bar until the block ends, and remove it."""
    if ended.wait(delay):
        return
    from tqdm import tqdm

    shown = progress.stage
    with tqdm(desc=f"{name}, {shown}", total=progress.total, file=sys.stderr, leave=False, unit="op") as bar:
        while True:
            stage, done, total = progress.stage, progress.done, progress.total
            if stage != shown:
                shown = stage
                bar.reset(total)
                bar.set_description_str(f"{name}, {stage}", refresh=False)
            bar.n = done
            bar.refresh()
            if ended.wait(INTERVAL):
                return
