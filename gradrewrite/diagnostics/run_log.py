"""Records of a training run, as the doctor reads them."""

from __future__ import annotations

import glob
import json
import math
import os
import sys
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from itertools import chain, pairwise
from typing import Any, TypeAlias

from gradrewrite._utils import formatting
from gradrewrite._utils.formatting import table_of
from gradrewrite.ir.record_key import RecordKey
from gradrewrite.ir.record_layout import ClipRecords, SiteOp
from gradrewrite.ir.reports import Clip, LogFigures, NormClip, ValueClip

MIN_STEPS = 5  # fewer values show no trend
LISTED = 5  # sites named in one finding
SHOWN = 4  # records in the text of a step

COUNTS = ("nonfinite", "nan", "inf")
MAGNITUDES = ("norm", "max_abs", "mean_abs", "total_norm")  # the first is the fairest between layers of unlike size
BACKWARD = frozenset(("outside", "error", "input", "gradient", "group", "step"))
_EXECUTION = (
    "data",
    "activation",
    "output",
    "outside",
    "error",
    "input",
    "gradient",
    "group",
    "step",
    "param",
    "state",
)

Header: TypeAlias = tuple[tuple[ClipRecords, ...], tuple[SiteOp, ...]]  # what steps of one set of graphs share

_CLIPS: dict[str, Any] = {"norm": NormClip, "value": ValueClip}  # by their names in a file
_WAY_OUT = "mend or remove the line, or give a file of monitor.to_jsonl"


@dataclass(frozen=True, slots=True, repr=False)
class Step:
    """The records of one backward.

    Attributes:
        step: Number of the backward, from 0.
        records: Values by the text of their keys, ``record@site``, in the order of the sites: activations and errors
            in the order of the forward, then gradients; magnitudes in units of the unscaled loss.
        clips: The records of each clip; ``()`` if there is none, or where that is not known.
        ops: The op and the source line of each recorded activation and error; ``()`` where that is not known.
        culprits: Who made its update skip, in words; ``""`` where nobody asked ``monitor.culprits()``.

    Raises:
        ValueError: A name has no ``@``.
    """

    step: int
    records: Mapping[str, float]
    clips: tuple[ClipRecords, ...] = ()
    ops: tuple[SiteOp, ...] = ()
    culprits: str = field(default="", compare=False)

    def __post_init__(self) -> None:
        wrong = next((name for name in self.records if "@" not in name), None)
        if wrong is not None:
            raise ValueError(f"wanted record@site as the name of a record, got {wrong!r}")

    def __repr__(self) -> str:
        """All records, or their number if large."""
        many = len(self.records) > SHOWN
        return f"Step({self.step}, {f'{{{len(self.records)} records}}' if many else dict(self.records)})"


@dataclass(frozen=True, slots=True)
class Finding:
    """One fault of a run.

    Attributes:
        kind: ``"non-finite"``, ``"faulty input"``, ``"faulty learning rate"``, ``"faulty loss"``, ``"exploding"``,
            ``"vanishing"``, ``"saturated"``, ``"dead"``, ``"stored error"`` or ``"clip acts always"``; of a fault that
            the judge found, the kind of a ``Cause`` or of a ``Verdict``.
        site: Where it begins, or is worst; ``""`` if nowhere.
        step: The first step concerned; -1 if none.
        text: One or two sentences.
        figures: Every number that the finding rests on, by name.
        suggestion: What to try.
        key: Text of the key of the record that tells the clip from others at the site; ``""`` if it is on no clip.
        source: The line of the forward behind it, ``file:line "code"``; ``""`` if it is not known.
        factor: That of a ``Cause``; NaN for others.
    """

    kind: str
    site: str
    step: int
    text: str
    figures: Mapping[str, float]
    suggestion: str
    key: str = ""
    source: str = ""
    factor: float = math.nan

    def to_json(self) -> dict[str, object]:
        """Return strict JSON, with NaN and infinities as strings."""
        return {
            "kind": self.kind,
            "site": self.site,
            "source": self.source,
            "factor": self.factor if math.isfinite(self.factor) else None,
            "step": self.step,
            "text": self.text,
            "figures": {name: value if math.isfinite(value) else words(value) for name, value in self.figures.items()},
            "suggestion": self.suggestion,
        }


@dataclass(frozen=True, slots=True)
class Series:
    """One record over a run."""

    at: RecordKey
    # Name of the record: without its occurrence where there is a first one; a user may give any name, and ``norm.2`` is
    # then no second norm.
    record: str
    steps: list[int]  # numbers of the steps that have it
    values: list[float]  # its value in each of them

    @property
    def by_step(self) -> dict[int, float]:
        """Values by number of the step."""
        return dict(zip(self.steps, self.values, strict=True))


@dataclass(frozen=True, slots=True, repr=False)
class Run:
    """One run, by step and by record."""

    steps: Sequence[Step]  # its rows; their numbers rise
    series: Mapping[str, Series]  # its records by the text of their keys, in the order of their first appearance
    # Records of each clip of its steps; of clips with the same records the last one.
    clips: tuple[ClipRecords, ...] = ()

    def select(self, records: Collection[str], kinds: Collection[str]) -> list[Series]:
        """Return the records of some names at sites of some kinds."""
        return [one for one in self.series.values() if one.record in records and one.at.kind in kinds]

    def __repr__(self) -> str:
        return f"Run({self._extent()})"

    def _repr_html_(self) -> str:
        return table_of([step.records for step in self.steps], self._extent())._repr_html_()

    def _extent(self) -> str:
        span = f", {self.steps[0].step} to {self.steps[-1].step}" if self.steps else ""
        return f"{len(self.steps)} steps{span}; {len(self.series)} records"


