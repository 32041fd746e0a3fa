"""Failed finite checks: their errors and warnings."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Collection

from gradrewrite._utils.warnings import warn
from gradrewrite.errors import NonFiniteError
from gradrewrite.ir.reports import OnFailure
from gradrewrite.monitoring.step_record import StepRecord
from gradrewrite.replay.root_cause import analyse, analyse_checks

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
    failed = tuple(tuple(check.key for check in graph.failed(modes)) for graph in graphs)
    if failed not in record.failures:
        is_backward = any(check.site.kind != "step" for graph in graphs for check in graph.failed(modes))
        record.failures[failed] = (analyse if is_backward else analyse_checks)(record.step, graphs, modes)
    return record.failures[failed].error(reason)


class FailedCheckErrors:
    """Errors of failed checks with ``on_failure="raise"``."""

    def on_step(self, record: StepRecord) -> None:
        """Raise NonFiniteError if such a check failed; waits for the device where there is one."""
        if record.is_checked(_RAISE):
            error = failure_of(record, _RAISE)
            if error is not None:
                raise error

    def flush(self) -> None:
        """Nothing waits here."""


class FailedCheckWarnings:
    """Warns of checks that failed, step after step, when their figures have arrived."""

    def __init__(self, patience: int, is_guarded: Callable[[], bool]) -> None:
        self.patience = patience  # how many steps may wait for their figures before one is waited for
        self.is_guarded = is_guarded  # tells whether somebody hears of checks that skip; if nobody does, they warn
        self._waiting: deque[tuple[StepRecord, tuple[OnFailure, ...]]] = deque()

    def on_step(self, record: StepRecord) -> None:
        """Warn of the steps before; take a step and begin to copy its figures."""
        if self._waiting:
            self._flush(self.patience)
        modes = _WARN if self.is_guarded() else _UNHEARD
        if record.is_checked(modes):
            record.start_copy()
            self._waiting.append((record, modes))

    def flush(self) -> None:
        """Warn of all checks that failed; waits for the figures that are under way."""
        self._flush(0)

    def _flush(self, patience: int) -> None:
        while self._waiting and (len(self._waiting) > patience or self._waiting[0][0].is_here()):
            record, modes = self._waiting.popleft()
            record.fetch()
            if record.has_failed(_WARN):
                warn(str(analyse_checks(record.step, record.checked_graphs(), _WARN).error()))
            elif record.has_failed(modes):
                unheard = analyse_checks(record.step, record.checked_graphs(), modes).error()
                warn(f"{unheard}; CheckFinite('skip') skips nothing without gr.guard(optimizer, model)")
