"""Skipped updates of a run, with their reasons."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from gradrewrite.diagnostics.nonfinite_steps import BadStep, bad_steps
from gradrewrite.diagnostics.run_log import Run, Step
from gradrewrite.errors import spike_text
from gradrewrite.ir.record_key import RecordKey

MOST_LINES = 20


@dataclass(frozen=True, slots=True)
class SkippedUpdate:
    """An update that a guard skipped."""

    step: int  # number of the backward before it
    place: str  # its number in words
    reason: str


def skipped_updates(run: Run) -> list[SkippedUpdate]:
    """Return the skipped updates of a run in their order.

    The reason is a spike or the first non-finite value in the backwards since the update before. Where none of these
    was recorded, a check failed on another rank or in a step that is not in the run.
    """
    bad, first_bad = {one.step.step: _first_of(run, one) for one in bad_steps(run)}, ""
    found = []
    for step in run.steps:
        first_bad = first_bad or bad.get(step.step, "")
        skips = [value for address, value in step.records.items() if address.startswith("skipped@optimizer:")]
        if any(value > 0 for value in skips):
            found.append(SkippedUpdate(step.step, run.place_of_update(step.step), _reason(step, first_bad)))
        if skips:
            first_bad = ""
    return found


def _first_of(run: Run, bad: BadStep) -> str:
    _, micro_batch, count = run.numbers.get(bad.step.step, (0, 0, 1))
    return f"{bad.sites[0]} in micro-batch {micro_batch + 1} of {count}" if count > 1 else bad.sites[0]


def skips_table(skips: Sequence[SkippedUpdate]) -> list[str]:
    """Return one line for each of several skipped updates, the first and the last ones of many; empty for one."""
    lines = [f"  {skip.place}: {skip.reason}" for skip in skips]
    if len(lines) > MOST_LINES:
        half = MOST_LINES // 2
        lines = [*lines[:half], f"  ({len(lines) - 2 * half} more)", *lines[-half:]]
    return ["", "Skipped updates:", *lines] if len(skips) > 1 else []


def skips_text(skips: Sequence[SkippedUpdate]) -> str:
    """Return the steps before the first and the last of skipped updates, with their reasons; ``""`` without any."""
    if not skips:
        return ""
    first, last = skips[0], skips[-1]
    if len(skips) == 1:
        return f"in {first.place} ({first.reason})"
    if last.reason == first.reason:
        return f"first in {first.place}, last in {last.place} ({first.reason})"
    return f"first in {first.place} ({first.reason}), last in {last.place} ({last.reason})"


def spike_reason(values: Mapping[RecordKey, float]) -> str:
    """Return the text of a spike in a step, with its limit; ``""`` without one."""
    spike = next((key for key, value in values.items() if key.record == "spike" and value > 0), None)
    if spike is None:
        return ""
    names = [key for key in values if key.site == spike.site and key.record in ("total_norm", "loss")]
    limit = values.get(replace(spike, record="spike_limit"), math.inf)
    return spike_text(str(names[0]), values[names[0]], limit) if names else "a spike"


def _reason(step: Step, first_bad: str) -> str:
    spike = spike_reason({RecordKey.parse(address): value for address, value in step.records.items()})
    return spike or ("a finite check failed" if not first_bad else f"not finite, first at {first_bad}")
