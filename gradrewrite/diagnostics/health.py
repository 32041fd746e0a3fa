"""The health of a training run, for its report."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

from gradrewrite.diagnostics.batch_noise import noise_in
from gradrewrite.diagnostics.causes import Cause
from gradrewrite.diagnostics.clipping import clips_of
from gradrewrite.diagnostics.comparison import Loss, compare_runs, loss_of, loss_text
from gradrewrite.diagnostics.doctor import findings_on, sentences, skipped_rules
from gradrewrite.diagnostics.judge import Evidence, without_rule
from gradrewrite.diagnostics.loss_conflicts import conflicts_in
from gradrewrite.diagnostics.nonfinite_steps import bad_steps, count_of
from gradrewrite.diagnostics.number_formats import remarks_on
from gradrewrite.diagnostics.run_log import Run, Step, last_run
from gradrewrite.diagnostics.site_health import SiteHealth, sites_of, where_needed, with_baseline
from gradrewrite.diagnostics.skipped_updates import skipped_updates, skips_table, skips_text
from gradrewrite.diagnostics.used_gradients import with_used
from gradrewrite.diagnostics.verdict import Verdict, judge

MOST_CODE = 20  # rules in a text


@dataclass(frozen=True, slots=True)
class Health:
    """Content of a health report."""

    run: Run
    verdict: Verdict
    # Figures of all sites with a clip or a magnitude, from the output of the model to its input, kind by kind.
    sites: tuple[SiteHealth, ...]
    # What the doctor found, the gravest first, with what is no fault.
    findings: tuple[Cause, ...]
    # The verdict and its further causes, then findings that say something else; ``()`` if the verdict is sound.
    faults: tuple[Cause, ...]
    # Site, step and number of elements (NaN if not counted) of the first value that is not finite; of the loss the text
    # of its key instead of a site; None if all were finite.
    first_bad: tuple[str, int, float] | None
    loss: str  # one or two sentences on the loss, compared with that of the baseline if there is one
    # Site of the first value of the baseline that is not finite, and its step in words; None without one.
    baseline_bad: tuple[str, str] | None = None

    @property
    def first_bad_text(self) -> str:
        """Text of the first non-finite value."""
        text = "Every recorded value of this run was finite."
        told = next((one for one in self.verdict.causes if one.is_explained or one.kind == "update"), None)
        if told is not None and told.step >= 0:
            text = f"First at {told.site} in {self.run.place(told.step)}; see the verdict."
        elif self.first_bad is not None:
            site, step, count = self.first_bad
            text = f"First at {site} in {self.run.place(step)}{'' if math.isnan(count) else f', {count:.0f} elements'}."
        if self.baseline_bad is None:
            return text
        site, place = self.baseline_bad
        return f"{text} In the baseline, the first value that was not finite is at {site}, in {place}."

    @property
    def findings_text(self) -> str:
        """Further faults, idle clips, skipped updates and rules that were not judged, as sentences."""
        verdict = self.verdict
        rest = [one for one in self.faults[1:] if one.kind != "clip acts always" or one.kind != verdict.kind]
        parts = sentences(rest, {str(clip.key): clip.rule for clip in clips_of(self.run)})
        idle = [row.label for row in self.sites if row.rate == 0 and verdict.is_sound]
        if idle:
            of = idle[0] if len(idle) == 1 else f"{idle[0]} and {len(idle) - 1} more"
            parts.append(f"No problem: the clip at {of} never acted, for all sizes stayed below the bound.")
        skips = skipped_updates(self.run)
        if skips and verdict.kind not in ("healthy", "too short"):  # which say so themselves
            parts.append(f"{len(skips)} update{'s were' if len(skips) > 1 else ' was'} skipped, {skips_text(skips)}.")
        parts += skips_table(skips)
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
    run = last_run(steps)
    sites, loss = sites_of(run), loss_of(run)
    compared = None if baseline is None else last_run(baseline)
    other = None if compared is None else loss_of(compared)
    if compared is not None and (other is None or math.isfinite(other.last)):
        sites = with_baseline(sites, compared)
    findings = findings_on(run, sites)
    evidence = with_used(evidence or Evidence(), run, compared)
    verdict, faults = judge(run, sites, findings, loss, other, evidence)
    sites = where_needed(sites, is_remedy=verdict.is_sound or verdict.kind == "clip acts always")
    if not verdict.is_sound:
        sites = tuple(replace(row, mark="see the verdict") if row.site == verdict.site else row for row in sites)
    verdict = replace(verdict, remarks=(*verdict.remarks, *conflicts_in(run), *noise_in(run), *remarks_on(run)))
    text = loss_text(loss) if compared is None else compare_runs(run, compared)
    bad = None if compared is None else _first_bad(compared, other)
    baseline_bad = None if compared is None or bad is None else (bad[0], compared.place(bad[1]))
    return Health(run, verdict, sites, findings, faults, _first_bad(run, loss), text, baseline_bad)


def without_rules(health: Health, remark: str) -> Health:
    """Return a judgement without its rules, with a remark why."""

    def plain(causes: Sequence[Cause]) -> tuple[Cause, ...]:
        return tuple(replace(cause, rules=(), advice=without_rule(cause.advice)) for cause in causes)

    own = health.verdict
    remarks, advice = (*own.remarks, remark), without_rule(own.advice)
    verdict = replace(own, code=(), causes=plain(own.causes), advice=advice, remarks=remarks)
    return replace(health, verdict=verdict, faults=plain(health.faults))


def _first_bad(run: Run, loss: Loss | None) -> tuple[str, int, float] | None:
    """Return the first non-finite value of sites and loss."""
    bad = next(iter(bad_steps(run)), None)
    if loss is not None and loss.bad_step >= 0 and (bad is None or loss.bad_step < bad.step.step):
        return loss.address, loss.bad_step, math.nan
    if bad is None:
        return None
    count = count_of(bad.step.records, bad.sites[0])
    return bad.sites[0], bad.step.step, math.nan if count is None else count
