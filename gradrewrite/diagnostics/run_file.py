"""Run logs: files of JSON lines with the records of training runs."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any, TypeAlias

from gradrewrite.diagnostics.failures import cause_of_json
from gradrewrite.diagnostics.run_log import Origin, Step
from gradrewrite.diagnostics.stacked_records import StackReader, records_to_json
from gradrewrite.ir.outputs import ClipRecords, SiteOp
from gradrewrite.ir.record_key import RecordKey
from gradrewrite.ir.reports import Clip, LogFigures, NormClip, ValueClip

LINE_STARTS = (b'{"run"', b'{"graphs"', b'{"step"')

Header: TypeAlias = tuple[tuple[ClipRecords, ...], tuple[SiteOp, ...]]  # what steps of one set of graphs share

_CLIPS: dict[str, Any] = {"norm": NormClip, "value": ValueClip}  # by their names in a file
_WAY_OUT = "mend or remove the line, or give a file of monitor.to_jsonl"


def read_jsonl(path: str | os.PathLike[str]) -> list[Step]:
    """Read a file of ``monitor.to_jsonl``.

    An unfinished last line is left out. A line ``{"run": {...}}`` begins a part of the file: the version, the policy
    and the configuration of the following steps. A line ``{"graphs": 0, "clips": [...]}`` says which records belong to
    which clip, for the following steps with ``"graphs": 0``; steps without it have no clips. ``"ops"`` in it are the op
    and the source line of sites.

    Raises:
        OSError: The file cannot be read.
        ValueError: Any other line is not ``{"step": 3, "graphs": 0, "records": {"record@site": 1.5}}``.
    """
    return read_with_rank(path)[0]


def read_with_rank(path: str | os.PathLike[str]) -> tuple[list[Step], int | None]:
    """Read a file and its rank; None without one."""
    steps: list[Step] = []
    rank = None
    seen = _Seen()
    with open(path, "rb") as file:
        for number, line in enumerate(file, 1):
            where = f"{os.fspath(path)}, line {number}"
            try:
                data = json.loads(line, parse_constant=_refuse)
            except (ValueError, RecursionError) as err:
                if not line.endswith(b"\n"):
                    break  # only the last line has no end
                raise ValueError(f"{where}: wanted one JSON object, got {line[:60]!r}; {_WAY_OUT}") from err
            try:
                if isinstance(data, dict) and "run" in data:
                    seen = _Seen(origin_of_json(data["run"]))
                elif isinstance(data, dict) and "clips" in data:
                    seen.add(data)
                else:
                    steps.append(_step(data, seen))
                    rank = _whole(data, "rank") if "rank" in data else rank
            except (ValueError, OverflowError) as err:
                raise ValueError(f"{where}: {err}; {_WAY_OUT}") from err
    return steps, rank


@dataclass
class _Seen:
    """Contents of the lines before a step."""

    origin: Origin | None = None
    headers: dict[int, Header] = field(default_factory=dict)
    stacks: StackReader = field(default_factory=StackReader)

    def add(self, data: Mapping[str, Any]) -> None:
        if not isinstance(data["clips"], list):
            raise ValueError(f"wanted a list as clips, got {data['clips']!r:.60}")
        clips = tuple(map(clip_of_json, data["clips"]))
        self.headers[_whole(data, "graphs")] = clips, ops_of_json(data.get("ops", {}))


def step_to_json(step: Step, graphs: int) -> dict[str, object]:
    """Return a step as JSON takes it, with the number of its set of graphs."""
    row: dict[str, object] = {"step": step.step, "graphs": graphs}
    if step.update != step.step:
        row["update"] = step.update
    if step.micro_batch:
        row["micro_batch"] = step.micro_batch
    row["records"] = records_to_json(step.records, step.stacks)
    if step.culprits:
        row["culprits"] = step.culprits
    if step.failure is not None:
        row["failure"] = step.failure.to_json()
    return row


def origin_to_json(origin: Origin) -> dict[str, object]:
    """Return the origin of steps as JSON takes it."""
    return {"version": origin.version, "policy": list(origin.policy), "config": dict(origin.config)}


def origin_of_json(data: Any) -> Origin:
    """Return the origin of steps from JSON; ValueError otherwise."""
    config, policy = (data.get("config", {}), data.get("policy", [])) if isinstance(data, dict) else (None, None)
    if not isinstance(config, dict) or not isinstance(policy, list) or not all(isinstance(one, str) for one in policy):
        raise ValueError(f'wanted {{"version": "...", "policy": ["..."], "config": {{...}}}} as run, got {data!r:.60}')
    return Origin(str(data.get("version", "")), tuple(policy), config)


def checked_config(config: Mapping[str, Any] | None) -> dict[str, Any]:
    """Return a configuration that JSON takes; TypeError or ValueError for another one."""
    if config is None:
        return {}
    if not isinstance(config, Mapping) or not all(isinstance(key, str) for key in config):
        raise TypeError(f"config is a dict with names, got {config!r:.60}; vars(args) makes one of parsed arguments")
    for name, value in config.items():
        try:
            json.dumps(value, allow_nan=False)
        except (TypeError, ValueError) as err:
            raise type(err)(f"config[{name!r}]: {err}; give numbers, strings, lists and dicts of them") from None
    return dict(config)


def clip_to_json(clip: ClipRecords) -> dict[str, object]:
    """Return the records of a clip as JSON takes them."""
    by = next(name for name, form in _CLIPS.items() if isinstance(clip.report, form))
    report = {"by": by, **asdict(clip.report.map(lambda _, key: str(key)))}
    names = ("kind", "name", "call", "action", "rule")
    return {**{name: getattr(clip, name) for name in names}, "report": report, "factor": str(clip.factor)}


def clip_of_json(data: Any) -> ClipRecords:
    """Return the records of a clip from JSON; ValueError otherwise."""
    try:
        given = dict(data["report"])
        form, log = _CLIPS[given.pop("by")], given["log"]
        given["log"] = None if log is None else LogFigures(**log)
        given |= {name: tuple(value) for name, value in given.items() if isinstance(value, list)}
        report: Clip[str] = form(**given)
        keys = report.map(lambda _, text: RecordKey.parse(text))
        return ClipRecords(**{**data, "report": keys, "factor": RecordKey.parse(data["factor"])})
    except (TypeError, KeyError, AttributeError) as err:
        raise ValueError(f"wanted the records of a clip, got {data!r:.60} ({type(err).__name__}: {err})") from err


def ops_to_json(ops: Sequence[SiteOp]) -> dict[str, list[str]]:
    """Return the ops of sites as JSON takes them: ``{"decoder.0#1": ["decoder.0/linear", "model.py:41 ..."]}``."""
    return {one.name: [one.op, one.source] for one in ops}


def ops_of_json(data: Any) -> tuple[SiteOp, ...]:
    """Return the ops of sites from JSON; ValueError otherwise."""
    rows = data.values() if isinstance(data, dict) else [None]
    if not all(isinstance(row, list) and len(row) == 2 and all(isinstance(one, str) for one in row) for row in rows):
        raise ValueError(f'wanted {{"site": ["module/op", "source"]}} as ops, got {data!r:.60}')
    return tuple(SiteOp(name, *row) for name, row in data.items())


def _step(data: object, seen: _Seen) -> Step:
    if not isinstance(data, dict) or not isinstance(data.get("records"), dict):
        raise ValueError(f'wanted {{"step": number, "records": {{...}}}}, got {data!r:.60}')
    step = _whole(data, "step")
    graphs = _whole(data, "graphs") if "graphs" in data else None
    if graphs is not None and graphs not in seen.headers:
        raise ValueError(f'no line {{"graphs": {graphs}, "clips": [...]}} stands before it')
    records, stacks = seen.stacks.read(data["records"])
    clips, ops = ((), ()) if graphs is None else seen.headers[graphs]
    update = _whole(data, "update") if "update" in data else step
    micro_batch = _whole(data, "micro_batch") if "micro_batch" in data else 0
    culprits = str(data.get("culprits", ""))
    failure = cause_of_json(data["failure"]) if "failure" in data else None
    return Step(step, records, clips, ops, culprits, update, micro_batch, seen.origin, stacks, failure)


def _whole(data: Mapping[str, object], name: str) -> int:
    number = data.get(name)
    if not isinstance(number, int) or isinstance(number, bool) or number < 0:
        raise ValueError(f"wanted a whole number >= 0 as {name}, got {number!r:.60}")
    return number


def _refuse(constant: str) -> float:
    raise ValueError(f"{constant} is no JSON")
