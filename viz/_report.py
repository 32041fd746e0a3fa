"""``report``: the health of a training run as one page, offline and printable."""

from __future__ import annotations

import html
import os
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from importlib import resources
from pathlib import Path
from typing import TYPE_CHECKING, cast

from gradrewrite._utils.formatting import html_table
from gradrewrite.diagnostics.health import Health, examine
from gradrewrite.diagnostics.ranks import diagnose_ranks, first_bad_of, read_ranks
from gradrewrite.diagnostics.site_health import COLUMNS
from gradrewrite.viz._curves import Curves, baseline_of, image_of, is_monitor, name_of, steps_of, trials_of
from gradrewrite.viz._fonts import xml_safe
from gradrewrite.viz._panels import Baseline
from gradrewrite.viz._theme import css_variables

if TYPE_CHECKING:
    from gradrewrite.viz._curves import Source

_NO_SCRIPT = "default-src 'none'; style-src 'unsafe-inline'; img-src data:"
_RELOAD = """<script>setTimeout(() => location.reload(), {milliseconds})</script>
<noscript><meta http-equiv="refresh" content="{seconds}"></noscript>"""
_MOST_CODE = 20  # lines beside the verdict; the table has all


@dataclass(frozen=True, eq=False, slots=True)
class Report:
    """A health report, as ``report`` returns it.

    Attributes:
        health: What it says.
        title: Title of the page.
        baseline: The run that it is compared with, if any.
        cause: What made the first non-finite value, where the monitor could still replay it; of several ranks, which
            had it.
        note: What was found on each of several ranks.
        trials: Losses by step of trainings from one start, by name.
    """

    health: Health
    title: str
    baseline: Baseline | None = None
    cause: str = ""
    note: str = ""
    trials: Mapping[str, Sequence[float]] = field(default_factory=dict)

    def __repr__(self) -> str:
        return f"Report({self.title!r}: {self.health.verdict.headline})"

    def render(self, path: str | os.PathLike[str], *, reload: int = 0) -> str:
        """Write ``path.html``; who opens it sees the old page or the new one, never a part.

        Args:
            path: Where, without the extension.
            reload: After how many seconds the open page reads the file again and keeps its place; 0 for never.

        Returns:
            The path of the file.

        Raises:
            OSError: The file cannot be written; its folder must exist.
        """
        written = f"{os.fspath(path)}.html"
        Path(f"{written}.part").write_text(self._html(reload), encoding="utf-8")
        os.replace(f"{written}.part", written)
        return written

    def _repr_html_(self) -> str:
        page = html.escape(self._html(0))
        return f'<iframe title="health report" srcdoc="{page}" style="width: 100%; height: 640px; border: 0"></iframe>'

    def _html(self, reload: int) -> str:
        health, verdict, steps = self.health, self.health.verdict, self.health.run.steps
        num_more = len(verdict.code) - _MOST_CODE
        code = [*verdict.code[:_MOST_CODE], *([f"# {num_more} more in the table"] if num_more > 0 else [])]
        span = f"Steps {steps[0].step} to {steps[-1].step}" if steps else "No steps"
        texts = {
            "title": self.title,
            "subtitle": f"{span}{f', compared with {self.baseline.name}' if self.baseline else ''}.",
            "tone": "sound" if verdict.is_sound else "sick",
            "headline": verdict.headline,
            "sentence": verdict.text,
            "advice": verdict.advice,
            "code": "\n".join(code),
            "loss": health.loss,
            "first_bad": f"{health.first_bad_text} {self.cause}",
            "findings": "\n\n".join(text for text in (*verdict.remarks, health.findings_text, self.note) if text),
        }
        rows = [row.cells() for row in health.sites]
        kept = [n for n, name in enumerate(COLUMNS) if name != "share" or any(row[n] != "-" for row in rows)]
        table = [[row[n] for n in kept] for row in rows]
        parts = {
            "policy": _NO_SCRIPT + ("; script-src 'unsafe-inline'" if reload else ""),
            "reload": _RELOAD.format(milliseconds=1000 * reload, seconds=reload) if reload else "",
            "style": css_variables(),
            "curves": image_of(
                Curves(health.run, "", baseline=self.baseline).figure(), f"loss and norm by step. {health.loss}"
            ),
            "trials": image_of(trials_of(self.trials), "losses of the trials by step") if self.trials else "",
            "table": html_table([COLUMNS[n] for n in kept], table, "all sites"),
        }
        parts |= {name: html.escape(text) for name, text in texts.items()}
        template = resources.files("gradrewrite.viz.page").joinpath("report.html").read_text(encoding="utf-8")
        return xml_safe(re.sub(r"\{\{(\w+)\}\}", lambda match: parts[match[1]], template))