def read_jsonl(path: str | os.PathLike[str]) -> list[Step]:
    """Read a file of ``monitor.to_jsonl``.

    An unfinished last line is left out. A line ``{"graphs": 0, "clips": [...]}`` says which records belong to which
    clip, for the following steps with ``"graphs": 0``; steps without it have no clips. ``"ops"`` in it are the op and
    the source line of sites.

    Raises:
        OSError: The file cannot be read.
        ValueError: Any other line is not ``{"step": 3, "graphs": 0, "records": {"record@site": 1.5}}``.
    """
    return read_with_rank(path)[0]


def read_with_rank(path: str | os.PathLike[str]) -> tuple[list[Step], int | None]:
    """Read a file and its rank; None without one."""
    steps: list[Step] = []
    rank = None
    headers: dict[int, Header] = {}
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
                if isinstance(data, dict) and "clips" in data:
                    if not isinstance(data["clips"], list):
                        raise ValueError(f"wanted a list as clips, got {data['clips']!r:.60}")
                    clips = tuple(map(clip_of_json, data["clips"]))
                    headers[_whole(data, "graphs")] = clips, ops_of_json(data.get("ops", {}))
                    continue
                steps.append(_step(data, headers))
                rank = _whole(data, "rank") if "rank" in data else rank
            except (ValueError, OverflowError) as err:
                raise ValueError(f"{where}: {err}; {_WAY_OUT}") from err
    return steps, rank


def last_run(steps: Sequence[Step]) -> Run:
    """Return the last run, after the last falling step number."""
    begins = [n for n, (before, after) in enumerate(pairwise(steps), 1) if after.step <= before.step]
    last = steps[begins[-1] :] if begins else steps
    known = {address for step in last for address in step.records}
    series: dict[str, Series] = {}
    sets: list[tuple[ClipRecords, ...]] = []
    for step in last:
        if step.clips not in sets:
            sets.append(step.clips)
        for address, value in step.records.items():
            if address not in series:
                key = RecordKey.parse(address)
                is_numbered = str(RecordKey.of(key.record, key.site)) in known
                series[address] = Series(key, key.record if is_numbered else key.name, [], [])
            series[address].steps.append(step.step)
            series[address].values.append(value)
    clips = {clip.factor: clip for clip in chain.from_iterable(sets)}
    return Run(last, series, tuple(clips.values()))


def loss_series(run: Run) -> Series | None:
    """Return the loss: ``loss``, or ``max`` at ``activation:loss``."""
    return next((one for one in run.series.values() if one.record == "loss"), run.series.get("max@activation:loss"))


def kind_of(site: str) -> str:
    """Kind of a site: ``error`` of ``error:a``."""
    return site.partition(":")[0]


def is_group(site: str) -> bool:
    """Whether a site is a group: ``group:default``, ``step:group:default``."""
    return site.removeprefix("step:").startswith("group:")


def as_executed(sites: Iterable[str]) -> list[str]:
    """Return sites of known kinds in the order of execution."""
    forward = list(dict.fromkeys(sites))
    ordered: list[str] = []
    for kind in _EXECUTION:
        part = [site for site in forward if kind_of(site) == kind]
        ordered += reversed(part) if kind == "error" else part
    return ordered


def words(value: float) -> str:
    """A number for a reader."""
    if math.isfinite(value):
        return f"{value:.4g}" if isinstance(value, float) else str(value)
    return "NaN" if math.isnan(value) else ("Infinity" if value > 0 else "-Infinity")


def rule_of(site: str, action: str, bound: float, further: str = "") -> str:
    """Return the code of a clip at one site."""
    name = glob.escape(site)
    literal = f'"{name}"' if repr(name) == f"'{name}'" and '"' not in name else repr(name)
    return f"gr.on({literal}, {action}({float(f'{bound:.2g}'):g}{further}))"


def listed(sites: Sequence[str]) -> str:
    """The first sites, and the number of others."""
    return formatting.listed(sites, LISTED)


def listed_values(sites: Sequence[tuple[str, float]]) -> str:
    """The first sites with values, and the number of others."""
    return listed([f"{site} ({value:.4g})" for site, value in sites])


def _refuse(constant: str) -> float:
    raise ValueError(f"{constant} is no JSON")


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


def _step(data: object, headers: Mapping[int, Header]) -> Step:
    if not isinstance(data, dict) or not isinstance(data.get("records"), dict):
        raise ValueError(f'wanted {{"step": number, "records": {{...}}}}, got {data!r:.60}')
    step = _whole(data, "step")
    graphs = _whole(data, "graphs") if "graphs" in data else None
    if graphs is not None and graphs not in headers:
        raise ValueError(f'no line {{"graphs": {graphs}, "clips": [...]}} stands before it')
    # the same addresses come in every row: kept once
    records = {sys.intern(address): _number(address, value) for address, value in data["records"].items()}
    return Step(step, records, *(((), ()) if graphs is None else headers[graphs]), str(data.get("culprits", "")))


def _whole(data: Mapping[str, object], name: str) -> int:
    number = data.get(name)
    if not isinstance(number, int) or isinstance(number, bool) or number < 0:
        raise ValueError(f"wanted a whole number >= 0 as {name}, got {number!r:.60}")
    return number


def _number(address: str, value: object) -> float:
    if isinstance(value, int | float) and not isinstance(value, bool):
        return float(value)
    if isinstance(value, str) and value in ("NaN", "Infinity", "-Infinity"):
        return float(value)
    raise ValueError(f'wanted a number, "NaN", "Infinity" or "-Infinity" for {address!r}, got {value!r:.60}')
