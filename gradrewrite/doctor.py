"""Plain answers from the records of a training run: what is wrong, where it begins, and what to try."""

from __future__ import annotations

import json
import math
import os
import sys
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import pairwise
from statistics import median, quantiles

MIN_STEPS = 5  # fewer values show no trend, and no habit
EXPLODING = 1e3  # healthy gradients drift by a factor of 10 to 100 over a run
MIN_GROWTH = 1.02  # per step; slower growth cannot be told from a drift
STEADINESS = 0.8  # net growth over all ups and downs: a random walk that went as far by luck has about 0.6
MIN_LATE_SHARE = 0.5  # growth in the second half over that in the first: power laws (warm-up, a zero start) slow down
SLACK = 2  # steps; where growth begins is no sharper than this under noise
MIN_LAYERS = 4  # fewer sites make no geometric sequence
EXPLODING_LAYERS, MIN_LAYER_GROWTH = 1e3, 1.2  # a sound model keeps errors within two orders from end to end
VANISHING_LAYERS, MAX_LAYER_SHARE = 1e-6, 0.8  # float32 has 7 digits; larger maps alone make errors 1e-3 as large
LAST_STEPS = 20  # how units behave now, not at the start
SATURATED = 0.5  # a fresh tanh or sigmoid layer saturates at a few percent
DEAD = 0.95  # a ReLU at rest is zero at about one half
DEAD_ERROR = 0.999  # a model that reads one token of many leaves the errors of all others at exactly 0
MIN_CLIP_STEPS, CLIPS_ALWAYS = 20, 0.9  # early steps alone say nothing about a threshold
LISTED = 5  # sites named in one finding

_COUNTS = ("nonfinite", "nan", "inf")
_MAGNITUDES = ("norm", "max_abs", "mean_abs", "total_norm")  # the first is the fairest between layers of unlike size
_EXECUTION = {k: n for n, k in enumerate(("data", "activation", "outside", "error", "input", "gradient", "group"))}
_BACKWARD = frozenset(("outside", "error", "input", "gradient", "group"))


@dataclass(frozen=True, slots=True)
class Step:
    """What one backward reported.

    Attributes:
        step: Number of the backward, from 0.
        records: Values by address ``record@site``, in the order of the sites: activations and errors in the order of
            the forward, then gradients; magnitudes in units of the unscaled loss.
    """

    step: int
    records: Mapping[str, float]


@dataclass(frozen=True, slots=True)
class Finding:
    """One thing that is wrong with a run.

    Attributes:
        kind: ``"non-finite"``, ``"faulty input"``, ``"faulty learning rate"``, ``"faulty loss"``, ``"exploding"``,
            ``"vanishing"``, ``"saturated"``, ``"dead"``, ``"clip acts always"`` or ``"clip never acts"``.
        site: Where it begins, or is worst; ``""`` if nowhere.
        step: The first step concerned; -1 if none.
        text: One or two sentences.
        figures: Every number that the finding rests on, by name.
        suggestion: What to try.
    """

    kind: str
    site: str
    step: int
    text: str
    figures: Mapping[str, float]
    suggestion: str

    def to_json(self) -> dict[str, object]:
        """As strict JSON takes it; NaN and infinities as strings."""
        figures = {name: value if math.isfinite(value) else _words(value) for name, value in self.figures.items()}
        fields = {"kind": self.kind, "site": self.site, "step": self.step, "text": self.text}
        return {**fields, "figures": figures, "suggestion": self.suggestion}


def read_jsonl(path: str | os.PathLike[str]) -> list[Step]:
    """Read what ``monitor.to_jsonl`` wrote; an unfinished last line is left out.

    Raises:
        OSError: The file cannot be read.
        ValueError: Any other line is not ``{"step": 3, "records": {"record@site": 1.5}}``.
    """
    steps = []
    with open(path, "rb") as file:
        for number, line in enumerate(file, 1):
            try:
                data = json.loads(line, parse_constant=_refuse)
            except (ValueError, RecursionError) as err:
                if not line.endswith(b"\n"):
                    break  # only the last line has no end
                raise ValueError(f"{os.fspath(path)}, line {number}: wanted one JSON object, got {line[:60]!r}") from err
            try:
                steps.append(_step(data))
            except (ValueError, OverflowError) as err:
                raise ValueError(f"{os.fspath(path)}, line {number}: {err}") from err
    return steps


