"""Log lines of acting clips."""

from __future__ import annotations

import logging
from collections import deque

from gradrewrite.monitoring.step_record import StepRecord

logger = logging.getLogger("gradrewrite.monitor")


class ClipLog:
    """Logs the clips that acted, step after step, when their figures have arrived."""

    def __init__(self, patience: int) -> None:
        self.patience = patience  # how many steps may wait for their figures before one is waited for
        self._waiting: deque[StepRecord] = deque()

    def on_step(self, record: StepRecord) -> None:
        """Queue a step, begin to copy its figures, and log the arrived steps."""
        if record.logs() and logger.isEnabledFor(logging.INFO):
            record.start_copy()
            self._waiting.append(record)
        self._flush(self.patience)

    def flush(self) -> None:
        """See ``_flush``; waits for all figures that are under way."""
        self._flush(0)

    def _flush(self, patience: int) -> None:
        while self._waiting and (len(self._waiting) > patience or self._waiting[0].is_here()):
            record = self._waiting.popleft()
            record.fetch()
            for graph in record.graphs:
                clips = [clip for clip in graph.outputs.clips if clip.report.logs]
                values = graph.values() | graph.bounds if clips else {}
                for clip in clips:
                    line = clip.on_host(values).line(clip.kind, clip.name)
                    if line is not None:
                        logger.info("%s", line)
