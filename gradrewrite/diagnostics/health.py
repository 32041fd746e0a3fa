"""The health of a training run, for its report."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

from gradrewrite.diagnostics.causes import Cause
from gradrewrite.diagnostics.clipping import clips_of
from gradrewrite.diagnostics.comparison import Loss, compare_runs, loss_of, loss_text
from gradrewrite.diagnostics.doctor import diagnose, sentences, skipped_rules
from gradrewrite.diagnostics.judge import Evidence
from gradrewrite.diagnostics.nonfinite_steps import bad_steps, count_of
from gradrewrite.diagnostics.run_log import Finding, Run, Step, last_run, words
from gradrewrite.diagnostics.site_health import SiteHealth, sites_of, where_needed, with_baseline
from gradrewrite.diagnostics.verdict import Verdict, judge

MOST_CODE = 20  # rules in a text
# Kinds of findings that say what a cause of another kind says.
_SAME = {"non-finite op": "non-finite", "clip too low": "clip acts always"}
_WEAK = ("non-finite op", "spike", "clip too low", "one layer")  # causes of which a finding may say more
_ONCE = ("exploding", "vanishing", "dead", "saturated", "non-finite")  # have one finding, whatever its site


@dataclass(frozen=True, slots=True)
class Health:
    """Content of a health report."""

    run: Run
    verdict: Verdict
    # Figures of all sites with a clip or a magnitude, from the output of the model to its input, kind by kind.
    sites: tuple[SiteHealth, ...]
    # What the doctor found, the gravest first; without advice on bounds that the verdict contradicts.
    findings: tuple[Finding, ...]
    # The verdict and its further causes, then findings that say something else; ``()`` if the verdict is sound.
    faults: tuple[Finding, ...]
    # Site, step and number of elements (NaN if not counted) of the first value that is not finite; of the loss the text
    # of its key instead of a site; None if all were finite.
    first_bad: tuple[str, int, float] | None
    loss: str  # one or two sentences on the loss, compared with that of the baseline if there is one
    baseline_bad: tuple[str, int, float] | None = None  # as ``first_bad``, of the baseline; None without one

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
        """Further faults, idle clips and skipped rules, as sentences."""
        verdict = self.verdict
        rest = [one for one in self.faults[1:] if one.kind != "clip acts always" or one.kind != verdict.kind]
        parts = [f"The verdict rests on {verdict.basis}."] if verdict.basis else []
        parts += sentences(rest, {str(clip.key): clip.rule for clip in clips_of(self.run)})
        idle = [one.site for one in self.findings if one.kind == "clip never acts" and verdict.is_sound]
        if idle:
            of = idle[0] if len(idle) == 1 else f"{idle[0]} and {len(idle) - 1} more"
            parts.append(f"No problem: the clip at {of} never acted, for all sizes stayed below the bound.")
        skipped = skipped_rules(self.run.steps)
        if skipped:
            parts += ["", "Not judged, for too few steps:", *(f"  {rule}" for rule in skipped)]
        return "\n".join(parts).strip() or "The rules found nothing else."

    def __str__(self) -> str:
        """Verdict, advice, policy, findings and remarks, as plain text."""
        verdict, more = self.verdict, len(self.verdict.code) - MOST_CODE
        code = [*(f"    {rule}," for rule in verdict.code[:MOST_CODE]), *([f"    # {more} more"] if more > 0 else [])]
        advice = verdict.advice if verdict.is_sound else f"What to change: {verdict.advice}"
        lines = [verdict.text, advice, *(["[", *code, "]"] if code else [])]
        remarks = [*verdict.remarks, *([self.loss] if loss_of(self.run) is None else [])]
        parts = ["" if verdict.text.startswith(verdict.headline) else verdict.headline, "\n".join(lines)]
        parts += [self.findings_text, "\n".join(f"remark: {text}" for text in remarks)]
        return "\n\n".join(part for part in parts if part)


def examine(steps: Sequence[Step], baseline: Sequence[Step] | None = None, evidence: Evidence | None = None) -> Health:
    """Judge the last run of a log, against a baseline."""
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
    faults = _faults(verdict, findings)
    return Health(run, verdict, sites, findings, faults, _first_bad(run, loss), text, baseline_bad)


def _faults(verdict: Verdict, findings: Sequence[Finding]) -> tuple[Finding, ...]:
    """Return verdict, further causes and other findings, without doubles."""
    if verdict.is_sound:
        return ()
    leads = bool(verdict.causes) and verdict.causes[0].text in verdict.text  # else a finding says more
    causes = [cause for cause in verdict.causes if leads or cause.kind not in _WEAK]
    found = [_of_cause(cause, findings) for cause in causes]
    rest = [one for one in findings if not any(_is_told(one, cause) for cause in causes)]
    if not leads:
        own = Finding(verdict.kind, verdict.site, -1, verdict.text, {}, "\n".join((verdict.advice, *verdict.code)))
        wanted = (verdict.kind, verdict.site)
        lead = next((one for one in rest if one.text == verdict.text or (one.kind, one.site) == wanted), own)
        found, rest = [lead, *found], [one for one in rest if one is not lead]
    elif verdict.outcome == "learns":  # which makes a bad batch or a spike alone a fault
        rest = []
    if not verdict.kind.startswith("clip"):
        later = "Judge its bound when the fault above is mended."
        rest = [one for one in rest if f" at {one.site} acts after that" not in verdict.text]
        rest = [replace(one, suggestion=later) if one.kind == "clip acts always" else one for one in rest]
    return (*found, *rest)


def _of_cause(cause: Cause, findings: Sequence[Finding]) -> Finding:
    """Return a cause as a finding, with its double's figures."""
    figures = {} if math.isnan(cause.factor) else {"factor": cause.factor}
    known = next((dict(one.figures) for one in findings if _is_told(one, cause)), figures)
    advice = "\n".join((cause.advice, *cause.rules))
    return Finding(cause.kind, cause.site, cause.step, cause.text, known, advice, "", cause.source, cause.factor)


def _is_told(finding: Finding, cause: Cause) -> bool:
    """Whether a finding repeats a cause."""
    if finding.kind != _SAME.get(cause.kind, cause.kind):
        return False
    return finding.site == cause.site or (finding.kind in _ONCE and "growth_per_step" not in finding.figures)


def _first_bad(run: Run, loss: Loss | None) -> tuple[str, int, float] | None:
    """Return the first non-finite value of sites and loss."""
    bad = next(iter(bad_steps(run)), None)
    if loss is not None and loss.bad_step >= 0 and (bad is None or loss.bad_step < bad.step.step):
        return loss.address, loss.bad_step, math.nan
    if bad is None:
        return None
    count = count_of(bad.step.records, bad.sites[0])
    return bad.sites[0], bad.step.step, math.nan if count is None else count


def _with_bound(finding: Finding, sites: Sequence[SiteHealth]) -> Finding:
    if finding.kind != "clip acts always":
        return finding
    row = next((row for row in sites if row.from_baseline and row.key == finding.key), None)
    if row is None:
        return finding
    text = f"Raise the threshold to about {words(row.suggestion)}, which 90 % of the values of the baseline stay below."
    return replace(finding, suggestion=text)
