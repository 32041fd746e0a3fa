"""``report``: the health of a training run as one page, offline and printable."""

from __future__ import annotations

import html
import math
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, cast

from gradrewrite._utils.files import written_whole
from gradrewrite.diagnostics.health import Health, examine
from gradrewrite.diagnostics.judge import Evidence
from gradrewrite.diagnostics.ranks import examine_ranks, first_bad_of, read_ranks
from gradrewrite.diagnostics.trials import lines_of
from gradrewrite.diagnostics.used_gradients import checked_clip
from gradrewrite.ir.joint_graph import JointGraph
from gradrewrite.viz._curves import baselines_of, is_monitor, name_of, steps_of
from gradrewrite.viz._draw import draw, evidence_of
from gradrewrite.viz._panels import Baseline, panels_of, trials_of
from gradrewrite.viz.page._html import write_page
from gradrewrite.viz.page._report_tabs import report_tabs

if TYPE_CHECKING:
    from gradrewrite.viz._curves import Source

_RELOAD = """<script>setTimeout(() => location.reload(), {milliseconds})</script>
<noscript><meta http-equiv="refresh" content="{seconds}"></noscript>"""


@dataclass(frozen=True, eq=False, slots=True)
class Report:
    """A health report, as ``report`` returns it.

    Attributes:
        health: What it says.
        title: Title of the page.
        baselines: The runs that it is drawn with; it is compared with the first.
        cause: What made the first non-finite value, where the monitor could still replay it; of several ranks, which
            had it.
        note: What was found on each of several ranks.
        trials: Losses by step of trainings from one start, by name.
        graph: The graph that was trained, for further tabs.
        audit: Tables of an audit of the training step, as HTML.
    """

    health: Health
    title: str
    baselines: tuple[Baseline, ...] = ()
    cause: str = ""
    note: str = ""
    trials: Mapping[str, Sequence[float]] = field(default_factory=dict)
    graph: JointGraph | None = None
    audit: str = ""

    def __repr__(self) -> str:
        return f"Report({self.title!r}: {self.health.verdict.headline})"

    def render(self, path: str | os.PathLike[str], *, reload: int = 0) -> str:
        """Write ``path.html``; who opens it sees the old page or the new one, never a part.

        Args:
            path: Where; folder and extension are added where they are missing.
            reload: After how many seconds the open page reads the file again and keeps its place; 0 for never.

        Returns:
            The path of the file.

        Raises:
            OSError: The file cannot be written.
        """
        written = f"{os.fspath(path).removesuffix('.html')}.html"
        with written_whole(written) as part:
            part.write_text(self._html(reload), encoding="utf-8")
        return written

    def _repr_html_(self) -> str:
        page = html.escape(self._html(0))
        return f'<iframe title="health report" srcdoc="{page}" style="width: 100%; height: 640px; border: 0"></iframe>'

    def _html(self, reload: int) -> str:
        run = self.health.run
        panels = [*([trials_of(self.trials)] if self.trials else []), *panels_of(run, self.baselines)]
        name = self.baselines[0].name if self.baselines else ""
        texts = {"cause": self.cause, "note": self.note, "audit": self.audit}
        tabs = report_tabs(self.health, panels, baseline=name, **texts, trials=lines_of(self.trials))
        return write_page(
            self.title,
            run=run,
            panels=panels,
            report=tabs,
            graph=draw(self.graph, monitor=run.steps or None).graph_tabs if self.graph is not None else None,
            reload=_RELOAD.format(milliseconds=1000 * reload, seconds=reload) if reload else "",
            is_report_first=True,
        )


def report(
    source: Source | Sequence[str | os.PathLike[str]],
    *,
    baseline: Source | Mapping[str, Source] | None = None,
    title: str = "",
    graph: JointGraph | None = None,
    clip: float | None = None,
) -> Report:
    """Return the health report of a training run as a page.

    It says what was clipped, how strongly, what is wrong, and what to change. The page has the verdict in one sentence,
    the first value that was not finite, the doctor's findings, and a table of the sites with the factors of their
    clips, quantiles of their norms and the bounds these suggest; curves and a heat map of all sites; and the graph. It
    loads nothing.

    Args:
        source: A monitor (which waits for the device), the path of a file that ``monitor.to_jsonl`` wrote, steps, or
            the paths of the files of all ranks of one run: the page is then that of the rank with the first value
            that is not finite, or else of the first that is not healthy, and lists what was found on the others.
        baseline: Another run in any of these forms, such as the same training without clipping; or several by their
            names: all are drawn, and the first is the one that is compared with.
        title: Title of the page; the name of the file, or "training run", if empty.
        graph: What ``model.trace(...)`` returned, to have ``draw``'s views of it as tabs.
        clip: The global norm to which the training clips by itself, to compare it with what updates used; see
            ``Monitor.diagnose``.

    Returns:
        Report: ``render`` it into a file, or show it in a notebook.

    Raises:
        TypeError: ``source`` or ``baseline`` is none of these.
        OSError: A file cannot be read.
        ValueError: A file has a line that is none of the monitor's, or ``clip`` is no number > 0.

    Example:
        >>> from gradrewrite import Step
        >>> steps = [Step(n, {"norm@gradient:w": 1.0, "bound@gradient:w": 2.0}) for n in range(20)]
        >>> report(steps).health.verdict.headline
        'Healthy'
    """
    bound = math.nan if clip is None else checked_clip(clip, "viz.report")
    if isinstance(source, Sequence) and not isinstance(source, str):
        paths = [item for item in source if isinstance(item, str | os.PathLike)]
        if paths:
            return _report_of_ranks(paths, baselines_of(baseline), title, graph, Evidence(clip=bound))
    run = cast("Source", source)
    others = baselines_of(baseline)
    steps = run.steps(explain=True) if is_monitor(run) else steps_of(run)
    evidence = replace(evidence_of(graph) if graph is not None else Evidence(), clip=bound)
    health = examine(steps, others[0].run.steps if others else None, evidence)
    return Report(health, title or name_of(run, "training run"), others, _cause(run, health), graph=graph)


def _report_of_ranks(
    paths: Sequence[str | os.PathLike[str]],
    others: tuple[Baseline, ...],
    title: str,
    graph: JointGraph | None,
    evidence: Evidence,
) -> Report:
    """Judge a run of several ranks: the page is that of the rank where it goes wrong first, or worst."""
    runs = read_ranks(paths)
    first, compared = first_bad_of(runs), others[0].run.steps if others else None
    by_rank = {rank: examine(steps, compared, evidence) for rank, steps in runs.items()}
    sick = [rank for rank, health in by_rank.items() if not health.verdict.is_sound]
    rank = first.rank if first is not None else next(iter(sick), min(runs))
    found = (
        "\n".join(finding.text for finding in examine_ranks(runs, evidence).faults)
        or "Nothing wrong was found on any rank."
    )
    note = f"Ranks {', '.join(map(str, runs))}:\n{found}"
    name = f"{title or name_of(paths[0], 'training run')}: rank {rank} of {len(runs)} ranks"
    cause = "" if first is None else str(first)
    return Report(by_rank[rank], name, others, cause, note, graph=graph)


def _cause(source: Source, health: Health) -> str:
    """Return the root cause of the first step that is not finite, if a monitor has replayed it."""
    if health.first_bad is None or not is_monitor(source):
        return ""
    from gradrewrite.monitoring.monitor import recorder_of  # there is a monitor: its modules are imported

    records = (record for record in recorder_of(source).records if record.step == health.first_bad[1])
    failure = next((record.failure for record in records), None)
    return "" if failure is None else str(failure)
