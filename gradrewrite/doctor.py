"""Plain answers from the records of a training run: what is wrong, where it begins, and what to try."""

from __future__ import annotations

import json
import math
import os
import sys
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
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
MAX_ONE_LAYER = 0.6  # of the ratio from end to end, in logs; four layers have three steps of 0.33 each
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
                raise ValueError(
                    f"{os.fspath(path)}, line {number}: wanted one JSON object, got {line[:60]!r}"
                ) from err
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
    found = [_non_finite(run), _growing_steps(series), _layers(run, series), *(rule(series) for rule in _HABITS)]
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
    if isinstance(value, int | float) and not isinstance(value, bool):
        return float(value)
    if isinstance(value, str) and value in ("NaN", "Infinity", "-Infinity"):
        return float(value)
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
    return _Address(base if numbered else name, dot + number if numbered else "", site, _kind(site))


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
    return _as_executed(bad)


def _as_executed(sites: Iterable[str]) -> list[str]:
    known = [(_EXECUTION[kind], n, site) for n, site in enumerate(sites) if (kind := _kind(site)) in _EXECUTION]
    return [site for *_, site in sorted((k, -n if k == _EXECUTION["error"] else n, site) for k, n, site in known)]


def _kind(site: str) -> str:
    return site.partition(":")[0]


def _is_harmless(step: Step, bad: Sequence[str]) -> bool:
    """Whether the backward was recorded and is finite."""
    kinds = {_parse(a).kind for a in step.records if _parse(a).record in (*_COUNTS, *_MAGNITUDES)}
    return bool(kinds & _BACKWARD) and not any(_kind(site) in _BACKWARD for site in bad)


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
    return Finding(
        kind, site, step.step, f"{cause} {site}{elements}, in step {step.step}; {extent}", figures, suggestion
    )


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
    first = _last_below(smooth[:-1], early)  # the last value alone shows no return
    before = sorted(smooth[: first + 1])  # all steps at the early level: how high does it reach by itself?
    first = _last_below(smooth[:-1], max(early, before[int(0.9 * len(before))]))
    if first >= len(smooth) - 2:
        return None
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


def _last_below(values: Sequence[float], level: float) -> int:
    return max((n for n, v in enumerate(values) if v <= level), default=0)


