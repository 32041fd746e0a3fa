"""Messages of steps: log lines of clips, errors and warnings of failed checks."""

from __future__ import annotations

import copy
import logging
from collections import deque
from collections.abc import Callable, Collection, Iterator

from gradrewrite._utils.warnings import warn
from gradrewrite.errors import NonFiniteError
from gradrewrite.ir.reports import OnFailure
from gradrewrite.monitoring.step_record import StepRecord
from gradrewrite.replay.root_cause import analyse, analyse_checks

logger = logging.getLogger("gradrewrite.monitor")

_Waiting = deque[tuple[StepRecord, tuple[OnFailure, ...]]]
_NOT_SHOWN = (
    "log=True reports the clips that act at level INFO, which is not shown: logging.basicConfig(), then "
    'logging.getLogger("gradrewrite").setLevel(logging.INFO)'
)
_RAISE: tuple[OnFailure, ...] = ("raise",)
_WARN: tuple[OnFailure, ...] = ("warn",)
_UNHEARD: tuple[OnFailure, ...] = ("warn", "skip")


def failure_of(record: StepRecord, modes: Collection[OnFailure], *, reason: str = "") -> NonFiniteError | None:
    """Return the error for a step, by a replay if possible; None if no check of these modes failed.

    A step is analyzed once. ``reason`` says why the error is raised, if not for the failed check alone.
    """
    record.fetch()
    if not record.has_failed(modes):
        return None
    graphs = record.checked_graphs()
    failed = tuple(tuple(check.report.count for check in graph.failed(modes)) for graph in graphs)
    if failed not in record.failures:
        is_backward = any(not check.site.traits.at_guard for graph in graphs for check in graph.failed(modes))
        found = (analyse if is_backward else analyse_checks)(record.step, graphs, modes)
        record.failures[failed] = numbered(found, record)
        record.failure = record.failure or found
    error = copy.copy(record.failures[failed])  # each is raised once: it collects tracebacks
    error.note = "; ".join(part for part in (reason, error.note) if part)
    return error


def numbered(error: NonFiniteError, record: StepRecord) -> NonFiniteError:
    """Return an error with the numbers of a step."""
    error.update = record.update
    error.micro_batch = record.micro_batch if record.is_accumulated else None
    return error


def raise_failed(record: StepRecord) -> None:
    """Raise NonFiniteError if a check that raises failed; waits for the device where there is one."""
    error = failure_of(record, _RAISE) if record.is_checked(_RAISE) else None
    if error is not None:
        raise error


class StepMessages:
    """Log lines of acting clips and warnings of failed checks, step after step, when their figures have arrived."""

    def __init__(self, patience: int, is_guarded: Callable[[], bool]) -> None:
        self._patience = patience  # how many steps may wait for their figures before one is waited for
        self._is_guarded = is_guarded  # tells whether somebody hears of checks that skip; if nobody does, they warn
        self._checked: _Waiting = deque()
        self._logged: _Waiting = deque()
        self._has_said = False  # that log lines are not shown

    def on_step(self, record: StepRecord) -> None:
        """Warn of the steps before; take a step, begin to copy its figures, and log the arrived steps."""
        self._warn(self._patience)
        modes = _WARN if self._is_guarded() else _UNHEARD
        if record.is_checked(modes):
            record.start_copy()
            self._checked.append((record, modes))
        if any([graph.outputs.logs for graph in record.graphs]):
            if logger.isEnabledFor(logging.INFO):
                record.start_copy()
                self._logged.append((record, ()))
            self._say_how_logs_show()
        self._log(self._patience)

    def _say_how_logs_show(self) -> None:
        """Log once, at WARNING, that log lines at INFO are not shown."""
        is_shown = logger.isEnabledFor(logging.INFO) and logger.hasHandlers()
        if not is_shown and not self._has_said:
            self._has_said = True
            logger.warning("%s", _NOT_SHOWN)

    def flush(self) -> None:
        """Log and warn of all steps; waits for the figures that are under way."""
        self._log(0)
        self._warn(0)

    def _log(self, patience: int) -> None:
        for record, _ in _arrived(self._logged, patience):
            for graph in record.graphs:
                clips = [clip for clip in graph.outputs.clips if clip.report.logs]
                values = graph.values() | graph.bounds if clips else {}
                for clip in clips:
                    line = clip.on_host(values).line(clip.kind, clip.name)
                    if line is not None:
                        logger.info("%s", line)

    def _warn(self, patience: int) -> None:
        for record, modes in _arrived(self._checked, patience):
            if record.has_failed(_WARN):
                warn(str(numbered(analyse_checks(record.step, record.checked_graphs(), _WARN), record)))
            elif record.has_failed(modes):
                unheard = numbered(analyse_checks(record.step, record.checked_graphs(), modes), record)
                warn(f"{unheard}; CheckFinite('skip') skips nothing without gr.guard(optimizer, model)")


def _arrived(waiting: _Waiting, patience: int) -> Iterator[tuple[StepRecord, tuple[OnFailure, ...]]]:
    while waiting and (len(waiting) > patience or waiting[0][0].is_here()):
        record, modes = waiting.popleft()
        record.fetch()
        yield record, modes
