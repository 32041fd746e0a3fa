"""The report and the curves of a run, as tabs of a page."""

from __future__ import annotations

import html
import math
import re
from collections.abc import Sequence
from dataclasses import replace
from importlib import resources

from gradrewrite._utils.html_tables import html_table
from gradrewrite.diagnostics.causes import Cause, traits_of
from gradrewrite.diagnostics.clipping import MIN_CLIP_STEPS
from gradrewrite.diagnostics.health import Health
from gradrewrite.diagnostics.run_log import Run
from gradrewrite.diagnostics.site_health import COLUMNS
from gradrewrite.viz._curves import figure_of, image_of
from gradrewrite.viz._panels import Panel

_MOST_SKIPS = 5  # skipped updates that were asked about
_MOST_CODE = 20  # lines beside the verdict; the table has all
_AUDIT = """
<section id="audit" aria-labelledby="s-audit"><h2 id="s-audit">Who is trained</h2>
<div class="scroll" role="region" aria-label="audit of the training step" tabindex="0">{}</div></section>"""


def report_tabs(
    health: Health,
    panels: Sequence[Panel] = (),
    *,
    baseline: str = "",
    cause: str = "",
    note: str = "",
    audit: str = "",
    trials: Sequence[str] = (),
) -> str:
    """Return the elements of the tabs ``report`` and ``curves``.

    Args:
        health: What is said.
        panels: Curves, for readers without scripts.
        baseline: Name of the run that it is compared with.
        cause: What made the first non-finite value.
        note: What was found on each of several ranks.
        audit: Tables of the parameters that are not trained, as HTML.
        trials: A line on each training from one start.
    """
    verdict, steps = health.verdict, health.run.steps
    first = verdict.causes[0] if verdict.causes else None
    num_more = len(verdict.code) - _MOST_CODE
    code = [*verdict.code[:_MOST_CODE], *([f"# {num_more} more in the table"] if num_more > 0 else [])]
    skips = [step.culprits for step in steps if step.culprits][-_MOST_SKIPS:]
    run = health.run
    span = [run.span(steps[0].step, steps[-1].step).capitalize() if steps else "No steps", *run.resumed_text]
    span += [f"the last of {run.num_before + 1} runs in the file"] * (run.num_before > 0)
    span += [f"compared with {baseline}"] * bool(baseline)
    texts = {
        "subtitle": f"{', '.join(span)}.",
        "tone": "sound" if verdict.is_sound else "sick",
        "headline": verdict.headline,
        "sentence": verdict.text,
        "advice": verdict.advice,
        "code": "\n".join(code),
        "loss": health.loss,
        "first_bad": f"{health.first_bad_text} {cause}",
        "spread": "NaN and infinities spread through all later computation: the first one "
        f"{'follows from' if first is not None and traits_of(first.kind).overflows else 'is'} the cause.",
        "findings": "\n\n".join(text for text in (*verdict.remarks, health.findings_text, *skips, note) if text),
        "origin": _origin_text(run),
        "trials": "\n".join(trials),
        "has_trials": "" if trials else "gone",
        "has_origin": "" if run.origin else "gone",
        "heat": "" if any(row.measure for row in health.sites) else "gone",
    }
    sites = [
        replace(row, suggestion=math.nan, keep=row.steps >= MIN_CLIP_STEPS) if verdict.is_sound and row.action else row
        for row in health.sites
    ]
    rows = [row.cells() for row in sites]
    kept = [n for n, name in enumerate(COLUMNS) if name != "share" or any(row[n] != "-" for row in rows)]
    table = [[row[n] for n in kept] for row in rows]
    groups = [row.family for row in health.sites]
    parts = {name: html.escape(text) for name, text in texts.items()}
    parts["table"] = html_table([COLUMNS[n] for n in kept], table, "all sites", groups)
    parts["audit"] = _AUDIT.format(audit) if audit else ""
    parts["where"] = _where(first, run) if first is not None and first.site else ""
    parts["image"] = image_of(figure_of(panels, run), f"loss and norm by step. {health.loss}") if panels else ""
    template = resources.files("gradrewrite.viz.page").joinpath("report.html").read_text(encoding="utf-8")
    return re.sub(r"\{\{(\w+)\}\}", lambda match: parts[match[1]], template)


def _origin_text(run: Run) -> str:
    """Return version, policy and configuration of a run; ``""`` where they are not known."""
    if run.origin is None:
        return ""
    config = [f"config   {name} = {value!r}" for name, value in run.origin.config.items()]
    rules = [f"policy   {rule}" for rule in run.origin.policy]
    return "\n".join([f"version  gradrewrite {run.origin.version}", *rules, *config])


def _where(cause: Cause, run: Run) -> str:
    """Return the site of a cause as a button that leads to its box, with its step and its line of code."""
    site, step = html.escape(cause.site), max(cause.step, 0)
    source = f" <code>{html.escape(cause.source)}</code>" if cause.source else ""
    button = f'<button type="button" data-site="{site}" data-step="{step}">{site}</button>'
    return f'<p id="where"><strong>Where:</strong> {button} in {run.place(step)}{source}</p>'
