"""Clips over a run: bounds, rates and factors."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import chain
from statistics import median
from typing import Any

from typing_extensions import assert_never

from gradrewrite._utils.grouping import grouped
from gradrewrite.diagnostics.run_log import Run
from gradrewrite.ir.edits import Edit
from gradrewrite.ir.outputs import ClipRecords
from gradrewrite.ir.record_key import RecordKey
from gradrewrite.ir.reports import NormClip, ValueClip

MIN_CLIP_STEPS, CLIPS_ALWAYS = 20, 0.9  # early steps alone say nothing about a threshold
_LISTS = ("steps", "sizes", "bounds", "acted", "factors")  # of a history


@dataclass(frozen=True, slots=True)
class ClipHistory:
    """The records of one clip over a run."""

    site: str
    # What it was measured by: ``norm`` or ``total_norm`` (clips by norm), ``max_abs`` (clips by value, where they log).
    record: str
    steps: list[int]  # numbers of the steps that it reported
    sizes: list[float]  # norm or largest absolute value before it in each of them; NaN where that was not recorded
    bounds: list[float]  # its bound in each of them; NaN where that is not known (clips by value with two bounds)
    acted: list[bool]  # whether it acted in each of them; a size that is not finite is left alone by a clip by norm
    factors: list[float]  # norm after / norm before in each of them; NaN where that is not known
    key: RecordKey  # record that tells it from other clips of the site: its norm, or whether it acted
    action: str  # name of its class
    rule: str  # pattern of the rule that made it; ``""`` for a callback
    share: RecordKey | None = None  # record of the share of the elements that a clip by value changed
    num_calls: int = 1  # of the module, whose lists are one behind the other

    @property
    def kind(self) -> str:
        """``norm`` or ``value``."""
        return "value" if self.record == "max_abs" else "norm"

    @property
    def bound(self) -> float:
        """The last finite bound, else infinity (off) or NaN (unknown)."""
        finite = [bound for bound in self.bounds if math.isfinite(bound)]
        return finite[-1] if finite else self.bounds[-1]

    @property
    def rate(self) -> float:
        """Share of the clipped steps."""
        return sum(self.acted) / len(self.acted)

    @property
    def median_factor(self) -> float:
        """Median factor of the clipped steps; NaN if unknown."""
        pairs = zip(self.factors, self.acted, strict=True)
        factors = [factor for factor, acted in pairs if acted and not math.isnan(factor)]
        return median(factors) if factors else math.nan if any(self.acted) else 1.0


def clips_of(run: Run) -> list[ClipHistory]:
    """Return the clips with records, those by norm first."""
    found = [_history_of(run, clip) for clip in run.clips]
    return sorted((clip for clip in found if clip is not None), key=lambda clip: clip.kind)


def clips_of_modules(run: Run) -> list[ClipHistory]:
    """Return the clips with records, one per module."""
    alike = grouped(((clip.site.partition("#")[0], clip.action, clip.key.name), clip) for clip in clips_of(run))
    found = []
    for (name, *_), clips in alike.items():
        joined: dict[str, Any] = {of: list(chain.from_iterable(getattr(clip, of) for clip in clips)) for of in _LISTS}
        found.append(replace(clips[0], site=name, num_calls=len(clips), **joined) if len(clips) > 1 else clips[0])
    return found


def clips_by_edit(run: Run, edits: Sequence[Edit]) -> dict[int, ClipHistory]:
    """Return the clips with records by number of the edit."""
    clips = {clip.key: clip for clip in clips_of(run)}
    found = {number: [clips[key] for key in edit.records if key in clips] for number, edit in enumerate(edits)}
    return {number: own[0] for number, own in found.items() if own}


def _history_of(run: Run, clip: ClipRecords) -> ClipHistory | None:
    match clip.report:
        case NormClip(record, size, bound):
            key, share = size, None
        case ValueClip(share=share, log=log, limit=bound):
            record, size, key = "max_abs", log.max_abs, log.clipped
        case _:
            assert_never(clip.report)
    of_key = run.series.get(str(key))
    if of_key is None:
        return None

    def values(of: RecordKey | None) -> list[float]:
        series = run.series.get(str(of))
        known = {} if series is None else series.by_step
        return [known.get(step, math.nan) for step in of_key.steps]

    factors = values(clip.factor)
    acted = [factor != 1 and not math.isnan(factor) for factor in factors]
    if key != size:
        acted = [value > 0 for value in of_key.values]
    action = clip.action.partition("(")[0]
    sizes, bounds = values(size), values(bound)
    return ClipHistory(clip.site, record, of_key.steps, sizes, bounds, acted, factors, key, action, clip.rule, share)
