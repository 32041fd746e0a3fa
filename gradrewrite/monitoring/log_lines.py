"""Log lines of acting clips."""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Mapping

from gradrewrite.ir.record_key import RecordKey
from gradrewrite.ir.record_layout import LogLine, NormClip
from gradrewrite.monitoring.step_record import StepRecord

logger = logging.getLogger("gradrewrite.monitor")


class ClipLog:
    """Logs the clips that acted, step after step, when their figures have arrived.

    Attributes:
        patience: How many steps may wait for their figures before one is waited for.
    """

    def __init__(self, patience: int) -> None:
        self.patience = patience
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
        """Log the clips that acted; waits for the figures of steps beyond ``patience``."""
        while self._waiting and (len(self._waiting) > patience or self._waiting[0].is_here()):
            record = self._waiting.popleft()
            record.fetch()
            for graph in record.graphs:
                outputs = graph.outputs
                values = graph.values() | graph.bounds if outputs.logs or outputs.group_logs else {}
                for line in outputs.logs:
                    if values[line.clipped] > 0:
                        _log(line, values)
                for clip in outputs.group_logs:
                    if clip.strength(values) != 1.0:
                        _log_group(clip, values)


def _log(line: LogLine, values: Mapping[RecordKey, float]) -> None:
    largest, mean = values[line.max_abs], values[line.mean_abs]
    if line.site.kind in ("gradient", "step"):
        logger.info("parameter=%s need clipping, max grad=%.6g avg grad=%.6g", line.site.name, largest, mean)
    else:
        logger.info("layer=%s need clipping, max error=%.6g avg error=%.6g", line.site.name, largest, mean)


def _log_group(clip: NormClip, values: Mapping[RecordKey, float]) -> None:
    """Log one line for all members of a group."""
    name = clip.norm.site.partition("group:")[2]
    text = "group=%s need clipping, total norm=%.6g max norm=%.6g"
    logger.info(text, name, values[clip.norm], values[clip.bound])