def diagnose(steps: Sequence[Step]) -> tuple[Finding, ...]:
    """Say what is wrong with a run, the gravest first; ``()`` if nothing is found.

    Where the number of the step falls back, a new run begins: the last run is looked at. Trends need 5 steps, clips
    20. An input or an activation that was infinite in 5 steps whose backward was finite (a mask) is meant to be so; so
    is such an input with NaN. NaN beside a count of 0 or a norm of 0 is an empty tensor.

    Args:
        steps: The rows of a run, oldest first.
    """
    run = _last_run(steps)
    series = _series(run)
    rules = (_growing_layers, _vanishing, _saturated, _dead, _clips_always, _clips_never)
    found = [_non_finite(run), _growing_steps(series), *(rule(run, series) for rule in rules)]
    return tuple(finding for finding in found if finding is not None)


def report(findings: Sequence[Finding], steps: Sequence[Step] | None = None) -> str:
    """Plain text for a terminal: a paragraph a finding, or one line if there is none.

    Args:
        findings: What ``diagnose`` returned.
        steps: What it was given, to say how much was looked at.
    """
    if findings:
        return "\n\n".join(_paragraph(finding) for finding in findings)
    if steps is None:
        return "nothing wrong was found"
    run = _last_run(steps)
    return f"nothing wrong was found in {len(run)} steps, {len({a for s in run for a in s.records})} records"


def _paragraph(finding: Finding) -> str:
    figures = ", ".join(f"{name} = {_words(value)}" for name, value in finding.figures.items())
    return f"{finding.kind}: {finding.text}\n  figures: {figures}\n  suggestion: {finding.suggestion}"


def _words(value: float) -> str:
    if math.isfinite(value):
        return f"{value:.4g}" if isinstance(value, float) else str(value)
    return "NaN" if math.isnan(value) else ("Infinity" if value > 0 else "-Infinity")


def _refuse(constant: str) -> float:
    raise ValueError(f"{constant} is no JSON")


def _step(data: object) -> Step:
    if not isinstance(data, dict) or not isinstance(data.get("records"), dict):
        raise ValueError(f'wanted {{"step": number, "records": {{...}}}}, got {str(data)[:60]}')
    step = data.get("step")
    if not isinstance(step, int) or isinstance(step, bool) or step < 0:
        raise ValueError(f"wanted a whole number >= 0 as step, got {step!r}")
    return Step(step, {sys.intern(address): _number(address, value) for address, value in data["records"].items()})


def _number(address: str, value: object) -> float:
    if "@" not in address:
        raise ValueError(f"wanted record@site as the name of a record, got {address!r}")
    if value in ("NaN", "Infinity", "-Infinity") or isinstance(value, int | float) and not isinstance(value, bool):
        return float(value)  # type: ignore[arg-type]  # narrowed by hand
    raise ValueError(f'wanted a number, "NaN", "Infinity" or "-Infinity" for {address}, got {value!r}')


def _last_run(steps: Sequence[Step]) -> Sequence[Step]:
    begins = [n for n, (before, after) in enumerate(pairwise(steps), 1) if after.step <= before.step]
    return steps[begins[-1] :] if begins else steps


@dataclass(frozen=True, slots=True)
class _Address:
    """``max_abs.2@error:a`` taken apart: record ``max_abs``, number ``.2``, site ``error:a``, kind ``error``."""

    record: str
    number: str
    site: str
    kind: str


@lru_cache(maxsize=1 << 16)
def _parse(address: str) -> _Address:
    name, _, site = address.partition("@")
    base, dot, number = name.rpartition(".")
    numbered = bool(dot) and number.isdecimal()
    return _Address(base if numbered else name, dot + number if numbered else "", site, site.partition(":")[0])