def report(
    source: Source | Sequence[str | os.PathLike[str]], *, baseline: Source | None = None, title: str = ""
) -> Report:
    """Return the health report of a training run as a page.

    It says what was clipped, how strongly, what is wrong, and what to change. The page has the verdict in one sentence,
    loss and norm against the baseline, a table of the sites with the factors of their clips, quantiles of their norms
    and the bounds these suggest, the first value that was not finite, and the doctor's findings. It loads nothing.

    Args:
        source: A monitor (which waits for the device), the path of a file that ``monitor.to_jsonl`` wrote, steps, or
            the paths of the files of all ranks of one run: the page is then that of the rank with the first value
            that is not finite, or else of the first that is not healthy, and lists what was found on the others.
        baseline: Another run in any of these forms, such as the same training without clipping.
        title: Title of the page; the name of the file, or "training run", if empty.

    Returns:
        Report: ``render`` it into a file, or show it in a notebook.

    Raises:
        TypeError: ``source`` or ``baseline`` is none of these.
        OSError: A file cannot be read.
        ValueError: A file has a line that is none of the monitor's.

    Example:
        >>> from gradrewrite import Step
        >>> steps = [Step(n, {"norm@gradient:w": 1.0, "bound@gradient:w": 2.0}) for n in range(20)]
        >>> report(steps).health.verdict.headline
        'Healthy'
    """
    if isinstance(source, Sequence) and not isinstance(source, str):
        paths = [item for item in source if isinstance(item, str | os.PathLike)]
        if paths:
            return _report_of_ranks(paths, baseline, title)
    run = cast("Source", source)
    steps, other = steps_of(run), baseline_of(baseline)
    health = examine(steps, other.run.steps if other is not None else None)
    return Report(health, title or name_of(run, "training run"), other, _cause(run, health))


def _report_of_ranks(paths: Sequence[str | os.PathLike[str]], baseline: Source | None, title: str) -> Report:
    """Judge a run of several ranks: the page is that of the rank where it goes wrong first, or worst."""
    runs = read_ranks(paths)
    first = first_bad_of(runs)
    other = baseline_of(baseline)
    compared = None if other is None else other.run.steps
    rank = first.rank if first is not None else None
    if rank is None:
        rank = next((r for r, steps in runs.items() if not examine(steps, compared).verdict.is_sound), min(runs))
    found = "\n".join(finding.text for finding in diagnose_ranks(runs)) or "Nothing wrong was found on any rank."
    note = f"Ranks {', '.join(map(str, runs))}:\n{found}"
    name = f"{title or name_of(paths[0], 'training run')}: rank {rank} of {len(runs)} ranks"
    return Report(examine(runs[rank], compared), name, other, "" if first is None else str(first), note)


def _cause(source: Source, health: Health) -> str:
    """Return the root cause of a failure that a monitor can still replay: one of the last step."""
    if health.first_bad is None or health.first_bad[1] < health.run.steps[-1].step or not is_monitor(source):
        return ""
    failure = source.failure(anywhere=True)
    return "" if failure is None else str(failure)