def _is_geometric(logs: Sequence[float]) -> bool:
    every = max(1, len(logs) // 20)
    thin = [*logs[:-1:every], logs[-1]]
    travelled = sum(abs(b - a) for a, b in pairwise(thin))
    middle = logs[len(logs) // 2]
    is_steady = logs[-1] - logs[0] >= STEADINESS * travelled
    return is_steady and (len(logs) < MIN_STEPS or logs[-1] - middle >= MIN_LATE_SHARE * (middle - logs[0]))


def _growing_steps(run: _Run) -> Finding | None:
    found = [
        growth
        for address, one in run.items()
        if (at := _parse(address)).record in _MAGNITUDES and at.kind in _BACKWARD and at.kind != "outside"
        if (growth := _growth(at.site, one)) is not None
    ]
    if not found:
        return None
    single = [g for g in found if _kind(g.site) != "group"] or found
    begin = min(g.step for g in single)
    order = {site: n for n, site in enumerate(_as_executed(dict.fromkeys(g.site for g in single)))}
    near = sorted((g for g in single if g.step <= begin + SLACK), key=lambda g: order[g.site])
    worst = max(near, key=lambda g: round(math.log(g.last) - math.log(g.first), 6))
    text = (
        f"{worst.site} grows by a factor of {worst.factor:.4g} per step: from {worst.first:.4g} in step {worst.step} "
        f"to {worst.last:.4g}, {worst.steps} steps later; {len(order)} sites grow like that."
    )
    figures = {"growth_per_step": worst.factor, "from": worst.first, "to": worst.last, "steps": worst.steps}
    advice = f"Lower the learning rate, or clip by a norm near {worst.first:.2g}, the level at which growth begins."
    return Finding("exploding", worst.site, worst.step, text, {**figures, "sites": len(order)}, advice)


def _profile(steps: Sequence[Step], run: _Run) -> tuple[str, list[tuple[str, float]]]:
    """The record that most error sites have, with the median of each site over the steps, walking backward."""
    best: tuple[str, list[tuple[str, float]]] = "", []
    for record in _MAGNITUDES[:3]:
        begin = f"{record}@error:"
        rows = [[a for a in step.records if a.startswith(begin)] for step in steps]
        known = {a: [v for v in run[a].values if math.isfinite(v)] for a in max(rows, key=len, default=[])}
        sites = [(_parse(a).site, median(values)) for a, values in known.items() if values][::-1]
        modules = [pair for pair in sites if "/" not in pair[0]]
        sites = modules if len(modules) >= MIN_LAYERS else sites
        while sites and sites[0][1] == 0:
            del sites[0]  # what the loss does not use
        if len(sites) > len(best[1]):
            best = record, sites
    return best


def _layers(steps: Sequence[Step], run: _Run) -> Finding | None:
    """Errors that grow or shrink geometrically on the way back."""
    record, profile = _profile(steps, run)
    if len(profile) < MIN_LAYERS:
        return None
    points = [(n, math.log(v)) for n, (_, v) in enumerate(profile) if v > 0]
    slope = _slope([n for n, _ in points], [v for _, v in points]) if len(points) > 1 else -math.inf
    fitted = math.exp(min(slope * (len(profile) - 1), 700.0))
    factor, ratio = math.exp(min(slope, 700.0)), profile[-1][1] / profile[0][1]
    is_spread = _is_spread([log for _, log in points])
    explodes = is_spread and min(fitted, ratio) >= EXPLODING_LAYERS and factor >= MIN_LAYER_GROWTH
    vanishes = is_spread and max(fitted, ratio) <= VANISHING_LAYERS and factor <= MAX_LAYER_SHARE
    if not (explodes or vanishes or profile[-1][1] == profile[-2][1] == 0):
        return None
    figures = {
        "growth_per_layer": factor,
        "at_output_end": profile[0][1],
        "at_input_end": profile[-1][1],
        "layers": len(profile),
    }
    return (_exploding_layers if explodes else _vanishing_layers)(steps, record, profile, figures)


def _is_spread(logs: Sequence[float]) -> bool:
    """Whether no single layer makes most of the ratio, as a layer that scales on purpose does."""
    smooth = _smooth(logs)
    largest = max((abs(b - a) for a, b in pairwise(smooth)), default=0.0)
    return largest <= MAX_ONE_LAYER * abs(smooth[-1] - smooth[0])


def _exploding_layers(
    steps: Sequence[Step], record: str, profile: Sequence[tuple[str, float]], figures: dict[str, float]
) -> Finding:
    (first, low), (last, high) = profile[0], profile[-1]
    text = (
        f"Errors grow by a factor of {figures['growth_per_layer']:.4g} per layer on the way back: median {record} is "
        f"{low:.4g} at {first} and {high:.4g} at {last}, over {len(profile)} layers."
    )
    begin = _first_step(steps, f"{record}@{first}", f"{record}@{last}", lambda ratio: ratio >= EXPLODING_LAYERS)
    advice = (
        "Normalise between the layers or start from smaller weights; ClipByNorm on error:* holds it back until then."
    )
    return Finding("exploding", last, begin, text, figures, advice)


def _vanishing_layers(
    steps: Sequence[Step], record: str, profile: Sequence[tuple[str, float]], figures: dict[str, float]
) -> Finding:
    (first, high), (last, low) = profile[0], profile[-1]
    gone = [(site, v) for site, v in profile if v <= VANISHING_LAYERS * high]
    how = f", by a factor of {figures['growth_per_layer']:.4g} per layer"
    if low == 0 and figures["growth_per_layer"] > MAX_LAYER_SHARE:
        how = ""  # zeros at once, not little by little
        figures = {name: value for name, value in figures.items() if name != "growth_per_layer"}
    text = (
        f"Errors vanish on the way back{how}: median {record} is {high:.4g} at {first} and {low:.4g} at {last}, "
        f"over {len(profile)} layers; gone at {_listed(gone)}."
    )
    begin = _first_step(steps, f"{record}@{first}", f"{record}@{last}", lambda ratio: ratio <= VANISHING_LAYERS)
    advice = "Add residual connections or normalisation, or use units that do not saturate."
    if low == 0:
        advice = (
            f"Look at what stands behind {gone[0][0]}: dead units, a detach, a Zero(), or underflow in half precision."
        )
    shares = {f"{record}@{site}": v for site, v in gone[:LISTED]}
    return Finding("vanishing", gone[0][0], begin, text, {**figures, "vanished_layers": len(gone), **shares}, advice)


def _first_step(steps: Sequence[Step], first: str, last: str, is_far: Callable[[float], bool]) -> int:
    for step in steps:
        output, back = step.records.get(first, 0.0), step.records.get(last, math.nan)
        if output > 0 and is_far(back / output):
            return step.step
    return steps[0].step


def _listed(sites: Sequence[tuple[str, float]]) -> str:
    more = f" and {len(sites) - LISTED} more" if len(sites) > LISTED else ""
    return ", ".join(f"{site} ({value:.4g})" for site, value in sites[:LISTED]) + more


@dataclass(frozen=True, slots=True)
class _High:
    """A share that stays high."""

    share: float
    site: str
    step: int
    steps: int


def _high_shares(run: _Run, limits: Mapping[tuple[str, str], float]) -> list[_High]:
    """Sites whose median share over the last steps is above a limit, by record and kind; the worst first."""
    found: dict[str, _High] = {}
    for address, one in run.items():
        at = _parse(address)
        limit = limits.get((at.record, at.kind))
        rows = [(step, v) for step, v in zip(one.steps, one.values, strict=True) if math.isfinite(v)]
        late = [v for _, v in rows[-LAST_STEPS:]]
        if limit is None or len(late) < MIN_STEPS or median(late) <= limit:
            continue
        below = max((n for n, (_, v) in enumerate(rows) if v <= limit), default=-1)
        since = rows[min(below + 1, len(rows) - 1)][0]
        found.setdefault(at.site, _High(median(late), at.site, since, len(late)))
    return sorted(found.values(), key=lambda high: -high.share)


def _share_finding(kind: str, what: str, found: Sequence[_High], suggestion: str) -> Finding | None:
    if not found:
        return None
    worst = found[0]
    listed = _listed([(high.site, high.share) for high in found])
    text = f"{what}, as the median share over the last {worst.steps} steps: {listed}."
    others = {f"share@{high.site}": high.share for high in found[1:LISTED]}
    figures = {"share": worst.share, "steps": worst.steps, "sites": len(found), **others}
    return Finding(kind, worst.site, worst.step, text, figures, suggestion)


def _saturated(run: _Run) -> Finding | None:
    found = _high_shares(run, {("saturated", "activation"): SATURATED})
    advice = "Start from smaller weights or normalise what comes in: a saturated unit passes almost no error on."
    return _share_finding("saturated", "Units sit at the bounds of their tanh or sigmoid", found, advice)


def _dead(run: _Run) -> Finding | None:
    found = _high_shares(run, {("zeros", "activation"): DEAD, ("zeros", "error"): DEAD_ERROR})
    advice = "Lower the learning rate or use a unit that leaks (LeakyReLU, GELU): a unit at zero learns nothing."
    return _share_finding("dead", "Almost all elements are exactly 0", found, advice)


@dataclass(frozen=True, slots=True)
class _Clip:
    """What one clip did.

    Attributes:
        site: Where it stands.
        step: The first step in which it was recorded.
        acted: For each step whether it acted.
        sizes: Norms or largest absolute values before it; finite.
        bound: Its last bound; NaN if that is not known.
    """

    site: str
    step: int
    acted: list[bool]
    sizes: list[float]
    bound: float

    @property
    def share(self) -> float:
        """Share of the steps in which it acted."""
        return sum(self.acted) / len(self.acted)


def _clips(run: _Run) -> list[_Clip]:
    """Clips that were recorded in enough steps."""
    found = [clip for address in run if (clip := _norm_clip(run, _parse(address))) is not None]
    known = {clip.site for clip in found}
    for address, one in run.items():
        at = _parse(address)
        if at.record == "clipped" and at.site not in known:
            sizes = run.get(f"max_abs{at.number}@{at.site}") or run.get(f"max_abs@{at.site}") or _Series([], [])
            finite = [v for v in sizes.values if math.isfinite(v)]
            found.append(_Clip(at.site, one.steps[0], [v > 0 for v in one.values], finite, math.nan))
    return [clip for clip in found if len(clip.acted) >= MIN_CLIP_STEPS]


def _norm_clip(run: _Run, at: _Address) -> _Clip | None:
    """The clip that a bound belongs to; only steps with a finite norm and a finite bound count."""
    names = (f"{name}{number}@{at.site}" for number in (at.number, "") for name in ("norm", "total_norm"))
    norms = next((run[name] for name in names if name in run), None) if at.record == "bound" else None
    if norms is None:
        return None
    one = run[f"bound{at.number}@{at.site}"]
    bounds = dict(zip(one.steps, one.values, strict=True))
    rows = [(s, v, bounds.get(s, math.nan)) for s, v in zip(norms.steps, norms.values, strict=True)]
    rows = [row for row in rows if math.isfinite(row[1]) and math.isfinite(row[2])]
    if not rows:
        return None
    return _Clip(at.site, rows[0][0], [v > b for _, v, b in rows], [v for _, v, _ in rows], rows[-1][2])


def _clips_always(run: _Run) -> Finding | None:
    found = sorted((c for c in _clips(run) if c.share > CLIPS_ALWAYS), key=lambda clip: -clip.share)
    if not found:
        return None
    worst = found[0]
    figures = {"share": worst.share, "steps": len(worst.acted), "sites": len(found)}
    figures |= {} if math.isnan(worst.bound) else {"bound": worst.bound}
    figures |= {f"share@{clip.site}": clip.share for clip in found[1:LISTED]}
    advice = "Raise the threshold: a clip that always acts sets the length of every update by itself."
    if len(worst.sizes) > 1:
        figures["percentile_90"] = quantiles(worst.sizes, n=10, method="inclusive")[-1]
        advice = (
            f"Raise the threshold to about {figures['percentile_90']:.3g}, which 90 % of the values seen stay below."
        )
    sites = _listed([(clip.site, clip.share) for clip in found])
    text = f"A clip acts in nearly every one of {len(worst.acted)} steps, as the share of the steps: {sites}."
    return Finding("clip acts always", worst.site, worst.step, text, figures, advice)


def _clips_never(run: _Run) -> Finding | None:
    idle = [clip for clip in _clips(run) if not any(clip.acted) and math.isfinite(clip.bound)]
    found = sorted(idle, key=lambda clip: max(clip.sizes) / clip.bound)
    if not found:
        return None
    worst = found[0]
    largest = max(worst.sizes)
    figures = {"largest_norm": largest, "bound": worst.bound, "steps": len(worst.acted), "sites": len(found)}
    figures |= {f"largest_norm@{clip.site}": max(clip.sizes) for clip in found[1:LISTED]}
    sites = _listed([(clip.site, max(clip.sizes)) for clip in found])
    text = (
        f"A clip with the bound {worst.bound:.4g} never acts in {len(worst.acted)} steps; largest norms seen: {sites}."
    )
    advice = f"If it is to act at all, set the threshold below {largest:.3g}, the largest norm seen."
    return Finding("clip never acts", worst.site, worst.step, text, figures, advice)


_HABITS = (_saturated, _dead, _clips_always, _clips_never)
