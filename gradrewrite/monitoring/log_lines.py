"""Log lines of clips that acted, warnings of checks that failed."""

from __future__ import annotations

import logging
from collections import deque

from gradrewrite._warnings import warn
from gradrewrite.diagnostics.root_cause import find_failure
from gradrewrite.ir.record_layout import LogLine
from gradrewrite.monitoring.step_record import Row

logger = logging.getLogger("gradrewrite.monitor")


class Voice:
    """Rows that have something to say; it is said in order, when their figures have arrived."""

    def __init__(self) -> None:
        """Begin silent."""
        self._to_log: deque[Row] = deque()
        self._to_warn: deque[tuple[Row, tuple[str, ...]]] = deque()

    def add(self, row: Row, *, is_guarded: bool) -> None:
        """Take a row, and begin to copy it, if it may have something to say.

        Without a guard nobody would hear of a check that skips: it then warns.
        """
        if logger.isEnabledFor(logging.INFO) and row.has(lambda carried: bool(carried.logs)):
            row.start_copy()
            self._to_log.append(row)
        modes = ("warn",) if is_guarded else ("warn", "skip")
        if row.has(lambda carried: any(c.on_failure in modes for c in carried.checks)):
            row.start_copy()
            self._to_warn.append((row, modes))

    def log(self, patience: int = 0) -> None:
        """Log the clips that acted; waits for rows beyond ``patience``."""
        while self._to_log and (len(self._to_log) > patience or self._to_log[0].is_here()):
            row = self._to_log.popleft()
            row.fetch()
            for run in row.runs:
                values = run.values() if run.carried.logs else {}
                for line in run.carried.logs:
                    if values[line.clipped] > 0:
                        _log(line, values)

    def warn(self, patience: int = 0) -> None:
        """Warn of checks that failed; waits for rows beyond ``patience``."""
        while self._to_warn and (len(self._to_warn) > patience or self._to_warn[0][0].is_here()):
            row, modes = self._to_warn.popleft()
            row.fetch()
            error = find_failure(row.step, row.checked_runs(), ("warn",), replays=False)
            if error is not None:
                warn(str(error))
            unheard = None if error is not None else find_failure(row.step, row.checked_runs(), modes, replays=False)
            if unheard is not None:
                warn(f"{unheard}; CheckFinite('skip') skips nothing without gr.guard(optimizer, model)")


def _log(line: LogLine, values: dict[str, float]) -> None:
    largest, mean = values[line.max_abs], values[line.mean_abs]
    if line.site.kind == "gradient":
        logger.info("parameter=%s need clipping, max grad=%.6g avg grad=%.6g", line.site.name, largest, mean)
    else:
        logger.info("layer=%s need clipping, max error=%.6g avg error=%.6g", line.site.name, largest, mean)
