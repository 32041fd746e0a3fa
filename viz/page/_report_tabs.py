"""The tabs of a page that say how a run went: its report, and its curves."""

from __future__ import annotations

import html
import re
from collections.abc import Sequence
from importlib import resources

from gradrewrite._utils.formatting import html_table
from gradrewrite.diagnostics.health import Health
from gradrewrite.diagnostics.site_health import COLUMNS
from gradrewrite.viz._curves import figure_of, image_of
from gradrewrite.viz._panels import Panel

_MOST_CODE = 20  # lines beside the verdict; the table has all


def report_tabs(
    health: Health, panels: Sequence[Panel] = (), *, baseline: str = "", cause: str = "", note: str = ""
) -> str:
    """Return the elements of the tabs ``report`` and ``curves``.

    Args:
        health: What is said.
        panels: Curves, for readers without scripts.
        baseline: Name of the run that it is compared with.
        cause: What made the first non-finite value.
        note: What was found on each of several ranks.
    """
    verdict, steps = health.verdict, health.run.steps
    num_more = len(verdict.code) - _MOST_CODE
    code = [*verdict.code[:_MOST_CODE], *([f"# {num_more} more in the table"] if num_more > 0 else [])]
    span = f"Steps {steps[0].step} to {steps[-1].step}" if steps else "No steps"
    texts = {
        "subtitle": f"{span}{f', compared with {baseline}' if baseline else ''}.",
        "tone": "sound" if verdict.is_sound else "sick",
        "headline": verdict.headline,
        "sentence": verdict.text,
        "advice": verdict.advice,
        "code": "\n".join(code),
        "loss": health.loss,
        "first_bad": f"{health.first_bad_text} {cause}",
        "findings": "\n\n".join(text for text in (*verdict.remarks, health.findings_text, note) if text),
        "heat": "" if any(row.measure for row in health.sites) else "gone",
    }
    rows = [row.cells() for row in health.sites]
    kept = [n for n, name in enumerate(COLUMNS) if name != "share" or any(row[n] != "-" for row in rows)]
    table = [[row[n] for n in kept] for row in rows]
    groups = [row.family for row in health.sites]
    parts = {name: html.escape(text) for name, text in texts.items()}
    parts["table"] = html_table([COLUMNS[n] for n in kept], table, "all sites", groups)
    parts["image"] = image_of(figure_of(panels), f"loss and norm by step. {health.loss}") if panels else ""
    template = resources.files("gradrewrite.viz.page").joinpath("report.html").read_text(encoding="utf-8")
    return re.sub(r"\{\{(\w+)\}\}", lambda match: parts[match[1]], template)
