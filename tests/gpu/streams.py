"""Streams and events of the simulated device: one stream; an event is late when it is first asked."""

from __future__ import annotations

import time
from typing import Any, ClassVar

from gpu.log import SimulatedGpu


class Stream:
    """The only stream; everything on it is in order."""

    device_index, stream_id, cuda_stream = 0, 0, 0

    def __init__(self, *_: Any, **__: Any) -> None: ...

    def wait_event(self, event: Event) -> None:
        """Nothing to do."""

    def wait_stream(self, other: Stream) -> None:
        """Nothing to do."""

    def synchronize(self) -> None:
        """Wait for the device."""
        Event.log.wait("stream.synchronize", is_checked=False)

    def __enter__(self) -> Stream:
        return self

    def __exit__(self, *_: object) -> None: ...


class Event:
    """An event; the first query after it was recorded says that it has not happened."""

    log: ClassVar[SimulatedGpu]

    def __init__(self, *_: Any, **__: Any) -> None:
        self._queries = -1  # before it is recorded
        self._time = 0.0

    def record(self, stream: Stream | None = None) -> None:
        """Note the event: its first query finds it late."""
        self._queries = 0
        self._time = time.perf_counter()

    def wait(self, stream: Stream | None = None) -> None:
        """Nothing to do: the device would wait, not the host."""

    def query(self) -> bool:
        """Whether it has happened."""
        if self._queries >= 0:
            self._queries += 1
        return self._queries != 1

    def synchronize(self) -> None:
        """Wait for it, unless it is known to have happened; torch's debug mode lets this wait pass."""
        if self._queries in (0, 1):
            self.log.wait("event.synchronize", is_checked=False)
        self._queries = 2

    def elapsed_time(self, end: Event) -> float:
        """Milliseconds between the calls that recorded two events: the time of the host."""
        return 1e3 * (end._time - self._time)