@dataclass(frozen=True, slots=True)
class _Series:
    """One record over a run: numbers of the steps that have it, and its values."""

    steps: list[int]
    values: list[float]


_Run = Mapping[str, _Series]


def _series(steps: Sequence[Step]) -> _Run:
    found: dict[str, _Series] = {}
    for step in steps:
        for address, value in step.records.items():
            one = found.setdefault(address, _Series([], []))
            one.steps.append(step.step)
            one.values.append(value)
    return found


def _is_bad(address: str, value: float, records: Mapping[str, float]) -> bool:
    at = _parse(address)
    if at.record in _COUNTS:
        return value > 0
    if at.record not in _MAGNITUDES or math.isfinite(value):
        return False
    is_empty = any(records.get(f"{name}@{at.site}") == 0 for name in ("nonfinite", "nan", "norm"))
    return not (math.isnan(value) and is_empty)


def _bad_sites(step: Step) -> list[str]:
    """Sites that are not finite, in the order of execution."""
    bad = dict.fromkeys(_parse(a).site for a, v in step.records.items() if _is_bad(a, v, step.records))
    known = [(site, kind) for site in bad if (kind := site.partition(":")[0]) in _EXECUTION]
    errors = [pair for pair in known if pair[1] == "error"]
    ordered = [pair for pair in known if pair[1] != "error"] + errors[::-1]
    return [site for site, _ in sorted(ordered, key=lambda pair: _EXECUTION[pair[1]])]


def _is_harmless(step: Step, bad: Sequence[str]) -> bool:
    """Whether the backward was recorded and is finite."""
    kinds = {_parse(a).kind for a in step.records if _parse(a).record in (*_COUNTS, *_MAGNITUDES)}
    return bool(kinds & _BACKWARD) and not any(site.partition(":")[0] in _BACKWARD for site in bad)


def _has_nan(step: Step, site: str) -> bool:
    values = (step.records.get(f"{name}@{site}", 0.0) for name in _MAGNITUDES)
    return step.records.get(f"nan@{site}", 0.0) > 0 or any(math.isnan(v) for v in values)


def _bad_steps(steps: Sequence[Step]) -> list[tuple[Step, list[str]]]:
    """Steps that are not finite, with their bad sites; without what is meant to be so."""
    bad = [(step, sites) for step in steps if (sites := _bad_sites(step))]
    harmless = Counter(
        site
        for step, sites in bad
        if _is_harmless(step, sites)
        for site in sites
        if site.startswith("data:") or not _has_nan(step, site)
    )
    meant = {site for site, times in harmless.items() if times >= MIN_STEPS}
    return [(step, rest) for step, sites in bad if (rest := [site for site in sites if site not in meant])]


def _non_finite(steps: Sequence[Step]) -> Finding | None:
    bad = _bad_steps(steps)
    if not bad:
        return _faulty_rate(steps, {})
    step, sites = bad[0]
    site, records = sites[0], step.records
    counts = [records[a] for name in _COUNTS if (a := f"{name}@{site}") in records]
    count = {"count": counts[0] if f"nonfinite@{site}" in records else sum(counts)} if counts else {}
    figures = {"step": step.step, **count, "bad_sites": len(sites), "bad_steps": len(bad), "steps": len(steps)}
    elements = f" ({count['count']:.0f} elements)" if count else ""
    extent = f"{len(sites)} sites of that step and {len(bad)} of {len(steps)} steps are not finite."
    kind, cause, suggestion = _cause(site, recovered=bad[-1][0] is not steps[-1])
    if kind != "faulty input":
        until = next(n for n, s in enumerate(steps) if s is step)
        rate = _faulty_rate(steps[: until + 1], figures)
        if rate is not None:
            return rate
    return Finding(kind, site, step.step, f"{cause} {site}{elements}, in step {step.step}; {extent}", figures, suggestion)


