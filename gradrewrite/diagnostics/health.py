"""The health of a training run: the contents of a health report."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

from gradrewrite.diagnostics.comparison import Loss, compare_runs, loss_of, loss_text
from gradrewrite.diagnostics.doctor import diagnose, report
from gradrewrite.diagnostics.judge import Evidence
from gradrewrite.diagnostics.nonfinite_steps import bad_steps
from gradrewrite.diagnostics.run_log import COUNTS, Finding, Run, Step, last_run, words
from gradrewrite.diagnostics.site_health import SiteHealth, sites_of, where_needed, with_baseline
from gradrewrite.diagnostics.verdict import Verdict, judge


@dataclass(frozen=True, slots=True)
class Health:
    """Content of a health report."""

    run: Run
    verdict: Verdict
    # Figures of all sites with a clip or a magnitude, from the output of the model to its input, kind by kind.
    sites: tuple[SiteHealth, ...]
    # What the doctor found, the gravest first; without advice on bounds that the verdict contradicts.
    findings: tuple[Finding, ...]
    # Site, step and number of elements (NaN if not counted) of the first value that is not finite; of the loss the text
    # of its key instead of a site; None if all were finite.
    first_bad: tuple[str, int, float] | None
    loss: str  # one or two sentences on the loss, compared with that of the baseline if there is one
    baseline_bad: tuple[str, int, float] | None = None  # as ``first_bad``, of the baseline; None without one

    @property
    def strongest(self) -> str:
        """The site with the smallest median factor, as text."""
        rows = [row for row in self.sites if row.median_factor >= 0]
        if not rows:
            return "no factor is known"
        least = min(rows, key=lambda row: (row.median_factor, row.worst_factor))
        return (
            f"strongest at {least.site}, median factor {words(least.median_factor)}, worst {words(least.worst_factor)}"
        )

    @property
    def first_bad_text(self) -> str:
        """Text of the first non-finite value."""
        text = "Every recorded value of this run was finite."
        if self.first_bad is not None:
            site, step, count = self.first_bad
            text = f"First at {site} in step {step}{'' if math.isnan(count) else f', {count:.0f} elements'}."
        if self.baseline_bad is None:
            return text
        site, step, _ = self.baseline_bad
        return f"{text} In the baseline, the first value that was not finite is at {site}, in step {step}."

    @property
    def findings_text(self) -> str:
        """Findings of the doctor beyond the verdict, as plain text of several lines."""
        basis = f"The verdict rests on {self.verdict.basis}." if self.verdict.basis else ""
        if basis and not self.findings:
            return f"{basis}\nThe rules found nothing else."
        never = [one for one in self.findings if one.kind == "clip never acts" and self.verdict.is_sound]
        text = report([one for one in self.findings if one not in never], self.run.steps)
        if never:
            of = never[0].site if len(never) == 1 else f"{never[0].site} and {len(never) - 1} more"
            text += f"\n\nNo problem: the clip at {of} never acted, for all sizes stayed below the bound."
        return f"{basis}\n\n{text}" if basis else text


def examine(steps: Sequence[Step], baseline: Sequence[Step] | None = None, evidence: Evidence | None = None) -> Health:
    """Judge a run, or the last of several, against such as the same training without clipping."""
    run, findings = last_run(steps), diagnose(steps)
    sites, loss = sites_of(run), loss_of(run)
    compared = None if baseline is None else last_run(baseline)
    other = None if compared is None else loss_of(compared)
    if compared is not None and (other is None or math.isfinite(other.last)):
        sites = with_baseline(sites, compared)
        findings = tuple(_with_bound(one, sites) for one in findings)
    verdict = judge(run, sites, findings, loss, other, evidence)
    sites = where_needed(sites)
    if not verdict.is_sound and verdict.kind != "clip acts always":  # a higher bound is no remedy
        sites = tuple(replace(row, suggestion=math.nan, from_baseline=False, keep=False) for row in sites)
        hidden = [one for one in findings if one.kind == "clip never acts"]
        hidden += [one for one in findings if (one.kind, one.site) == ("clip acts always", verdict.site)]
        findings = tuple(one for one in findings if one not in hidden)
    if not verdict.is_sound:
        sites = tuple(replace(row, mark=verdict.mark) if row.site == verdict.site else row for row in sites)
    text = loss_text(loss) if compared is None else compare_runs(run, compared)
    baseline_bad = None if compared is None else _first_bad(compared, other)
    return Health(run, verdict, sites, findings, _first_bad(run, loss), text, baseline_bad)


def _first_bad(run: Run, loss: Loss | None) -> tuple[str, int, float] | None:
    """Return the first value that is not finite, the loss where that was so in an earlier step than any site."""
    bad = _first_non_finite(run)
    is_loss = loss is not None and loss.bad_step >= 0 and (bad is None or loss.bad_step < bad[1])
    return (loss.address, loss.bad_step, math.nan) if loss is not None and is_loss else bad


def _with_bound(finding: Finding, sites: Sequence[SiteHealth]) -> Finding:
    if finding.kind != "clip acts always":
        return finding
    row = next((row for row in sites if row.from_baseline and row.key == finding.key), None)
    if row is None:
        return finding
    text = f"Raise the threshold to about {words(row.suggestion)}, which 90 % of the values of the baseline stay below."
    return replace(finding, suggestion=text)


def _first_non_finite(run: Run) -> tuple[str, int, float] | None:
    """Return site, step and number of elements of the first value that is not finite, expected infinities left out."""
    for one in bad_steps(run)[:1]:
        site, records = one.sites[0], one.step.records
        counts = [records[key] for name in COUNTS if (key := f"{name}@{site}") in records]
        return site, one.step.step, counts[0] if counts else math.nan
    return None
