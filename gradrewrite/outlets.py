"""The files that rows of the monitor are written to."""

from __future__ import annotations

import itertools
from collections import deque
from collections.abc import Sequence

from gradrewrite.rows import Row
from gradrewrite.sinks import Sink
from gradrewrite.voice import warn


class Outlets:
    """Files that get every row once, in order."""

    def __init__(self) -> None:
        """Begin with none."""
        self._sinks: list[Sink] = []
        self._next: dict[object, int] = {}  # by the key of a sink: the first step that it has not had
        self._said_late = False

    def __bool__(self) -> bool:
        """Whether there is one."""
        return bool(self._sinks)

    @property
    def num_written(self) -> int:
        """How many rows all files have."""
        return min((self._next.get(sink.key, 0) for sink in self._sinks), default=0)

    def note_late(self, step: int, address: str) -> None:
        """A figure came for a row; warn once if a file has that row already."""
        if not self._said_late and any(self._next.get(sink.key, 0) > step for sink in self._sinks):
            self._said_late = True
            warn(f"{address} came after step {step} had been written to a file, which lacks it; add it before flush()")

    def find(self, key: object) -> Sink | None:
        """The sink of a key."""
        return next((sink for sink in self._sinks if sink.key == key), None)

    def attach(self, sink: Sink, rows: Sequence[Row]) -> None:
        """Write there too, beginning with these rows; OSError if that fails."""
        if all(known is not sink for known in self._sinks):
            self._sinks.append(sink)
        self.write(rows, raises=True)

    def write_due(self, rows: deque[Row], *, is_due: bool) -> None:
        """Write what has arrived, and begin to copy the rest if it is due.

        Args:
            rows: Those of the buffer, without a last one that may still grow; not empty.
            is_due: Whether an interval is over.
        """
        waiting = list(itertools.islice(rows, max(0, self.num_written - rows[0].step), None))
        for row in waiting if is_due else ():
            row.start_copy()
            row.was_read = True
        self.write(list(itertools.takewhile(Row.is_here, waiting)))

    def write(self, rows: Sequence[Row], *, raises: bool = False) -> None:
        """Give each sink the rows that it has not had; one that fails is let go of, with a warning or an error."""
        for sink in list(self._sinks):
            try:
                for row in rows:
                    if row.step >= self._next.get(sink.key, 0):
                        sink.write(row.step, row.values())
                        self._next[sink.key] = row.step + 1
            except Exception as err:  # a writer's failure must not end training
                self._sinks.remove(sink)
                reason = getattr(err, "strerror", None) or f"{type(err).__name__}: {err}"
                step = self._next.get(sink.key, 0)
                text = f"{sink}: step {step} could not be written ({reason}); records are no longer written there"
                if raises and isinstance(err, OSError):
                    raise OSError(err.errno, text) from err
                if raises:
                    raise
                warn(f"{text}. Mend that and attach it again: rows still in the buffer are written then")