def _cause(site: str, *, recovered: bool) -> tuple[str, str, str]:
    if site.startswith("data:"):
        advice = "Look at the batch of that step, and filter such examples before they reach the model."
        return "faulty input", "An input of the model is not finite:", advice
    if site.startswith("outside:"):
        advice = "Look at the loss function: log, sqrt, a division by zero or by an empty mask; clamp its argument."
        return "faulty loss", "The forward is finite and the gradient that comes in from the loss is not:", advice
    advice = "Put CheckFinite() on every site: the error then names the op and its line."
    if recovered:
        advice = "The last step is finite again: with a GradScaler such steps are skipped; otherwise clip by norm."
    return "non-finite", "The first value that is not finite is at", advice


def _faulty_rate(steps: Sequence[Step], figures: Mapping[str, float]) -> Finding | None:
    for step in steps:
        for address, rate in step.records.items():
            at = _parse(address)
            if at.record != "lr" or at.kind != "optimizer" or 0 <= rate < math.inf:
                continue
            after = f", and step {figures['step']} is the first that is not finite" if figures else ""
            text = f"The learning rate of {at.site} is {_words(rate)} in step {step.step}{after}."
            known = {"learning_rate": rate, "learning_rate_step": step.step}
            known |= {("first_bad_step" if name == "step" else name): value for name, value in figures.items()}
            advice = "Look at the schedule at that step: a division by zero, or a step beyond its end."
            return Finding("faulty learning rate", at.site, step.step, text, known, advice)
    return None


def _slope(x: Sequence[float], y: Sequence[float]) -> float:
    """Median of the slopes between all pairs of at most 100 points (Theil and Sen): half of them may be outliers."""
    every = -(-len(x) // 100)
    points = list(zip(x, y, strict=True))[::every]
    return median((b[1] - a[1]) / (b[0] - a[0]) for n, a in enumerate(points) for b in points[n + 1 :])


def _smooth(values: Sequence[float]) -> list[float]:
    """Running median of five, of three and one at the ends; a sequence that only rises stays as it is."""
    widths = [min(2, n, len(values) - 1 - n) for n in range(len(values))]
    return [median(values[n - w : n + w + 1]) for n, w in enumerate(widths)]


@dataclass(frozen=True, slots=True)
class _Growth:
    """Where values began to grow, and until where."""

    site: str
    step: int
    factor: float
    first: float
    last: float
    steps: int


def _growth(site: str, series: _Series) -> _Growth | None:
    pairs = [(s, math.log(v)) for s, v in zip(series.steps, series.values, strict=True) if 0 < v < math.inf]
    if len(pairs) < MIN_STEPS:
        return None
    logs = [log for _, log in pairs]
    early, late = median(logs[: max(3, min(10, len(logs) // 4))]), median(logs[-3:])
    if late - early < math.log(EXPLODING):
        return None
    smooth = _smooth(logs)
    first = max((n for n, v in enumerate(smooth) if v <= early), default=0)
    while first > 0 and smooth[first - 1] < smooth[first]:
        first -= 1
    last = next((n for n in range(first + 1, len(smooth)) if smooth[n] >= late - math.log(2)), len(smooth) - 1)
    while last < len(smooth) - 1 and smooth[last + 1] > smooth[last]:
        last += 1
    part, rows = smooth[first : last + 1], pairs[first : last + 1]
    factor = math.exp(min(_slope([s for s, _ in rows], [v for _, v in rows]), 700.0))
    if factor < MIN_GROWTH or not _is_geometric(part):
        return None
    return _Growth(site, rows[0][0], factor, math.exp(part[0]), math.exp(part[-1]), rows[-1][0] - rows[0][0])


def _is_geometric(logs: Sequence[float]) -> bool:
    every = max(1, len(logs) // 20)
    thin = [*logs[:-1:every], logs[-1]]
    travelled = sum(abs(b - a) for a, b in pairwise(thin))
    middle = logs[len(logs) // 2]
    is_steady = logs[-1] - logs[0] >= STEADINESS * travelled
    return is_steady and (len(logs) < MIN_STEPS or logs[-1] - middle >= MIN_LATE_SHARE * (middle - logs[0]))
