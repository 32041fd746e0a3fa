"""The files of one training: its records as JSON lines, its page, and the diagnosis of a failure."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

from gradrewrite._utils.warnings import warn
from gradrewrite.auditing.findings import Audit
from gradrewrite.diagnostics.health import Health
from gradrewrite.diagnostics.run_file import read_jsonl
from gradrewrite.diagnostics.run_log import Step
from gradrewrite.distributed.groups import this_rank
from gradrewrite.ir.joint_graph import JointGraph
from gradrewrite.monitoring.monitor import Monitor, recorder_of, steps_since
from gradrewrite.monitoring.writers import JsonLines, path_of_rank

_MOST_BYTES = 1 << 28  # of records that are judged at the end of a training: about half a minute


@dataclass(eq=False)
class RunFiles:
    """The files of one training in a folder; errors of writing are warned of, and training goes on."""

    folder: Path | None  # None: nothing is written
    monitor: Monitor
    is_resumed: bool = False
    sink: JsonLines | None = field(default=None, init=False)  # of the records; None before the first
    first_step: int = field(init=False)  # of the monitor that belongs to the training
    _is_open: bool = field(default=True, init=False)

    def __post_init__(self) -> None:
        self.first_step = recorder_of(self.monitor).num_steps

    def begin(self) -> None:
        """Begin the file of records, or append after a resume."""
        if self.sink is None and self._is_open and recorder_of(self.monitor).num_steps > self.first_step:
            self._is_open = self.folder is not None and _try(self.folder / "run.jsonl", self._begin)

    def _begin(self) -> None:
        assert self.folder is not None
        self.folder.mkdir(parents=True, exist_ok=True)
        path = Path(path_of_rank(self.folder / "run.jsonl"))
        if not self.is_resumed:
            self.diagnosis.unlink(missing_ok=True)
            if path.exists():
                os.replace(path, path_of_rank(self.folder / "run.previous.jsonl"))
        recorder = recorder_of(self.monitor)
        self.sink = JsonLines(path, partial(recorder.links.origin, {}))
        with recorder.lock:
            recorder.writers.attach(self.sink, (), first=self.first_step)

    @property
    def diagnosis(self) -> Path:
        """The path of this rank's diagnosis."""
        assert self.folder is not None
        return Path(path_of_rank(self.folder / "diagnosis.txt"))

    def write(self) -> None:
        """Write all steps on the host but the last, still incomplete one."""
        recorder = recorder_of(self.monitor)
        with recorder.lock:
            recorder.writers.write(list(recorder.records)[:-1])

    def end(self) -> None:
        """Write the last steps, and let go of the file."""
        self.begin()
        recorder = recorder_of(self.monitor)
        with recorder.lock:
            recorder.flush()
            if self.sink is not None:
                recorder.writers.detach(self.sink)

    def steps(self) -> Sequence[Step]:
        """Return the steps of the file, or else of the monitor.

        The monitor has the last ones alone; it is read where the file is gone, or above 256 MiB.
        """
        if self.sink is not None:
            recorder_of(self.monitor).flush()
            with contextlib.suppress(OSError, ValueError):
                if self.sink.path.stat().st_size <= _MOST_BYTES:
                    return read_jsonl(self.sink.path)
        return steps_since(self.monitor, self.first_step)

    def report(self, health: Health, title: str, graph: JointGraph | None, cause: str, audit: Audit | None) -> str:
        """Write the page; return its path, ``""`` on another rank than the first, or where it cannot be written."""
        if self.folder is None or this_rank():
            return ""

        def write() -> None:
            from gradrewrite import viz  # which loads matplotlib

            tables = "" if audit is None else audit._repr_html_()
            viz.Report(health, title, cause=cause, graph=graph, audit=tables).render(path.with_suffix(""))

        path = self.folder / "run.html"
        return str(path) if _try(path, write) else ""

    def diagnose(self, text: str) -> str:
        """Write the diagnosis; return its path, ``""`` where it cannot be written."""
        if self.folder is None:
            return ""
        written = _try(self.diagnosis, lambda: self.diagnosis.write_text(f"{text}\n", encoding="utf-8"))
        return str(self.diagnosis) if written else ""


def _try(path: Path, write: Callable[[], object]) -> bool:
    """Write a file; warn of any error, for training goes on."""
    try:
        write()
    except Exception as err:
        reason = getattr(err, "strerror", None) or f"{type(err).__name__}: {err}"
        warn(f"RewriteCallback: {path} could not be written ({reason}); training goes on without it")
        return False
    return True
