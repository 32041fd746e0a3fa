"""Steps with clips that no training has made."""

from __future__ import annotations

import json
from collections.abc import Collection, Mapping

from gradrewrite import Step
from gradrewrite.diagnostics.run_file import clip_to_json
from gradrewrite.ir.outputs import ClipRecords
from gradrewrite.ir.record_key import RecordKey
from gradrewrite.ir.reports import LogFigures, NormClip, ValueClip


def step_of(step: int, records: Mapping[str, float], *, logged: Collection[str] = ()) -> Step:
    """Return a step with a clip by norm for each record ``bound``, and one by value for each ``clipped``.

    The other records of a clip have its occurrence, or else the first; ``max_abs`` is the last one before ``clipped``.
    A clip by norm gets its factor, bound / norm. Records in ``logged`` are of the log lines of clips by norm.
    """
    all_records, clips = dict(records), []
    keys = [RecordKey.parse(text) for text in records]
    for key in keys:
        if key.record == "bound":
            clips.append(norm_clip(key, all_records))
            all_records |= _factor(clips[-1], all_records)
    taken = {clip.factor for clip in clips}
    clips += [value_clip(key, records, taken) for key in keys if key.record == "clipped" and str(key) not in logged]
    return Step(step, all_records, tuple(clips))


def header_of(records: Collection[str]) -> str:
    """Return the line of a file that says of which clips these records are; see ``step_of``."""
    clips = step_of(0, dict.fromkeys(records, 1.0)).clips
    return json.dumps({"graphs": 0, "clips": list(map(clip_to_json, clips))}) + "\n"


def norm_clip(bound: RecordKey, records: Mapping[str, float]) -> ClipRecords:
    """Return the clip of a bound."""
    kind, _, name = bound.site.rpartition(":")
    wanted = [RecordKey(record, n, bound.site) for n in (bound.occurrence, 1) for record in ("norm", "total_norm")]
    norm = next((key for key in wanted if str(key) in records), wanted[0])
    report = NormClip(norm.record, norm, bound, is_wide=True)
    action = "ClipByGlobalNorm(max_norm=1.0)" if norm.record == "total_norm" else "ClipByNorm(max_norm=1.0)"
    return ClipRecords(kind, name, 0, action, "*", report, RecordKey("factor", norm.occurrence, bound.site))


def value_clip(clipped: RecordKey, records: Mapping[str, float], taken: set[RecordKey]) -> ClipRecords:
    """Return the clip of a record ``clipped``; its factor is none of those that are taken."""

    def key(name: str) -> RecordKey:
        own = RecordKey(name, clipped.occurrence, clipped.site)
        return own if str(own) in records else RecordKey(name, 1, clipped.site)

    kind, _, name = clipped.site.rpartition(":")
    names = list(records)[: list(records).index(str(clipped))]
    sizes = [
        RecordKey.parse(text) for text in names if text.startswith("max_abs") and text.endswith(f"@{clipped.site}")
    ]
    log = LogFigures([key("max_abs"), *sizes][-1], key("mean_abs"), clipped)
    factor = next(k for n in range(1, 9) if (k := RecordKey("factor", n, clipped.site)) not in taken)
    limit = key("limit") if str(key("limit")) in records else None
    report = ValueClip(key("norm_before"), key("norm_after"), key("share"), log, limit)
    return ClipRecords(kind, name, 0, "ClipByValue(max=1.0, log=True)", "*", report, factor)


def _factor(clip: ClipRecords, records: Mapping[str, float]) -> dict[str, float]:
    known = {key: records[str(key)] for key in (clip.report.norm, clip.report.bound) if str(key) in records}
    if str(clip.factor) in records or len(known) < 2:
        return {}
    return {str(clip.factor): clip.on_host(known).factor()}
